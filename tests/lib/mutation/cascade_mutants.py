"""Faults to seed into the host code of cascades over a KvCache; cascade.py runs them."""

from __future__ import annotations

from collections.abc import Mapping

from mutation.forward_mutants import Mutant

__all__ = ["MUTANTS", "PROBES"]

_FILE = "tests/kv/test_cascade.py::test_"

PROBES: Mapping[str, tuple[str, ...]] = {
    "oracle": (f"{_FILE}the_oracle_answers_a_cascade_as_it_answers_without",),
    "kernels": (f"{_FILE}kernels_answer_a_cascade_right_and_choose_as_mock_does",),
    "choice": (
        f"{_FILE}what_no_cascade_is_exact_for_is_launched_without",
        f"{_FILE}queries_with_factors_of_their_own_are_attended_without",
        f"{_FILE}without_a_whole_shared_page_or_tensor_cores_there_is_no_cascade",
    ),
    "model": (f"{_FILE}the_model_decides_where_nothing_else_is_said", f"{_FILE}a_shared_page_is_read_once"),
    "apart": (
        f"{_FILE}requests_that_share_a_launch_become_neighbours_and_get_their_own_answers",
        f"{_FILE}a_member_that_is_cancelled_or_refused_leaves_the_others_their_cascade",
    ),
    "latents": (f"{_FILE}latents_that_sequences_share_are_read_once",),
    "recorded": (f"{_FILE}recorded_cascades_are_replayed_over_new_operands",),
    "out": (f"{_FILE}results_go_into_the_callers_array_and_without_lse",),
    "groups": ("tests/planning/test_shared_prefixes.py",),
}


def _faults(file: str, *faults: tuple[str, str, str, str]) -> list[Mutant]:
    """faults: name, old text, new text, probe."""
    module = file.rpartition("/")[2]
    return [Mutant(name, module, f"gpu_actors/{file}.py", old, new, (probe,)) for name, old, new, probe in faults]


_OWN = "own[:, None] + np.arange"
_ENDS = "np.concatenate([[0], np.cumsum(rows)])[found.ends]"
_PREFIX_TABLE = "table[found.ends[:-1], :width]"
_LSE = "lse.reshape(heads, batch, rows), 0, 1"
_KERNELS = "zip(kernels, made.steps,"
_BUFFERS = "key.removeprefix(name): buffer for key, buffer in buffers.items() if key.startswith(name)"
_OUTPUTS = '{**outputs, "out": dataclasses.replace(outputs["out"], into=request.out)}'
_SCRATCH_LSE = 'scratch["lse"] = ScratchSpec(p.lse_shape, _FLOAT)'
_TAIL = '"out.1": buffers["tail.out"], "lse.1": buffers["tail.lse"]'

MUTANTS: tuple[Mutant, ...] = (
    *_faults(
        "planning/cascade",
        ("prefixes reach into q's rows", "lengths.astype(np.int64) - rows)", "lengths.astype(np.int64))", "oracle"),
        ("tails are as long as sequences", "cache_seqlens - own * p.page_size", "cache_seqlens", "oracle"),
        ("tails begin with the first page", _OWN, "0 * own[:, None] + np.arange", "oracle"),
        ("tails begin a page late", _OWN, "1 + own[:, None] + np.arange", "oracle"),
        ("prefixes are a key short", "] = pages * p.page_size", "] = pages * p.page_size - (pages > 0)", "oracle"),
        (
            "prefixes are those of the group's end",
            _PREFIX_TABLE,
            "table[found.ends[1:] - len(table), :width]",
            "oracle",
        ),
        ("prefixes are causal", "causal=False, tree_mask=False", "causal=p.causal, tree_mask=False", "oracle"),
        ("sinks count twice", "sinks=False", "sinks=p.sinks", "oracle"),
        ("sequences count as rows", _ENDS, "found.ends", "oracle"),
        ("heads and sequences exchanged in the oracle's lse", _LSE, "lse.reshape(batch, heads, rows), 0, 0", "oracle"),
        ("rows of the lse are a head apart", "strides=(r * one, head, one)", "strides=(one, head, r * one)", "kernels"),
        (
            "rows of out are a sequence apart",
            "strides=(r * row, row, *inner)",
            "strides=(row, r * row, *inner)",
            "kernels",
        ),
        ("tails weigh as prefixes", _TAIL, '"out.1": buffers["tail.out"], "lse.1": lse', "kernels"),
        ("prefixes are merged twice", _TAIL, '"out.1": out, "lse.1": lse', "kernels"),
        (
            "the prefix's kernels run for both parts",
            _KERNELS,
            "zip((*kernels[:2], *kernels[:2], kernels[-1]), made.steps,",
            "kernels",
        ),
        ("both parts take the operands of one", _BUFFERS, _BUFFERS.replace("name", "_TAIL"), "kernels"),
        ("without an lse there is no place for it", _SCRATCH_LSE, "pass", "out"),
        ("the caller's array is not filled", _OUTPUTS, "outputs", "out"),
        ("windows are attended as if there were none", 'if p.mask not in ("full", "causal"):', "if False:", "choice"),
        ("distances of ALiBi are the group's", "p.alibi is not None or ", "", "choice"),
        ("positions are the group's", "p.positions or ", "", "choice"),
        ("queries take the first sequence's factor", "request.q_descale is not None", "False", "choice"),
        ("pinned splits follow the batch", "if p.num_splits:", "if False:", "choice"),
        ("a bias is the first sequence's", "if p.bias is not None:", "if False:", "choice"),
        ("every reading is saved", "(alone - together)", "alone", "model"),
        (
            "latents have values apart",
            "p.head_dim + (0 if p.latent else p.head_dim_v)",
            "p.head_dim + p.head_dim_v",
            "latents",
        ),
        ("one step more", "_STEPS = 2", "_STEPS = 1", "model"),
        ("all that is shared is told as taken", "gain._replace(taken=False, reason=reason)", "gain", "model"),
        ("merges cost nothing", "LAUNCH_BYTES + traffic", "LAUNCH_BYTES", "model"),
        ("rows that fill a tile are worth it", "if not forced and p.gqa_ratio", "if forced and p.gqa_ratio", "model"),
        ("records of other groups are taken", "(shapes, keys) if padded", "(keys,) if padded", "recorded"),
        ("records are made for each length", "bucket if padded else int", "int", "recorded"),
    ),
    *_faults(
        "kv/sharing",
        ("pages that the first of two does not see", "np.minimum(most[1:], most[:-1])", "most[1:]", "groups"),
        ("one page alike makes all alike", "differ.argmax(axis=1)", "table.shape[1]", "groups"),
        ("pages after a difference count", "differ.argmax(axis=1)", "(~differ).sum(axis=1)", "groups"),
        ("a run is cut a sequence late", "end - (common.size - cut)", "end - (common.size - cut) + 1", "groups"),
        ("no run is cut", "if depth == _DEEPEST", "if depth >= 0", "groups"),
    ),
    *_faults(
        "actors/kv_cache",
        ("answers in the order of pages", "[results[id(work)] for work in begun]", "list(results.values())", "apart"),
        ("neighbours stay as they came", "sorted(begun, key=lambda work: work.table[:1].tobytes())", "begun", "apart"),
        ("another group has succeeded", "first.cache.succeeded(begun)", "first.cache.succeeded(group)", "apart"),
        ("the append's kernels run the cascade", "kernels[attending:cascading]", "kernels[cascading:]", "kernels"),
        ("True is auto", "forced = work.cache.cascade is True", "forced = False", "oracle"),
    ),
)
