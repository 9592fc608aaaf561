"""register: the service as an attention implementation of Hugging Face Transformers.

    register(context)
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="gpu_actors")

Transformers asks for a mask once per forward pass, and for attention once per layer. The mask has one of three forms:

    None                       every key counts, but for the causal order
    int32 (keys, batch, 1, 1)  which keys count, with padding, a static cache, a window or chunks; later keys do not
                               count. 0: a hidden key. Others count: 1 if rows see any distance, -1 - n if they see no
                               further than n keys, 1 + n if they see their own chunk of n keys alone
    bool (batch, 1, q, k)      any other mask, written out and given to the kernels as a bias

The mask carries the window or the chunk because only some models pass it to attention, and some of these count it
differently.
All masks have four axes, by which Transformers recognises a finished mask: `generate` passes masks that it asked for
before. Keys come first, so that a model fails loudly if it takes the mask for one that is written out.

Gradients are computed. Needs torch and transformers, which nothing else of this package imports.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.generation.continuous_batching import PagedAttentionCache

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context
from gpu_actors.interop.torch_attention import attention, check_open, rows_of, seed_for
from gpu_actors.interop.transformers_pages import PagedAttention
from gpu_actors.isolation.context import IsolatedContext

__all__ = ["continuous_batching", "register"]

_numbers = itertools.count(1)
"""Numbers in the names of implementations."""
_FEW_ROWS = 8
"""The most rows of a sequence in a decoding step, drafts included, for which the kernel that skips padding is made."""
# By cache. When a generation ends, its cache is freed, and with it the prepared requests.
_PAGED: weakref.WeakKeyDictionary[PagedAttentionCache, PagedAttention] = weakref.WeakKeyDictionary()
# By implementation: the caches whose updates are left to attention, until its `continuous_batching` is left. Each with
# whether its manager makes masks.
_TAKEN: dict[str, weakref.WeakKeyDictionary[PagedAttentionCache, bool]] = {}


def register(context: GpuContext, name: str = "gpu_actors", *, model: PreTrainedModel | None = None) -> str:
    """Register a running context as the attention implementation ``name``. Returns the name.

    Models use it with ``attn_implementation=name``, or ``model.set_attn_implementation(name)``. Registering a name
    again replaces its context. model: is switched to it at once. Some models compute attention in code of their own
    (Falcon, BLOOM, MPT and others). For these Transformers' ``set_attn_implementation`` only logs that nothing
    changes, and this function raises `Unsupported`. Their forward pass raises it too, if they were loaded with the name
    and ask for a mask.

    Masks, GQA, sliding windows, softcap, learned sinks (``s_aux``), position biases, packed rows
    (``cu_seq_lens_q``), static caches and dropout work as in Transformers' own implementations; attention weights are
    not returned.

    A forward pass blocks the calling thread, so it must not run on the thread of a running event loop: it raises
    `WouldBlock` there. It raises `ActorStopped` once the context is closed, and what
    `gpu_actors.interop.torch.attention` raises. This function raises InvalidRequest for an unusable context or name.
    """
    check_context(context)
    if not isinstance(name, str) or not name or "|" in name:
        raise InvalidRequest("name", name, "must be a name without '|', which Transformers reads as a prefix")
    if model is not None:
        _check_switched(context, model)
    AttentionInterface.register(name, functools.partial(_attend, context))
    masking_utils.AttentionMaskInterface.register(name, _mask)
    if model is not None:
        model.set_attn_implementation(name)
    return name


@contextmanager
def continuous_batching(context: GpuContext, model: PreTrainedModel) -> Iterator[None]:
    """While entered, the model's continuous batching (``generate_batch``) computes attention through a context.

    Transformers keeps its paged cache and writes the new keys there. The context reads the pages in place, through
    block tables that it makes once per forward pass, on torch's current stream. Transformers copies keys first:

    - in a layer with a sliding window, if a sequence that is longer than the window has several new rows, such as a
      chunk of its prompt;
    - in a context with ``isolation="process"``, for a model on the host whose context has a GPU, with dropout, and
      before Transformers 5.23.

    Windows, softcap and sinks work as with `register`. For continuous batching Transformers takes its own
    implementations and those that are named after flash-attn, and imports flash-attn when a model is switched to one of
    these. This function therefore switches the model itself, to a name of its own. Several models may generate at once,
    each through another context.

    Leave it once the model generates nothing more; the model then has its former implementation again, for which a
    manager that was made within makes no masks, so that its requests fail unless that is flash-attn. Transformers
    computes on a thread of its own, so an error of the context becomes the ``error`` of each request that it concerns.
    Raises `InvalidRequest` for an object that is no context or model, and `Unsupported` as `register` does.
    """
    _check_switched(context, model)
    former = {id(part): part.config._attn_implementation for part in _parts_of(model)}
    # Transformers reads a number after "flash" as the version of flash-attn.
    name = register(context, f"gpu_actors_{next(_numbers)}_flash")
    _TAKEN[name] = weakref.WeakKeyDictionary()
    take = functools.partial(_take_cache, name)
    hooks = [part.register_forward_pre_hook(take, with_kwargs=True) for part in _parts_of(model)]
    try:
        for part in _parts_of(model):
            part.config._attn_implementation = name
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for cache, masked in _TAKEN.pop(name).items():
            vars(cache).pop("update", None)
            if not masked and "flash" not in str(former[id(model)]):
                cache.update = _refuse_update
        for part in _parts_of(model):
            part.config._attn_implementation = former[id(part)]
        for interface in (AttentionInterface, masking_utils.AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


def _take_cache(name: str, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Leave the updates of a pass's cache to attention, which `_attend` does without a copy where it can.

    From Transformers 5.24 on, a layer updates its cache before it asks for attention. Before, attention did so.
    A module with another implementation, such as a copy of the model, gets the cache's own update.
    """
    cache = kwargs.get("cache")
    if isinstance(cache, PagedAttentionCache):
        vars(cache).pop("update", None)
        if name in _TAKEN and module.config._attn_implementation == name:
            _TAKEN[name][cache] = kwargs.get("attention_mask") is not None or _TAKEN[name].get(cache, False)
            cache.update = functools.partial(_pass_on, weakref.ref(cache))


