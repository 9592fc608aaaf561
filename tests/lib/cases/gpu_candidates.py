"""Requests, one or more for every kernel of the dispatch table, with the checks of their answers.

A test that needs no GPU finds kernels that no request reaches, so a new kernel gets its candidates when it is added to
the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases.poison import paginate, poison_unseen, poison_unseen_backward
from inside.kernels import FIRST_FP8_CAPABILITY, capability
from inside.testing import cast

import gpu_actors as ga
from gpu_actors.reference import attention_backward, attention_forward
from gpu_actors.testing import check_gradients, check_output, random_backward, random_forward

__all__ = ["CANDIDATES", "REPEATABLE", "Asked", "Candidate"]

Check = Callable[[Any, str], None]
_SEQLENS = (150, 300)


@dataclass(frozen=True)
class Asked:
    """check: takes the result and the name of the kernel that answered. Raises AssertionError."""

    request: Any
    check: Check


@dataclass(frozen=True)
class Candidate:
    """make: builds the request. first: the lowest compute capability that has it."""

    name: str
    make: Callable[[], Asked]
    first: int = 80

    def runs_on(self, arch: str) -> bool:
        return capability(arch) >= self.first

    def __str__(self) -> str:
        return self.name


def _forward(seed: int, compute: str | None = None, **choices: Any) -> Callable[[], Asked]:
    def make() -> Asked:
        case = poison_unseen(random_forward(seed, kind="gaussian", **{"seqlens": _SEQLENS, "features": (), **choices}))
        more = {} if compute is None else {"compute": compute}
        request = ga.FlashForward(*case.inputs, **case.options, **more, return_lse=True)
        low = "float8_e4m3fn" if case.q.dtype.itemsize == 1 else None

        def check(result: Any, kernel: str) -> None:
            # Only kernels that multiply 8-bit weights round them.
            weights = low if kernel not in ("forward_simple", "reference") else None
            reduced = None if compute == "f32" else compute
            check_output(
                result.out,
                result.lse,
                *case.inputs,
                repro=case.repro,
                compute=reduced,
                weights_dtype=weights,
                **case.options,
            )

        return Asked(request, check)

    return make


def _backward(seed: int, deterministic: bool = False, **choices: Any) -> Callable[[], Asked]:
    def make() -> Asked:
        drawn = random_backward(seed, seqlens=_SEQLENS, kind="gaussian", **{"features": (), **choices})
        case = poison_unseen_backward(drawn)
        dout, q, k, v, out, lse = case.inputs
        request = ga.FlashBackward(q, k, v, dout=dout, out=out, lse=lse, deterministic=deterministic, **case.options)

        def check(result: Any, kernel: str) -> None:
            check_gradients(result, *case.arguments, out=out, lse=lse, repro=case.repro, **case.options)

        return Asked(request, check)

    return make


def _shared_backward() -> Asked:
    """Three sequences share k and v, whose gradients are sums."""
    rng = np.random.default_rng(21)
    q, dout = (cast(rng.standard_normal((3, 200, 4, 64)), "bfloat16") for _ in range(2))
    k, v = (cast(rng.standard_normal((1, 300, 2, 64)), "bfloat16") for _ in range(2))
    whole = {"q": q, "k": np.repeat(k, 3, axis=0), "v": np.repeat(v, 3, axis=0), "causal": True}
    given = attention_forward(**whole)
    out, lse = given.out.astype(q.dtype), given.lse.astype(np.float32)
    wanted = attention_backward(dout, **whole, out=out, lse=lse)

    def check(result: Any, kernel: str) -> None:
        sums = (wanted.dq, wanted.dk.sum(axis=0, keepdims=True), wanted.dv.sum(axis=0, keepdims=True))
        for gradient, exact in zip(result[:3], sums, strict=True):
            assert gradient.shape == exact.shape
            error = np.abs(np.asarray(gradient, np.float64) - exact).max()
            assert error < 2.0**-4 * np.abs(exact).max()

    return Asked(ga.FlashBackward(q, k, v, dout=dout, out=out, lse=lse, causal=True), check)


def _decode(
    lengths: tuple[int, ...],
    *,
    rows: int = 1,
    dim: int = 128,
    page: int | None = 64,
    dtype: str = "bfloat16",
    **options: Any,
) -> Callable[[], Asked]:
    """page: keys a page; None: one cache array a sequence, through BatchedDecode."""

    def make() -> Asked:
        rng = np.random.default_rng(len(lengths) + rows)
        q = cast(rng.standard_normal((len(lengths), rows, 8, dim)), dtype)
        k, v = ([cast(rng.standard_normal((n, 2, dim)), dtype) for n in lengths] for _ in range(2))
        seqlens = np.array(lengths, np.int32)
        if page is None:
            caches = [[np.ascontiguousarray(x.swapaxes(0, 1)) for x in _padded(side)] for side in (k, v)]
            request: Any = ga.BatchedDecode(
                q=q[:, 0], k_caches=caches[0], v_caches=caches[1], seq_lens=seqlens, **options
            )
        else:
            pool = paginate(rng, k, v, page)
            request = ga.PagedForward(
                q=q,
                k_cache=pool.k,
                v_cache=pool.v,
                block_table=pool.block_table,
                cache_seqlens=pool.cache_seqlens,
                **options,
            )

        def check(result: Any, kernel: str) -> None:
            out = np.asarray(result.out).reshape(-1, 8, dim)
            ends = {"cu_seqlens_q": len(lengths) * [rows], "cu_seqlens_k": lengths}
            packed = {name: np.cumsum([0, *steps]).astype(np.int32) for name, steps in ends.items()}
            inputs = (q.reshape(-1, 8, dim), np.concatenate(k), np.concatenate(v))
            check_output(out, None, *inputs, causal=True, **packed, **options)

        return Asked(request, check)

    return make


def _latent(lengths: tuple[int, ...], *, rows: int = 1, heads: int = 16, page: int = 64) -> Callable[[], Asked]:
    """Over a latent cache of DeepSeek's dims: the first 512 columns of a key are its value."""

    def make() -> Asked:
        rng = np.random.default_rng(len(lengths) + rows)
        q = cast(rng.standard_normal((len(lengths), rows, heads, 576)), "bfloat16")
        k = [cast(rng.standard_normal((n, 1, 576)), "bfloat16") for n in lengths]
        pool = paginate(rng, k, k, page)
        named = {"block_table": pool.block_table, "cache_seqlens": pool.cache_seqlens}
        request = ga.PagedForward(q=q, k_cache=pool.k, v_cache=None, latent_dim=512, softmax_scale=0.07, **named)

        def check(result: Any, kernel: str) -> None:
            ends = {"cu_seqlens_q": len(lengths) * [rows], "cu_seqlens_k": lengths}
            packed = {name: np.cumsum([0, *steps]).astype(np.int32) for name, steps in ends.items()}
            keys = np.concatenate(k)
            inputs = (q.reshape(-1, heads, 576), keys, keys[..., :512])
            out = np.asarray(result.out).reshape(-1, heads, 512)
            check_output(out, None, *inputs, causal=True, softmax_scale=0.07, **packed)

        return Asked(request, check)

    return make


