"""DeepSeek-V3's attention at its own head dims, beside Transformers' eager attention on the CPU: prefill by the kernels
at (192, 128), and decoding with absorbed projections over a KvCache of the latents that Transformers' cache keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inside.reference import UNIT_ROUNDOFF, compare, row_bound

import gpu_actors as ga

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
bridge = pytest.importorskip("gpu_actors.interop.transformers")
models: Any = pytest.importorskip("support.torch_models")

NOPE, ROTARY, LATENT = 128, 64, 512
HEADS, ROWS = 2, 75
PADDING = {"none": None, "left": torch.tensor([[1] * ROWS, [0] * 30 + [1] * (ROWS - 30)])}


def layer_of(dtype: Any) -> Any:
    """A model of one dense layer."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROTARY,
        v_head_dim=NOPE,
        n_routed_experts=4,
        first_k_dense_replace=1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "self_attn" in name and parameter.ndim == 2:  # so that weights differ strongly among keys
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(dtype)


class Watched:
    """The inputs of a model's one attention layer, and eager attention's answers in float64 and in their dtype."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.query: Any = None
        self.exact: Any = None
        self.magnitude: Any = None
        self.outputs: list[Any] = []
        transformers.AttentionInterface.register("watched", self._attend)
        transformers.masking_utils.AttentionMaskInterface.register("watched", transformers.masking_utils.eager_mask)
        attention = model.model.layers[0].self_attn
        self._eager = transformers.models.deepseek_v3.modeling_deepseek_v3.eager_attention_forward
        self._hook = attention.o_proj.register_forward_pre_hook(self._seen)

    def run(self, implementation: str, ids: Any, **given: Any) -> Any:
        """The rows of attention's output, (batch, rows, heads, columns)."""
        self.model.set_attn_implementation(implementation)
        self.outputs.clear()
        with torch.no_grad():
            self.model(ids, **given)
        (found,) = self.outputs
        return found.reshape(*ids.shape, HEADS, NOPE)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        self.query = query
        wide = [one.double() for one in (query, key, value)]
        mask = None if mask is None else mask.double()
        self.exact, weights = self._eager(module, *wide, mask, **given)
        self.magnitude = (weights @ wide[2].abs()).transpose(1, 2)
        return self.exact.to(query.dtype), None

    def _seen(self, _: Any, given: Any) -> None:
        self.outputs.append(given[0])


def as_double(x: Any) -> Any:
    return x.double().numpy()


@pytest.fixture(params=["sm_80", "sm_90a"])
def emulated(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated", ga.ContextOptions(arch=request.param)) as ctx:
        bridge.register(ctx, "emulated")
        yield ctx
        rows = [np.zeros((1, ROWS, HEADS, dim), np.float16) for dim in (NOPE + ROTARY, NOPE + ROTARY, NOPE)]
        kernel = {"sm_80": "forward_mma", "sm_90a": "forward_sm90"}[request.param]
        assert ctx.flash_attn.inspect_key(ga.FlashForward(*rows, causal=True)).kernel == kernel


@pytest.mark.parametrize(("padding", "dtype"), [("none", "bfloat16"), ("left", "float16")])
def test_a_prefill_is_within_the_error_of_eager_attention(emulated: ga.GpuContext, padding: str, dtype: str) -> None:
    watched = Watched(layer_of(getattr(torch, dtype)))
    ids = torch.randint(1, 50, (2, ROWS), generator=torch.Generator().manual_seed(1))
    mask = PADDING[padding]
    eager, found = (watched.run(name, ids, attention_mask=mask) for name in ("eager", "emulated"))
    watched.run("watched", ids, attention_mask=mask)
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    exact, low, got, size = (as_double(one[kept]) for one in (watched.exact, eager, found, watched.magnitude))
    bound = np.maximum(row_bound(exact, low, dtype, 2.0), UNIT_ROUNDOFF[dtype] * (size + np.abs(exact)))
    compare("out", got, exact, bound, f"{padding}, {dtype}")
    assert emulated.stats()["flash_attn"].completed == 1


def test_decoding_over_a_cache_of_latents_is_eager_attention() -> None:
    """Transformers' cache keeps the same latents, and the halves of kv_b_proj multiply q and the output."""
    watched = Watched(layer_of(torch.float32))
    attention = watched.model.model.layers[0].self_attn
    up = attention.kv_b_proj.weight.detach().view(HEADS, 2 * NOPE, LATENT)
    kept = transformers.DynamicCache(config=watched.model.config)
    ids = torch.randint(1, 50, (2, 23), generator=torch.Generator().manual_seed(2))
    watched.run("eager", ids[:, :20], **{models.CACHE: kept})

    def latents(begin: int) -> dict[str, Any]:
        """Rows of Transformers' cache, (batch, rows, 1, columns)."""
        parts = kept.layers[0].keys, kept.layers[0].values
        return {name: part[:, :, begin:].transpose(1, 2) for name, part in zip(("c_kv", "k_pe"), parts, strict=True)}

    spec = {"num_blocks": 8, "page_size": 8, "kv_heads": 1, "head_dim": LATENT + ROTARY, "dtype": torch.float32}
    with ga.open_context("mock") as ctx, ctx.kv_cache(**spec, latent_dim=LATENT) as cache:
        seqs = [cache.create().result(30.0) for _ in range(2)]
        cache.append(seqs, **latents(0)).result(30.0)
        for step in range(20, 23):
            wanted = watched.run("watched", ids[:, step : step + 1], **{models.CACHE: kept})
            q_nope, q_pe = watched.query.transpose(1, 2).split([NOPE, ROTARY], dim=-1)
            absorbed = torch.einsum("brhd,hdl->brhl", q_nope, up[:, :NOPE])
            options = {"q_pe": q_pe, "softmax_scale": attention.scaling}
            found = cache.attend(absorbed, seqs, **latents(step), **options).result(30.0).out
            out = torch.einsum("brhl,hdl->brhd", found, up[:, NOPE:])
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=2e-5)
        assert [cache.length(seq) for seq in seqs] == [23, 23]
