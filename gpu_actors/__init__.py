"""An actor-based, asynchronous GPU attention service.

async with gpu_actors.open_context("auto") as ctx:
    result = await ctx.flash_attn.forward(q, k, v, causal=True)
"""

from typing import TYPE_CHECKING

from gpu_actors._version import __version__
from gpu_actors.attention.block_mask import BlockMask
from gpu_actors.attention.mha import AttentionParams, Mask, MhaBackward, MhaForward, MhaOutput
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import (
    AttentionGradients,
    AttentionOutput,
    BatchedDecode,
    CacheOptions,
    FlashBackward,
    FlashForward,
    PagedForward,
)
from gpu_actors.compiling.signature import KernelParameter
from gpu_actors.compiling.source import Cubin, KernelResources, KernelSource
from gpu_actors.context import open_context
from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.devices.select import MockDeviceWarning
from gpu_actors.errors import (
    ActorFailed,
    ActorStopped,
    AsyncioNeeded,
    CacheFull,
    CompileError,
    ContextLost,
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    LaunchError,
    MockModeError,
    NotCopyable,
    OutOfDeviceMemory,
    Overloaded,
    RequestCancelled,
    RequestError,
    StaleBuffer,
    Unqualified,
    Unsupported,
    WorkerLost,
    WouldBlock,
)
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.kernels.flash_attention_config import FlashAttentionConfig
from gpu_actors.options import ContextOptions, EmulationOptions, MockOptions, RestartPolicy
from gpu_actors.partial import MergeBackward, MergePartials
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.reply import Reply
from gpu_actors.tracing import ChromeTrace, StreamedTrace, TraceEvent, host_span

if TYPE_CHECKING:
    from gpu_actors.actors.compiled_kernel import CompiledKernel
    from gpu_actors.actors.context import ContextActor
    from gpu_actors.actors.cudnn_like import CudnnLikeActor, CudnnLikeHandle, ExecuteGraph
    from gpu_actors.actors.flash_attn import FlashAttnActor, FlashAttnHandle
    from gpu_actors.actors.kernels import KernelActor
    from gpu_actors.actors.kv_cache import KvCacheActor
    from gpu_actors.actors.nvrtc import NvrtcActor, NvrtcHandle, WarmedVariant
    from gpu_actors.actors.prepared import Prepare, PreparedAttention
    from gpu_actors.handles.gpu_context import GpuContext
    from gpu_actors.handles.health import Health
    from gpu_actors.handles.kv_cache import KvCache
    from gpu_actors.handles.kv_step import KvCapture, KvStep
    from gpu_actors.kernels.append import Rope
    from gpu_actors.kernels.option_table import Explanation
    from gpu_actors.kv.requests import AppendRows, AttendCache, BeginStep, KvCacheSpec, KvLayer, KvSequence
    from gpu_actors.kv.sequences import KvCacheStats
    from gpu_actors.kv.transfer import LayerPages, SequencePages
    from gpu_actors.planning.graph_plan import GraphPlan
    from gpu_actors.runtime.actor import ServiceActor
    from gpu_actors.runtime.cell import Terminated
    from gpu_actors.runtime.handle import ActorHandle
    from gpu_actors.runtime.mailbox import ActorStats

