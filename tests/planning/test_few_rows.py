"""Dense requests of few rows end to end: a group's rows packed, keys split, and the answer that tiles would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes.known_device import known_device
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.forward import broadcast_batch, pose_forward, weigh_forward
from gpu_actors.testing import check_output

OPTIONS: dict[str, Any] = {"causal": True, "window_size": (900, -1), "sink_tokens": 2}


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def emulated(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated", ga.ContextOptions(arch=request.param)) as ctx:
        yield ctx


def arrays(rows: int, keys: int, heads: tuple[int, int] = (8, 1), batch: int = 1, dim: int = 64) -> list[np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = ((batch, rows, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim))
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def test_packed_rows_have_the_answer_of_the_oracle(emulated: ga.GpuContext) -> None:
    operands = arrays(5, 1101)
    key = emulated.flash_attn.inspect_key(ga.FlashForward(*operands, **OPTIONS))
    assert key.kernel == ("decode_sm90" if key.arch == "sm_90a" else "decode_mma")
    for heads_first in (False, True):  # the second finds the plan of the first
        out = np.full((1, 8, 5, 64) if heads_first else (1, 5, 8, 64), np.nan, np.float16)
        out = out.swapaxes(1, 2) if heads_first else out
        result = emulated.flash_attn.forward(*operands, **OPTIONS, return_lse=True, out=out).result(120)
        assert result.out is out
        assert (result.lse.shape, result.lse.dtype) == ((1, 8, 5), np.float32)
        check_output(out, result.lse, *operands, **OPTIONS)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("option", ["one row of a bias", "a mask", "chunks", "float32"])
def test_an_option_means_the_same(emulated: ga.GpuContext, option: str) -> None:
    q, k, v = arrays(7, 1301, batch=2)
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {
        "one row of a bias": {"bias": rng.standard_normal((2, 1, 1, 1301)).astype(np.float32)},
        "a mask": {"bias": rng.random((1, 8, 7, 1301)) < 0.5},
        "chunks": {"causal": True, "attention_chunk": 1299},
        "float32": {"causal": True, "out_dtype": "float32"},
    }[option]
    request = ga.FlashForward(q, k, v, return_lse=True, **options)
    assert emulated.flash_attn.inspect_key(request).layout == "cache"
    result = emulated.flash_attn.submit(request).result(120)
    if option == "float32":
        assert result.out.dtype == np.float32
        result = result._replace(out=result.out.astype(np.float16))
        options.pop("out_dtype")
    check_output(result.out, result.lse, q, k, v, **options)


def test_heads_before_rows_are_packed_as_they_lie(mock: ga.GpuContext) -> None:
    """cuDNN's messages give such arrays."""
    operands = [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays(5, 1101)]
    assert mock.flash_attn.inspect_key(ga.FlashForward(*operands)).kernel == "decode_sm90"


def test_a_mock_device_answers_by_the_oracle(mock: ga.GpuContext) -> None:
    operands = arrays(5, 1101)
    result = mock.flash_attn.forward(*operands, **OPTIONS, return_lse=True).result(60)
    check_output(result.out, result.lse, *operands, **OPTIONS)


@pytest.mark.parametrize("shared", ["q", "k", "v"])
def test_one_sequence_that_stands_for_all_stays_in_tiles(mock: ga.GpuContext, shared: str) -> None:
    operands = dict(zip("qkv", arrays(5, 1101, batch=3), strict=True))
    assert mock.flash_attn.inspect_key(ga.FlashForward(**operands)).layout == "cache"
    one = ga.FlashForward(**{**operands, shared: operands[shared][:1]})
    assert mock.flash_attn.inspect_key(one).kernel == "forward_sm90"
    assert weigh_forward(broadcast_batch(one), known_device(mock.info))[2] is None
    alone = ga.FlashForward(**{name: array[:1] for name, array in operands.items()})
    assert mock.flash_attn.inspect_key(alone).layout == "cache", "one sequence stands for itself"


def on_device(array: np.ndarray, address: int, gap: int = 0) -> DeviceArray:
    """gap: bytes behind each row."""
    _, rows, heads, dim = array.shape
    row = heads * dim * 2 + gap
    return DeviceArray(address, array.shape, (rows * row, row, dim * 2, 2), array.dtype, 0)


