"""Other attention libraries, which run beside the kernels if they are installed.

Each library gets the same arrays, through DLPack, and the same stream. Its errors are reported. Its results are
compared with the checked results, so a wrong layout is not timed. The report's environment has the versions.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gpu_actors.bench.arrays import OperandSet
from gpu_actors.bench.cases import Case, Kind
from gpu_actors.bench.timing import Call

__all__ = ["PEERS", "Peer", "Prepared", "Refuses", "agrees", "peers_for"]

_WORKSPACE = 256 << 20
_CLOSE = 2e-2


class Refuses(Exception):
    """A library does not support a case. The message is a sentence."""


class Prepared(NamedTuple):
    """The calls of a peer for a case.

    calls: one for each operand set.
    outputs: the first call's results, on the host.
    """

    calls: Sequence[Call]
    outputs: Callable[[], dict[str, np.ndarray[Any, Any]]]


class Peer(NamedTuple):
    """A library. prepare: called with the case, the operand sets and the handle of the stream."""

    name: str
    module: str
    kinds: tuple[Kind, ...]
    prepare: Callable[[Case, Sequence[OperandSet], int], Prepared]

    def obstacle(self) -> str | None:
        """Why the library cannot run here, or None."""
        top = self.module.partition(".")[0]
        if importlib.util.find_spec(top) is None or importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        return None


def peers_for(kind: Kind) -> list[Peer]:
    return [peer for peer in PEERS if kind in peer.kinds]


def agrees(case: Case, ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    """Whether two outputs are equal except for rounding: their difference has at most 2% of the norm of ours."""
    if ours.shape != theirs.shape:
        return False
    step = max(1, ours.shape[1] // 64)
    a, b = (x[:, ::step].astype(np.float32) for x in (ours, theirs))
    return bool(np.linalg.norm(a - b) <= _CLOSE * np.linalg.norm(a))


# torch and libraries that take its tensors


def _tensor(array: Any) -> Any:
    """A torch tensor over a CuPy array. It passes integers, because not every version supports bfloat16 in DLPack."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _host(tensor: Any) -> np.ndarray[Any, Any]:
    import torch

    torch.cuda.synchronize()
    result: np.ndarray[Any, Any] = tensor.detach().float().cpu().numpy()
    return result


def _tensors(case: Case, operands: OperandSet, *names: str) -> list[Any]:
    if case.dtype not in ("bfloat16", "float16"):
        raise Refuses(f"it is not asked for {case.dtype}")
    return [_tensor(operands[name]) for name in names]