def _pass_on(
    cache: weakref.ref[PagedAttentionCache], key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """`PagedAttentionCache.update` that only puts the cache among the arguments of attention."""
    kwargs["cache"] = cache()
    return key_states, value_states


def _refuse_update(*_: Any, **given: Any) -> NoReturn:
    """`PagedAttentionCache.update` of a manager without masks, for a model whose implementation needs them."""
    reason = "must be used within continuous_batching, because it has no masks: make another manager"
    raise InvalidRequest("cache", "one of a manager that was made there", reason)


def _check_switched(context: object, model: object) -> None:
    check_context(context)
    if not isinstance(model, PreTrainedModel):
        raise InvalidRequest("model", type(model).__name__, "must be a PreTrainedModel of Transformers")
    for part in _parts_of(model):
        if not part._can_set_attn_implementation():
            raise Unsupported("model", type(part).__name__, _OWN_ATTENTION)


def _parts_of(model: PreTrainedModel) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


_OWN_ATTENTION = "computes attention in code of its own, which asks no attention implementation of Transformers"


@functools.lru_cache(maxsize=256)
def _own_attention(config: type) -> str | None:
    """The model with that type of config, if its source shows that it computes attention in code of its own, or None.

    Such a model would misread this module's masks: with None, it attends to later keys too.
    """
    classes = [kind for kind in _subclasses(PreTrainedModel) if kind.config_class is config]
    verdicts = {kind.__name__: (kind._can_set_attn_implementation(), _source_was_read(kind)) for kind in classes}
    return next(iter(verdicts), None) if all(verdict == (False, True) for verdict in verdicts.values()) else None


def _subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _source_was_read(kind: type) -> bool:
    """Whether Transformers read the model's source. Without it, as in a notebook, it reports that no switch works."""
    return isinstance(getattr(kind, "_can_set_attn_implementation_cached_value", None), bool)


def _attend(
    context: GpuContext,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query (batch, heads, rows, dim), key, value (batch, kv_heads, keys, dim) -> (batch, rows, heads, dim), None."""
    if cache is not None:
        if not isinstance(cache, PagedAttentionCache):
            raise Unsupported("cache", type(cache).__name__, "is no paged cache of Transformers", "PagedAttentionCache")
        if rest.get("block_table") is not None:
            reason = "is for flash-attn's own kernels"
            raise Unsupported("block_table", "a table", reason, "max_blocks_per_request=0")
        given = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, **rest}
        # Versions of Transformers before 5.23 have another layout of the cache.
        in_place = hasattr(cache, "layer_to_allocator") and _reaches(context, query)
        if in_place and not dropout and position_bias is None:
            check_open(context.number)
            options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
            options |= _pattern(True, None if sliding_window is None else sliding_window - 1)
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            given |= {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
            paged = _PAGED.get(cache)
            if paged is None or paged.context is not context:
                paged = _PAGED[cache] = PagedAttention(context)
            allocator = cache.layer_to_allocator[module.layer_idx]
            return paged.attend(allocator, module.layer_idx, q, k, v, s_aux, options, given)[None], None
        # This writes the new keys, and returns the keys of all sequences, one sequence after the other.
        key, value = PagedAttentionCache.update(cache, key, value, module.layer_idx, kwargs=given)
        cu_seq_lens_k, max_length_k, is_causal = given["cu_seq_lens_k"], given["max_length_k"], True
    elif "read_index" in rest:
        reason = "is not among the arguments of attention, so a layer of this model loses its earlier keys"
        raise Unsupported("cache", None, reason, "PagedAttentionCache")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    attention_mask, reach, chunk = _read(attention_mask, sliding_window)
    options = {
        "context": context,
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "attention_chunk": chunk,
        # Each layer and step draws a seed from torch's own generator, so that torch.manual_seed repeats a run.
        **({"dropout_p": dropout, "dropout_seed": seed_for(dropout)} if dropout else {}),
        **({} if s_aux is None else {"sinks": s_aux.float()}),
    }
    if cu_seq_lens_q is not None:
        options |= _pattern(causal, reach)
        if cu_seq_lens_k is None:
            cu_seq_lens_k = cu_seq_lens_q
        ends_q, ends_k = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
        return _packed(q, k, v, ends_q, ends_k, max_length_q, max_length_k, position_bias, options), None
    if attention_mask is not None and attention_mask.ndim == 2 and position_bias is None:
        options |= _pattern(causal, reach)
        placed = causal or reach is not None
        return _padded(q, k, v, attention_mask.bool(), placed, options), None
    if attention_mask is not None:
        written = attention_mask
        if attention_mask.ndim == 2:
            k, v = k[:, : attention_mask.shape[1]], v[:, : attention_mask.shape[1]]
            options |= _pattern(causal, reach)
            written = attention_mask.bool()[:, None, None, :]
        position_bias = _added(written, position_bias, q.shape[1], q.dtype)
    else:
        options |= _pattern(causal, reach)
    if position_bias is not None:
        options["bias"] = position_bias.to(q.dtype).expand(-1, -1, q.shape[1], k.shape[1])
    return attention(q, rows_of(k), rows_of(v), **options), None


def _reaches(context: GpuContext, query: torch.Tensor) -> bool:
    """Whether the context can read a cache without copying it whole. The cache lies where the query does.

    The process of an isolated context cannot read this process's memory, and a GPU cannot read the host's.
    """
    copied = context.info.kind == "cuda" and not query.is_cuda
    return not copied and not isinstance(context, IsolatedContext)


def _read(mask: torch.Tensor | None, sliding_window: int | None) -> tuple[torch.Tensor | None, int | None, int]:
    """The mask, how far a row sees (None: any distance), and the keys of a chunk (0: no chunks).

    A mask that says which keys count becomes bool (batch, keys). If the mask has no window, the window is the model's
    ``sliding_window``, which counts the row's own key.
    """
    reach = None if sliding_window is None else sliding_window - 1
    if mask is None or mask.ndim != 4 or mask.dtype != torch.int32:
        return mask, reach, 0
    columns = mask[:, :, 0, 0].T
    least, most = int(columns.min()), int(columns.max())
    return columns != 0, reach if least >= 0 else -1 - least, max(0, most - 1)


def _pattern(causal: bool, reach: int | None) -> dict[str, Any]:
    if reach is None:
        return {"causal": causal}
    return {"causal": causal, "window_size": (reach, 0 if causal else reach)}


def _longest(ends: torch.Tensor) -> int:
    return max(1, int(ends.diff().max()))


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    longest_q: int | None,
    longest_k: int | None,
    bias: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    if q.shape[0] != 1:
        raise InvalidRequest("cu_seq_lens_q", ends_q, f"packed rows come as a batch of 1, not of {q.shape[0]}")
    if bias is not None:
        raise Unsupported("position_bias", bias, "packed rows take no bias", None)
    made: torch.Tensor = attention(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=ends_q,
        cu_seqlens_k=ends_k,
        max_seqlen_q=longest_q or _longest(ends_q),
        max_seqlen_k=longest_k or _longest(ends_k),
        **options,
    )
    return made[None]


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, placed: bool, options: dict[str, Any]
) -> torch.Tensor:
    """Attend to the keys that a mask (batch, keys) does not hide.

    If the rows are few and no hidden key lies between two that count, the keys are read in place. Else the keys that
    count are copied, as packed sequences.
    placed: whether the rows are the last ones of their sequence, and what they see depends on it. Rows of padding are
    then left out too, and stay 0. If not placed, rows may belong to another sequence than the keys, and all rows count.
    """
    batch, rows = q.shape[:2]
    keys = mask.shape[1]
    k, v = k[:, :keys], v[:, :keys]
    if mask.all():
        made: torch.Tensor = attention(q, rows_of(k), rows_of(v), **options)
        return made
    wanted = mask[:, keys - rows :] if placed else mask.new_ones(batch, rows)
    ends_q = _ends(wanted)
    rows_apart = {"cu_seqlens_q": ends_q, "max_seqlen_q": _longest(ends_q)}
    if rows <= _FEW_ROWS and _reads_in_place(q, k, v, options) and not _has_holes(mask):
        made = _in_place(q[wanted], k, v, mask, {**options, **rows_apart})
    else:
        ends_k = _ends(mask)
        made = attention(
            q[wanted], k[mask], v[mask], cu_seqlens_k=ends_k, max_seqlen_k=_longest(ends_k), **rows_apart, **options
        )
    out = made.new_zeros(batch, rows, *made.shape[1:])
    out[wanted] = made
    return out


def _ends(mask: torch.Tensor) -> torch.Tensor:
    """The cu_seqlens of the elements that count in a mask (batch, n)."""
    return torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _reads_in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> bool:
    """Whether a call can do without `attention`, which has gradients, tangents, casts, tracing, dropout and copies."""
    operands = (q, k, v, options.get("sinks"))
    return _reaches(options["context"], q) and not (
        options.get("dropout_p")
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(q.device.type)
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands))
    )


def _in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of packed rows to keys (batch, keys, heads, dim), in place. A mask without holes says which count."""
    options = dict(options)
    context = check_open(options.pop("context").number)
    first = mask.int().argmax(1)
    made: torch.Tensor = (
        context.flash_attn.paged_forward(
            q,
            rows_of(k),
            rows_of(v),
            cache_seqlens=(first + mask.sum(1)).to(torch.int32),
            cache_leftpad=first.to(torch.int32),
            **options,
        )
        .result()
        .out
    )
    return made


def _added(mask: torch.Tensor, bias: torch.Tensor | None, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores for a mask and a bias. A mask that is not bool is added as it is."""
    if mask.dtype == torch.bool:
        hidden = torch.full((), float("-inf"), dtype=dtype, device=mask.device)
        added = torch.where(mask, hidden.new_zeros(()), hidden)
    else:
        added = mask
    return added if bias is None else added + bias


# Masks


class _Known(NamedTuple):
    """A pattern that kernels know.

    causal: rows see no later keys. reach: how many keys away they see, None for any distance. chunk: keys of a chunk, 0
    for no chunks; rows see their own chunk alone. begins: (batch,), how many hidden keys each sequence has before its
    first chunk.
    """

    causal: bool
    reach: int | None = None
    chunk: int = 0
    begins: torch.Tensor | None = None

    @property
    def value(self) -> int:
        return 1 + self.chunk if self.reach is None else -1 - self.reach

    def holds_without(self, columns: torch.Tensor) -> bool:
        """Whether rows still see the same keys if the keys that a mask (batch, keys) hides are left out."""
        if self.reach is None and not self.chunk:
            return True
        leading = columns.int().cumsum(1).eq(0).sum(1)
        return not _has_holes(columns) and (self.begins is None or torch.equal(self.begins.long(), leading))


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **given: Any,
) -> torch.Tensor | None:
    """The mask that Transformers asks for, see the module's docstring. attention_mask: bool (batch, keys so far)."""
    config: Any = type(given.get("config"))
    own = _own_attention(config)
    if own is not None:
        raise Unsupported("attn_implementation", own, _OWN_ATTENTION, "eager")
    known = _recognise(mask_function)
    seen = int(q_offset) + q_length
    columns = None
    if known is not None and (attention_mask is None or attention_mask.shape[1] == seen or not known.causal):
        # A static cache is longer than the keys that it holds.
        keys = min(kv_length, seen - kv_offset) if known.causal else kv_length
        if attention_mask is None:
            columns = torch.ones(batch_size, keys, dtype=torch.bool, device=device)
        else:
            columns = attention_mask[:, kv_offset : kv_offset + keys].bool()
        # If hidden keys were left out, a window over them would reach further, and chunks would begin elsewhere.
        moved = known.chunk > 0 and kv_offset > 0
        if columns.shape[1] == keys and not moved and known.holds_without(columns):
            if known.value == 1 and keys == kv_length and columns.all():
                return None
            return (columns.T.to(torch.int32) * known.value)[:, :, None, None]
    options = {**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    written: torch.Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    return written


def _has_holes(mask: torch.Tensor) -> bool:
    """Whether a sequence has a hidden key between two that count."""
    return bool((mask.int().diff(dim=1, prepend=mask.new_zeros(len(mask), 1).int()).eq(1).sum(1) > 1).any())


def _recognise(mask_function: Callable[..., Any]) -> _Known | None:
    """The pattern of a mask function of Transformers, or None if kernels do not know its pattern.

    The functions are closures, so a function made of others is recognised by the functions that it closes over.
    """
    if mask_function is masking_utils.causal_mask_function:
        return _Known(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return _Known(causal=False)
    parts = _parts(mask_function)
    if len(parts) != 2:
        return None
    overlay = getattr(parts[0], "__qualname__", "").split(".")[0]
    causal = parts[1] is masking_utils.causal_mask_function
    closed_over = inspect.getclosurevars(parts[0]).nonlocals
    length = closed_over.get("chunk_size" if overlay == "chunked_overlay" else "sliding_window")
    if not isinstance(length, int) or not 1 <= length < (1 << 31) - 1:
        return None
    if overlay == "chunked_overlay" and causal:
        return _Known(causal=True, chunk=length, begins=closed_over.get("left_padding"))
    if overlay == "sliding_window_overlay" and causal:
        return _Known(causal=True, reach=length - 1)
    bidirectional = parts[1] is masking_utils.bidirectional_mask_function
    if overlay == "sliding_window_bidirectional_overlay" and bidirectional:
        return _Known(causal=False, reach=length)  # this length does not count the row's own key
    return None


def _parts(mask_function: Callable[..., Any]) -> tuple[Any, ...]:
    """The mask functions of an intersection (``and_masks``). Empty for another function."""
    if getattr(mask_function, "__qualname__", "").split(".")[0] != "and_masks":
        return ()
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    return tuple(parts)