@pytest.mark.parametrize(
    ("address", "gap", "kernel"),
    [
        (1 << 20, 0, "decode_sm90"),
        (1 << 20, 16, "decode_sm90"),
        ((1 << 20) + 2, 0, "forward_mma"),
        (1 << 20, 8, "forward_mma"),
    ],
)
def test_where_keys_lie_on_the_device_decides(mock: ga.GpuContext, address: int, gap: int, kernel: str) -> None:
    """Copies in chunks of 16 bytes need rows that begin at multiples of 16 bytes."""
    q, k, v = arrays(5, 1101)
    for moved in ("k", "v"):
        places = {"k": (1 << 22, 0), "v": (1 << 24, 0), moved: (address, gap)}
        request = ga.FlashForward(on_device(q, 1 << 26), on_device(k, *places["k"]), on_device(v, *places["v"]))
        assert pose_forward(request, known_device(mock.info))[1].kernel == kernel
    one = (dataclasses.replace(array, strides=(0, *array.strides[1:])) for array in (request.k, request.v))
    assert pose_forward(ga.FlashForward(request.q, *one), known_device(mock.info))[1].kernel == kernel, (
        "a batch of one has no stride"
    )


def test_the_devices_multiprocessors_decide(mock: ga.GpuContext) -> None:
    request = ga.FlashForward(*arrays(16, 1024, heads=(8, 8), dim=128))
    for count, kernel in ((None, "decode_sm90"), (132, "decode_sm90"), (8, "forward_sm90")):
        info = dataclasses.replace(mock.info, multiprocessors=count)
        assert pose_forward(request, known_device(info))[1].kernel == kernel


def test_queries_that_tma_cannot_move_are_packed_without_it(mock: ga.GpuContext) -> None:
    q, k, v = arrays(5, 1101)
    request = ga.FlashForward(on_device(q, (1 << 26) + 2), on_device(k, 1 << 22), on_device(v, 1 << 24))
    assert pose_forward(request, known_device(mock.info))[1].kernel == "decode_mma"


def test_explain_has_the_rule_and_its_numbers(mock: ga.GpuContext) -> None:
    packed = mock.flash_attn.explain(ga.FlashForward(*arrays(5, 1101), **OPTIONS))
    verdicts = {verdict.family: verdict for verdict in packed.verdicts}
    assert packed.key == mock.flash_attn.inspect_key(ga.FlashForward(*arrays(5, 1101), **OPTIONS))
    assert [name for name, verdict in verdicts.items() if verdict.taken] == ["decode_sm90"]
    for name in ("forward_sm90", "forward_mma", "forward_simple"):
        assert "rows are packed by FlashAttention's rule" in verdicts[name].reason
        assert "in forward_sm90 one head's rows fill" in verdicts[name].reason
    assert "comes first" in verdicts["decode_mma"].reason
    assert {"decode_sm90", "decode_mma"} <= {cell.family for cell in packed.options}

    alone = ga.FlashForward(*arrays(5, 101, heads=(8, 8)))
    tiled = mock.flash_attn.explain(alone)
    assert tiled.key == mock.flash_attn.inspect_key(alone)
    verdicts = {verdict.family: verdict for verdict in tiled.verdicts}
    assert [name for name, verdict in verdicts.items() if verdict.taken] == ["forward_sm90"]
    for name in ("decode_sm90", "decode_mma", "decode_simple"):
        assert "rows stay in tiles by FlashAttention's rule" in verdicts[name].reason

    many = mock.flash_attn.explain(ga.FlashForward(*arrays(64, 1101)))
    assert not any("FlashAttention's rule" in verdict.reason for verdict in many.verdicts)


def test_the_caller_decides_before_the_rule(mock: ga.GpuContext) -> None:
    packed, tiled = arrays(5, 1101), arrays(5, 101, heads=(8, 8))
    for operands, asked, kernel in (
        (packed, None, "decode_sm90"),
        (packed, True, "decode_sm90"),
        (packed, False, "forward_sm90"),
        (tiled, None, "forward_sm90"),
        (tiled, False, "forward_sm90"),
        (tiled, True, "decode_mma"),
        (arrays(64, 1101), True, "forward_sm90"),
    ):
        request = ga.FlashForward(*operands, pack_gqa=asked)
        assert mock.flash_attn.inspect_key(request).kernel == kernel, asked
        result = mock.flash_attn.forward(*operands, pack_gqa=asked, return_lse=True).result(60)
        check_output(result.out, result.lse, *operands)
    explained = str(mock.flash_attn.explain(ga.FlashForward(*packed, pack_gqa=False)))
    assert "pack_gqa=False: rows stay in tiles" in explained


@pytest.mark.parametrize("value", [1, 0, "auto"])
def test_another_choice_is_refused(mock: ga.GpuContext, value: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="must be True or False") as refusal:
        mock.flash_attn.forward(*arrays(5, 101), pack_gqa=value).result(60)
    assert refusal.value.field == "pack_gqa"