def _on_stream(handle: int, call: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    stream = torch.cuda.ExternalStream(handle)

    def run() -> Any:
        with torch.cuda.stream(stream):
            return call()

    return run


def _square(case: Case) -> None:
    if case.window is not None:
        raise Refuses("it has no window")
    if case.causal and case.rows != case.keys:
        raise Refuses("its causal mask starts at the first key")


def _sdpa(backend: str, case: Case, sets: Sequence[OperandSet], handle: int) -> Prepared:
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _square(case)
    if case.deterministic:
        raise Refuses("its deterministic form is a setting of the process")
    kernel = getattr(SDPBackend, backend)

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(kernel):
            grouped = case.heads != case.kv_heads
            return functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

    return _through_autograd(case, sets, handle, attend, heads_first=True)


def _flash_attn_4(case: Case, sets: Sequence[OperandSet], handle: int) -> Prepared:
    from flash_attn.cute import flash_attn_func

    window = (None, None) if case.window is None else (case.window, 0)

    def attend(q: Any, k: Any, v: Any) -> Any:
        result = flash_attn_func(q, k, v, causal=case.causal, window_size=window, deterministic=case.deterministic)
        return result[0] if isinstance(result, tuple) else result

    return _through_autograd(case, sets, handle, attend, heads_first=False)


def _through_autograd(
    case: Case, sets: Sequence[OperandSet], handle: int, attend: Callable[..., Any], heads_first: bool
) -> Prepared:
    """Prepare calls through autograd. In a backward only the gradients are timed.

    attend: called with q, k, v.
    heads_first: whether they are (batch, heads, rows, dim).
    """

    def turned(x: Any) -> Any:
        return x.transpose(1, 2) if heads_first else x

    operands = [[turned(x) for x in _tensors(case, one, "q", "k", "v")] for one in sets]
    if case.kind == "forward":
        calls = [_on_stream(handle, functools.partial(attend, *one)) for one in operands]
        return Prepared(calls, lambda: {"out": _host(turned(calls[0]()))})
    gradients = [
        _gradient(turned(_tensors(case, one, "dout")[0]), leaves, attend, handle)
        for one, leaves in zip(sets, operands, strict=True)
    ]

    def outputs() -> dict[str, np.ndarray[Any, Any]]:
        names = ("dq", "dk", "dv")
        return {name: _host(turned(x)) for name, x in zip(names, gradients[0](), strict=True)}

    return Prepared(gradients, outputs)


def _gradient(dout: Any, leaves: Sequence[Any], attend: Callable[..., Any], handle: int) -> Callable[[], Any]:
    import torch

    inputs = [x.detach().requires_grad_() for x in leaves]
    out = _on_stream(handle, functools.partial(attend, *inputs))()
    return _on_stream(handle, functools.partial(torch.autograd.grad, out, inputs, dout, retain_graph=True))


def _flashinfer(case: Case, sets: Sequence[OperandSet], handle: int) -> Prepared:
    import flashinfer
    import torch

    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    calls: list[Callable[[], Any]] = []
    for one in sets:
        if case.kind == "decode":
            wrapper, arguments = _flashinfer_paged(flashinfer, workspace, case, one)
        else:
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            q, *caches = (x.reshape(-1, *x.shape[2:]) for x in _tensors(case, one, "q", "k", "v"))
            wrapper.plan(
                _steps(case.batch, case.rows),
                _steps(case.batch, case.keys),
                case.heads,
                case.kv_heads,
                case.head_dim,
                causal=case.causal,
                window_left=-1 if case.window is None else case.window,
                q_data_type=q.dtype,
            )
            arguments = (q, *caches)
        calls.append(_on_stream(handle, functools.partial(wrapper.run, *arguments)))
    torch.cuda.synchronize()  # the plans were made on another stream
    return Prepared(calls, lambda: {"out": _host(calls[0]()).reshape(case.q_shape)})


def _flashinfer_paged(flashinfer: Any, workspace: Any, case: Case, one: OperandSet) -> tuple[Any, tuple[Any, ...]]:
    import torch

    q, k, v = _tensors(case, one, "q", "k_cache", "v_cache")
    table = _tensor(one["block_table"])[:, : case.pages].reshape(-1).contiguous()
    last = torch.full((case.batch,), (case.keys - 1) % case.page_size + 1, dtype=torch.int32, device="cuda")
    pages = _steps(case.batch, case.pages)
    shape = (case.heads, case.kv_heads, case.head_dim, case.page_size)
    if case.rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(pages, table, last, *shape, q_data_type=q.dtype, kv_data_type=k.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(_steps(case.batch, case.rows), pages, table, last, *shape, causal=True, q_data_type=q.dtype)
    return wrapper, (q.reshape(-1, *q.shape[2:]), (k, v))


def _steps(count: int, step: int) -> Any:
    import torch

    return torch.arange(count + 1, dtype=torch.int32, device="cuda") * step


def _cudnn_frontend(case: Case, sets: Sequence[OperandSet], handle: int) -> Prepared:
    import cudnn
    import torch

    _square(case)
    library = cudnn.create_handle()
    cudnn.set_stream(handle=library, stream=handle)
    element = cudnn.data_type.BFLOAT16 if case.dtype == "bfloat16" else cudnn.data_type.HALF
    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=element, intermediate_data_type=single, compute_data_type=single, handle=library)
    operands = [[x.transpose(1, 2) for x in _tensors(case, one, "q", "k", "v")] for one in sets]
    outputs = [torch.empty_like(one[0].transpose(1, 2)).transpose(1, 2) for one in operands]
    names = [graph.tensor_like(x) for x in operands[0]]
    scale = case.head_dim**-0.5
    out, _ = graph.sdpa(
        q=names[0], k=names[1], v=names[2], generate_stats=False, attn_scale=scale, use_causal_mask=case.causal
    )
    out.set_output(True).set_dim(list(outputs[0].shape)).set_stride(list(outputs[0].stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def call(number: int) -> Any:
        bindings = {**dict(zip(names, operands[number], strict=True)), out: outputs[number]}
        graph.execute(bindings, workspace, handle=library)
        return outputs[number]

    calls = [functools.partial(call, number) for number in range(len(sets))]
    return Prepared(calls, lambda: {"out": _host(call(0).transpose(1, 2))})


PEERS = (
    Peer("torch FLASH_ATTENTION", "torch", ("forward", "backward"), functools.partial(_sdpa, "FLASH_ATTENTION")),
    Peer("torch CUDNN_ATTENTION", "torch", ("forward", "backward"), functools.partial(_sdpa, "CUDNN_ATTENTION")),
    Peer(
        "torch EFFICIENT_ATTENTION", "torch", ("forward", "backward"), functools.partial(_sdpa, "EFFICIENT_ATTENTION")
    ),
    Peer("flash-attn-4", "flash_attn.cute", ("forward", "backward"), _flash_attn_4),
    Peer("flashinfer", "flashinfer", ("forward", "decode"), _flashinfer),
    Peer("cudnn-frontend", "cudnn", ("forward",), _cudnn_frontend),
)
