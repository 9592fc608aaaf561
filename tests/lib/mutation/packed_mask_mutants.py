"""Faults in block masks of requests: in their checks, their plans, their launches and the oracle."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["PACKED_MASKS"]

_PROBES = ("masks",)
_KERNELS = ("masked kernels",)
_PAGES = ("masked pages",)


def _faults(file: str, *faults: tuple[str, str, str], probes: tuple[str, ...] = _PROBES) -> tuple[Mutant, ...]:
    """faults: name, old text, new text."""
    module = file.rpartition("/")[2]
    return tuple(Mutant(name, module, f"gpu_actors/{file}.py", old, new, probes) for name, old, new in faults)


PACKED_MASKS: tuple[Mutant, ...] = (
    *_faults(
        "validation/forward",
        ("a cap is let pass", '    "softcap": (0.0,', '    "out_dtype": (None,'),
        ("a bias is let pass", '    "bias": (None,', '    "out_dtype": (None,'),
        ("places are let pass", '    "q_positions": (None,', '    "out_dtype": (None,'),
    ),
    *_faults(
        "planning/block_masks",
        ("gradients walk along the lists of keys", "gradients=gradients,", "gradients=False,"),
        ("lists are numbered as if all were given", "given[uid - _FIRST]", "LISTS[-1 - uid + _FIRST]"),
        ("plans forget the mask_mod", "mask.block_size)), mask.mask_mod", "mask.block_size))"),
        (
            "plans forget the blocks",
            "mask.block_size, tuple(map(type, mask.block_size)), mask.mask_mod",
            "mask.mask_mod",
        ),
        ("plans forget the types of a size", "tuple(map(type, mask.block_size)), ", ""),
        ("plans forget the shapes of lists", "return described, ", "return None, "),
        ("the oracle sees everything", 'given, "bias": _visible(mask, problem)', "given"),
        ("rows and keys change places", 'startswith("q") else', 'startswith("k") else'),
        ("counts have the axis of numbers", 'if name.endswith("indices") else along[:1]', "if name else along"),
        ("lists are cut at their beginning", "slice(extent) for", "slice(-extent, None) for"),
        ("negative counts are let pass", "least >= 0 and most <= blocks", "most <= blocks"),
        ("counts that are too large are let pass", "least >= 0 and most <= blocks", "least >= 0"),
        ("the block behind the last one is let pass", "(listed >= blocks)", "(listed > blocks)"),
        ("numbers behind the count are checked", "counted & (", "("),
        ("lists of gradients are not missed", "if gradients and not transposed", "if False"),
        ("lists of another dtype are let pass", 'str(array.dtype) == "int32"', 'str(array.dtype) != ""'),
        ("lists that are too short are let pass", "own >= extent for", "own >= 0 for"),
        ("lists that differ are waited by", "and not agree(lists[:half], lists[half:])", "and False"),
        ("a block is listed twice", "found is not None and (found > 1).any()", "False"),
        ("full blocks are listed before", 'name.removeprefix("full_").startswith(side)', "name.startswith(side)"),
        (
            "a function that raises fails the message",
            "    except Exception as error:\n",
            "    except ZeroDivisionError as error:\n",
        ),
        ("lists without keys are read", "and problem.seqlen_k):", "):"),
    ),
    *_faults(
        "planning/block_masks",
        ("numbers of mask_mod are lost", "Values(seed, planned.numbers)", "Values(seed)"),
        ("dropout loses its seed", "Values(seed, planned.numbers)", "Values(0, planned.numbers)"),
        probes=_KERNELS,
    ),
    *_faults(
        "planning/forward",
        ("a block mask is no option", "        and request.block_mask is None\n", ""),
        ("plans forget the mask", ", mask_signature(request.block_mask)", ""),
    ),
    *_faults("planning/padded", ("padding is cut off", "if request.block_mask is not None:", "if False:")),
    *_faults(
        "planning/explanation",
        ("explained without its mask", "masked_problem(adopted, forward", "(lambda _, p: p)(adopted, forward"),
    ),
    *_faults(
        "planning/cached",
        ("plans over caches forget the mask", "else mask_signature(request.block_mask)", "else ()"),
        (
            "a cache is planned without its mask",
            "masked_problem(request, paged_problem(request))",
            "paged_problem(request)",
        ),
        ("a launch over a cache reads no lists", "    if mask is None:\n", "    if True:\n"),
        probes=_PAGES,
    ),
    *_faults(
        "kv_cache",
        ("a KvCache drops the mask", "block_mask=block_mask", "block_mask=None"),
        probes=_PAGES,
    ),
    *_faults(
        "planning/merging",
        ("masks are joined", ' or getattr(request, "block_mask", None) is not None', ""),
        probes=_PAGES,
    ),
    *_faults(
        "validation/paged",
        ("a cap over a cache is let pass", "    check_beside_blocks(request)\n", ""),
        probes=_PAGES,
    ),
    *_faults(
        "kernels/family",
        ("decoding reads a mask as a modification", "if size is not None and not self.block_masks:", "if False:"),
        probes=_PAGES,
    ),
)
