"""Prints as JSON what is imported while requests are answered: python launch_imports.py DEVICE FOLDER

Requests of every kind go to a context on ``mock``, ``emulated`` or ``cuda``, which here has a fake driver and fake
cubins. Cubins are cached in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cases.array_entries import ENTRIES
from inside.devices import select

import gpu_actors as ga

OWN = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1.0f; }'


def pretend_cuda() -> None:
    from fakes.cuda import FakeCuda
    from inside.compiling import Compiler, load_nvrtc
    from inside.cuda import CudaDevice, device

    from gpu_actors import Cubin, KernelResources, KernelSource

    class Kernels(dict[str, Any]):
        """Kernels of any name, which do nothing."""

        def __contains__(self, name: object) -> bool:
            return True

        def __missing__(self, name: str) -> Any:
            return lambda memory, params, geometry: None

    def compile(self: Compiler, source: KernelSource, arch: str | None = None) -> Cubin:
        load_nvrtc()
        resources = dict.fromkeys(source.entry_points, KernelResources(32, 0, 0, 0))
        return Cubin(b"image", source.resolve_arch(arch), source.entry_points, "", resources)

    kernels = Kernels()
    kernels["k"] = None  # FakeCuda would replace an empty dict
    cuda = FakeCuda(kernels)
    select._open = lambda spec, options: CudaDevice(0, options, api=cuda)  # type: ignore[assignment]
    device.caller_streams = lambda index: None  # type: ignore[assignment]
    Compiler.compile = compile  # type: ignore[method-assign]


def build_few() -> None:
    """Build only the first kernel and OWN; others do nothing. The same code builds and launches all kernels."""
    from inside.emulation import emulated_api

    class Idle:
        def parameter_bytes(self, entry: str) -> None:
            return None

        def launch(self, *_: Any, **__: Any) -> None:
            pass

    build = emulated_api.build_module
    first: list[Any] = []

    def build_first(source: str, macros: Any, *rest: Any, **options: Any) -> Any:
        first.append((source, macros))
        needed = (source, macros) == first[0] or source == OWN
        return build(source, macros, *rest, **options) if needed else Idle()

    emulated_api.build_module = build_first  # type: ignore[assignment]


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)


def requests(ctx: ga.GpuContext) -> dict[str, Callable[[], Any]]:
    """One of each kind, of a dtype and sizes that every device takes."""
    flash, cudnn = ctx.flash_attn, ctx.cudnn
    q, k, v = normal(1, 3, 2, 64), normal(1, 5, 1, 64), normal(1, 5, 1, 64)
    packed = {"cu_seqlens_q": np.int32([0, 3]), "cu_seqlens_k": np.int32([0, 5]), "max_seqlen_q": 3, "max_seqlen_k": 5}
    lse = np.zeros((1, 2, 3), np.float32)
    pool = normal(2, 16, 1, 64)
    where = {"block_table": np.int32([[0, 1]]), "cache_seqlens": np.int32([20])}
    params = ga.AttentionParams(1, 3, 5, 2, 1, 64)
    heads_first = [np.ascontiguousarray(array.transpose(0, 2, 1, 3)) for array in (q, k, v)]
    out, stats = heads_first[0], np.zeros((1, 2, 3, 1), np.float32)

    def graph() -> Any:
        graph = ga.OperationGraph()
        a, b, c = (graph.tensor(uid=uid, dims=(1, 2, 5, 64), dtype="bfloat16") for uid in (1, 2, 3))
        graph.output(
            graph.matmul(graph.softmax(graph.matmul(a, graph.transpose(b)) * 0.25), c),
            uid=4,
            dtype="bfloat16",
        )
        return cudnn.execute(graph, dict.fromkeys((1, 2, 3), normal(1, 2, 5, 64)))

    return {
        "forward": lambda: flash.forward(q, k, v, return_lse=True),
        "options": lambda: flash.forward(q, k, v, causal=True, softcap=5.0, alibi_slopes=np.ones(2, np.float32)),
        "dropout": lambda: flash.forward(q, k, v, dropout_p=0.5, dropout_seed=1),
        "varlen": lambda: flash.forward(q[0], k[0], v[0], **packed),
        "backward": lambda: flash.backward(q, q, k, v, q, lse),
        "deterministic": lambda: flash.backward(q, q, k, v, q, lse, deterministic=True),
        "paged": lambda: flash.paged_forward(q[:, :1], pool, pool, **where),
        "prefill": lambda: flash.paged_forward(q, pool, pool, **where),
        "decode": lambda: flash.decode(q[:, 0], [k[0].transpose(1, 0, 2)], [v[0].transpose(1, 0, 2)], np.int32([5])),
        "mha_forward": lambda: cudnn.mha_forward(params, *heads_first, return_stats=True),
        "mha_backward": lambda: cudnn.mha_backward(params, *heads_first, out, out, stats),
        "graph": graph,
    }


def use_cache(ctx: ga.GpuContext) -> None:
    rows = normal(1, 3, 1, 64)
    with ctx.kv_cache(num_blocks=8, page_size=16, kv_heads=1, head_dim=64, dtype="bfloat16") as cache:
        seq = cache.create().result(60)
        cache.append([seq], rows, rows, rope=ga.Rope(dim=32)).result(60)
        fork = cache.fork(seq).result(60)
        cache.attend(normal(1, 1, 2, 64), [fork], k=rows[:, :1], v=rows[:, :1]).result(60)
        cache.free(fork).result(60)
        cache.stats()


def own_kernel(ctx: ga.GpuContext) -> None:
    kernel = ctx.kernel(OWN, "k").result(120)
    kernel.launch(grid=1, block=32, args=(np.zeros(32, np.float32),)).result(60)


def main() -> int:
    spec, cubins = sys.argv[1:]
    if spec == "cuda":
        pretend_cuda()
    if spec == "emulated":
        build_few()
    os.environ["GPU_ACTORS_CACHE_DIR"] = cubins
    imported: dict[str, list[str]] = {}
    known: set[str] = set()

    def after(name: str) -> None:
        imported[name] = sorted(set(sys.modules) - known)
        known.update(sys.modules)

    with ga.open_context(spec, ga.ContextOptions(qualify="off")) as ctx:
        known.update(sys.modules)
        for name, ask in requests(ctx).items():
            ask().result(120)
            after(name)
        use_cache(ctx)
        after("cache")
        if spec == "mock":  # with every operand
            for name, entry in ENTRIES.items():
                entry.ask(ctx, entry.arrays).result(120)
                after(f"all of {name}")
        ctx.health()
        ctx.stats()
        after("health and stats")
        if spec == "emulated":  # with only the executor built, which takes seconds
            from inside.emulation import Executor, Toolchain

            Executor.of(Toolchain.find(), {}, {}).object_in(None)
            with ga.open_context(spec, ga.ContextOptions(cache_dir=cubins, qualify="off")) as cold:
                requests(cold)["forward"]().result(120)
            after("build")
            own_kernel(ctx)
            after("own kernel")
    sys.stdout.write(json.dumps(imported) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
