"""Faults in dense requests whose rows are packed: in the choice, its model, the launch and the explanation."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["PACKING"]

_PROBES = ("few rows",)


def _faults(file: str, *faults: tuple[str, str, str]) -> tuple[Mutant, ...]:
    """faults: name, old text, new text."""
    module = file.rpartition("/")[2]
    return tuple(Mutant(name, module, f"gpu_actors/{file}.py", old, new, _PROBES) for name, old, new in faults)


PACKING: tuple[Mutant, ...] = (
    *_faults(
        "kernels/packing",
        ("rows are packed for any gain", "4 * self.packed <= 3 * self.tiled", "self.packed <= self.tiled"),
        ("64 rows are few", "0 < p.seqlen_q < ROWS", "0 < p.seqlen_q <= ROWS"),
        ("dropout is lost", '"dropout_p", "score_mod"', '"score_mod"'),
        ("a sign of ALiBi is lost", '"alibi_signed", ', ""),
        ("positions are lost", '"positions", ', ""),
        ("rows on the first keys are put on the last", " and p.alignment", " and not p.alignment"),
        ("slopes measure from the last key", " or p.alibi is not None  # from", "  # from"),
        ("packed keys are taken for a dense cache", 'p.layout == "dense"', 'p.layout in ("dense", "varlen")'),
        ("what lies between chunks is copied in chunks", " if family in families", ""),
        ("every device has an A100's multiprocessors", "multiprocessors or _MULTI", "108 or _MULTI"),
        ("the key keeps the alignment", ', alignment="bottom_right")', ")"),
        ("tiles take one round", "-(-tiles // multiprocessors) * _seen", "_seen"),
        ("tiles of all sequences but the first", "problem.batch * problem.heads_q * -(-", "problem.heads_q * -(-"),
        ("V is transposed at no cost", "passes += 2 *", "passes += 0 *"),
        (
            "products on Hopper as by mma.sync",
            "passes, _WGMMA if hopper else _MMA)\n    busiest = -(",
            "passes, _MMA)\n    busiest = -(",
        ),
        ("the merge costs nothing", "merge = _START", "merge = 0"),
        ("pieces are merged in one wait", "-(-pieces // 16) + -(-pieces // 4)", "1"),
        ("ranges of one unit", "max(1, units // min_units(key))", "units"),
        ("two blocks of decode_sm90", "(1 if hopper else blocks)", "blocks"),
        ("one warp reads the keys of all rows", "key.row_tile // (ROWS if hopper else 16)", "1"),
        ("8-bit keys are widened for nothing", "4 + 2 * readers if narrow and hopper else ", ""),
        ("memory has no end", "max(busiest, _memory(cached, multiprocessors)) + merge", "busiest + merge"),
        ("a window hides nothing", "    first = max(sinks, first)\n", "    first, last = 0, keys\n"),
        ("first keys beside a window are free", "return sinks + max", "return max"),
        (
            "lengths are of the rows",
            "np.full(problem.batch, problem.seqlen_k, ",
            "np.full(problem.batch, problem.seqlen_q, ",
        ),
        ("the last key is left out", "problem.seqlen_k, np.int32)", "problem.seqlen_k - 1, np.int32)"),
        ("keys and values change places", '{"k": "k_cache", "v": "v_cache"}', '{"k": "v_cache", "v": "k_cache"}'),
        ("scratch memory of the merge is forgotten", "{**program.scratch, **scratch}", "scratch"),
    ),
    *_faults(
        "planning/forward",
        ("what is not worth it is packed", "packing is not None and packing.pays", "packing is not None"),
        ("nothing is packed", "packing is not None and packing.pays else key", "packing is None else key"),
        ("one sequence is taken for several", "array.shape[0] > 1 and array.strides", "array.strides"),
        ("keys that several share are packed", "(request.q, request.k, request.v))", "(request.q,))"),
        ("rows that several share are packed", "(request.q, request.k, request.v))", "(request.k, request.v))"),
        ("the device's multiprocessors are not asked for", "families, info.multiprocessors)", "families, 4)"),
    ),
    *_faults(
        "planning/tma_eligibility",
        ("rows of dense keys begin anywhere", '"v_cache", "k", "v")', '"v_cache")'),
    ),
    *_faults(
        "planning/plan",
        (
            "packed rows are launched as they were",
            "packed_program if key.decoding and not",
            "packed_program if key.decoding and",
        ),
    ),
    *_faults(
        "planning/explanation",
        ("tiles that were left out have no figures", "== packing.pays", "!= packing.pays"),
        (
            "what is explained is not what is asked",
            "(as_cache(problem), packing.key) if packing.pays",
            "(as_cache(problem), packing.key) if not packing.pays",
        ),
    ),
)