def _padded(sequences: list[Any]) -> list[Any]:
    """Every sequence, padded with NaN to three rows more than the longest."""
    longest = max(map(len, sequences)) + 3
    return [np.concatenate([x, np.full((longest - len(x), *x.shape[1:]), np.nan, x.dtype)]) for x in sequences]


CANDIDATES = (
    *(
        Candidate(f"forward {dtype} {dim} {mask or 'full'}{' varlen' * varlen}", make)
        for dtype in ("float16", "bfloat16")
        for dim in (64, 96, 128, 192, 256)
        for mask, varlen in (("", False), ("causal", False), ("window", True))
        for make in (_forward(dim, dtype=dtype, head_dim=dim, varlen=varlen, always=(mask,) * bool(mask)),)
    ),
    *(
        Candidate(
            f"forward float32 as {compute}", _forward(3, compute, dtype="float32", head_dim=64, always=("causal",))
        )
        for compute in ("f32", "tf32", "f16", "bf16")
    ),
    *(
        Candidate(
            f"forward {dtype} {dim}{' causal' * ('causal' in always)}",
            _forward(4, dtype=dtype, head_dim=dim, always=always),
            FIRST_FP8_CAPABILITY,
        )
        for dtype in ("float8_e4m3fn", "float8_e5m2")
        for dim, always in ((64, ()), (128, ("descales",)), (128, ("causal", "descales")))
    ),
    Candidate(
        "forward float8_e4m3fn grouped",
        _forward(4, dtype="float8_e4m3fn", head_dim=64, heads=(4, 2)),
        FIRST_FP8_CAPABILITY,
    ),
    Candidate("forward 192/128", _forward(14, dtype="bfloat16", head_dim=192, head_dim_v=128, always=("causal",))),
    Candidate("forward 512", _forward(15, dtype="bfloat16", head_dim=512, varlen=False)),
    *(
        Candidate(
            f"forward of {rows} rows{' causal' * bool(always)}",
            _forward(
                16, dtype="bfloat16", head_dim=128, varlen=False, heads=(8, 2), seqlens=(rows, 3001), always=always
            ),
        )
        for rows, always in ((1, ()), (20, ("causal",)))
    ),
    Candidate("forward 320/264", _forward(17, dtype="float16", head_dim=320, head_dim_v=264, always=("causal",))),
    Candidate("forward float64", _forward(5, dtype="float64", head_dim=40)),
    *(
        Candidate(f"forward with {option}", _forward(6, dtype="bfloat16", head_dim=128, varlen=False, always=(option,)))
        for option in ("softcap", "alibi", "sinks", "bias", "dropout")
    ),
    *(
        Candidate(f"backward {dtype} {dim} {mask or 'full'}", make)
        for dtype in ("float16", "bfloat16")
        for dim in (64, 128)
        for mask in ("", "causal")
        for make in (_backward(dim, dtype=dtype, head_dim=dim, varlen=False, always=(mask,) * bool(mask)),)
    ),
    *(
        Candidate(
            f"backward with {option}", _backward(9, dtype="bfloat16", head_dim=128, varlen=False, always=(option,))
        )
        for option in ("bias", "window", "sinks", "softcap", "alibi", "dropout")
    ),
    Candidate("backward of wide heads", _backward(10, dtype="bfloat16", head_dim=256, varlen=False)),
    Candidate("backward of one k and v for a batch", _shared_backward),
    Candidate("backward varlen", _backward(7, dtype="bfloat16", head_dim=64, varlen=True, always=("causal",))),
    Candidate(
        "backward with a bias and dropout",
        _backward(12, dtype="bfloat16", head_dim=64, varlen=False, always=("bias", "dropout")),
    ),
    Candidate(
        "backward with a bias and a softcap of wide heads",
        _backward(13, dtype="bfloat16", head_dim=192, varlen=False, always=("bias", "softcap")),
    ),
    Candidate("backward float32", _backward(11, dtype="float32", head_dim=64, varlen=False, always=("causal",))),
    Candidate(
        "backward deterministic",
        _backward(8, deterministic=True, dtype="bfloat16", head_dim=128, varlen=False, always=("causal",)),
    ),
    Candidate("decode", _decode((1, 64, 300, 1000))),
    Candidate("decode many keys", _decode((5000, 3))),
    Candidate("decode several rows", _decode((40, 300, 1000), rows=5)),
    Candidate("decode 160 packed rows", _decode((60, 300, 1000), rows=40)),
    Candidate("prefill a chunk", _decode((200, 400), rows=100)),
    Candidate("decode of small pages", _decode((17, 250), page=16, dim=64, dtype="float16")),
    Candidate("decode of single keys", _decode((17, 250), page=1)),
    Candidate("decode of pages of 5 keys", _decode((40, 300), rows=5, page=5, dim=64)),
    Candidate("decode 512", _decode((40, 300), dim=512)),
    Candidate("decode of a latent cache", _latent((40, 0, 300))),
    Candidate("decode several rows of a latent cache", _latent((40, 300), rows=3, heads=6, page=16)),
    Candidate("decode of arrays", _decode((1, 64, 300, 1000), page=None)),
    *(
        Candidate(f"decode {dtype} {dim}", _decode((1, 64, 300, 1000), rows=3, dim=dim, page=16, dtype=dtype))
        for dtype, dim in (("float32", 128), ("float64", 64), ("float16", 20))
    ),
    Candidate("decode of float32 arrays", _decode((1, 64, 300), page=None, dim=40, dtype="float32")),
    *(
        Candidate(f"decode of {dtype}{' and many rows' * (rows > 1)}", _decode((40, 300, 1000), rows=rows, dtype=dtype))
        for dtype in ("float8_e4m3fn", "float8_e5m2")
        for rows in (1, 5)
    ),
    Candidate("decode in a window", _decode((300, 1000), window_size=(100, -1))),
)

# The candidates whose answers have the same bits every time: of the gradients, the deterministic ones.
REPEATABLE = tuple(
    candidate
    for candidate in CANDIDATES
    if not candidate.name.startswith("backward") or candidate.name == "backward deterministic"
)