__all__ = [
    "ActorFailed",
    "ActorHandle",
    "ActorStats",
    "ActorStopped",
    "AppendRows",
    "AsyncioNeeded",
    "AttendCache",
    "AttentionGradients",
    "AttentionOutput",
    "AttentionParams",
    "AttentionProblem",
    "BatchedDecode",
    "BeginStep",
    "BlockMask",
    "CacheFull",
    "CacheOptions",
    "Call",
    "ChromeTrace",
    "CompileError",
    "CompiledKernel",
    "ContextActor",
    "ContextLost",
    "ContextOptions",
    "Cubin",
    "CudnnLikeActor",
    "CudnnLikeHandle",
    "DeadlineExceeded",
    "DeviceInfo",
    "DispatchKey",
    "EmulationOptions",
    "ExecuteGraph",
    "Explanation",
    "FlashAttentionConfig",
    "FlashAttnActor",
    "FlashAttnHandle",
    "FlashBackward",
    "FlashForward",
    "GpuActorsError",
    "GpuContext",
    "GraphPlan",
    "GraphTensor",
    "Health",
    "InvalidRequest",
    "KernelActor",
    "KernelParameter",
    "KernelResources",
    "KernelSource",
    "KvCache",
    "KvCacheActor",
    "KvCacheSpec",
    "KvCacheStats",
    "KvCapture",
    "KvLayer",
    "KvSequence",
    "KvStep",
    "LaunchError",
    "LayerPages",
    "Mask",
    "MergeBackward",
    "MergePartials",
    "MhaBackward",
    "MhaForward",
    "MhaOutput",
    "MockDeviceWarning",
    "MockModeError",
    "MockOptions",
    "NotCopyable",
    "NvrtcActor",
    "NvrtcHandle",
    "OperationGraph",
    "OutOfDeviceMemory",
    "Overloaded",
    "PagedForward",
    "Prepare",
    "PreparedAttention",
    "Reply",
    "RequestCancelled",
    "RequestError",
    "RestartPolicy",
    "Rope",
    "SequencePages",
    "ServiceActor",
    "StaleBuffer",
    "StreamedTrace",
    "Terminated",
    "TraceEvent",
    "Unqualified",
    "Unsupported",
    "WarmedVariant",
    "WorkerLost",
    "WouldBlock",
    "__version__",
    "host_span",
    "open_context",
]

# The modules that a context runs are imported when the first context opens, or when one of these names is first used.
_LAZY = {
    "ActorHandle": "gpu_actors.runtime.handle",
    "ActorStats": "gpu_actors.runtime.mailbox",
    "AppendRows": "gpu_actors.kv.requests",
    "AttendCache": "gpu_actors.kv.requests",
    "BeginStep": "gpu_actors.kv.requests",
    "CompiledKernel": "gpu_actors.actors.compiled_kernel",
    "ContextActor": "gpu_actors.actors.context",
    "CudnnLikeActor": "gpu_actors.actors.cudnn_like",
    "CudnnLikeHandle": "gpu_actors.actors.cudnn_like",
    "ExecuteGraph": "gpu_actors.actors.cudnn_like",
    "Explanation": "gpu_actors.kernels.option_table",
    "FlashAttnActor": "gpu_actors.actors.flash_attn",
    "FlashAttnHandle": "gpu_actors.actors.flash_attn",
    "GpuContext": "gpu_actors.handles.gpu_context",
    "GraphPlan": "gpu_actors.planning.graph_plan",
    "Health": "gpu_actors.handles.health",
    "KernelActor": "gpu_actors.actors.kernels",
    "KvCache": "gpu_actors.handles.kv_cache",
    "KvCacheActor": "gpu_actors.actors.kv_cache",
    "KvCacheSpec": "gpu_actors.kv.requests",
    "KvCacheStats": "gpu_actors.kv.sequences",
    "KvCapture": "gpu_actors.handles.kv_step",
    "KvLayer": "gpu_actors.kv.requests",
    "KvSequence": "gpu_actors.kv.requests",
    "KvStep": "gpu_actors.handles.kv_step",
    "LayerPages": "gpu_actors.kv.transfer",
    "NvrtcActor": "gpu_actors.actors.nvrtc",
    "NvrtcHandle": "gpu_actors.actors.nvrtc",
    "Prepare": "gpu_actors.actors.prepared",
    "PreparedAttention": "gpu_actors.actors.prepared",
    "Rope": "gpu_actors.kernels.append",
    "SequencePages": "gpu_actors.kv.transfer",
    "ServiceActor": "gpu_actors.runtime.actor",
    "Terminated": "gpu_actors.runtime.cell",
    "WarmedVariant": "gpu_actors.actors.nvrtc",
}

if not TYPE_CHECKING:  # else a type checker would accept every name as an attribute of the package

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY})
