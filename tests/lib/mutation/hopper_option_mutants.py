"""Bugs in what forward_sm90 does between products and weights: score modifications. See `hopper_mutants`."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["OPTIONS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    file = "hopper/forward_sm90.cu" if file == "forward" else f"hopper/{file}.cuh"
    return Mutant(name, "forward_sm90", file, old, new, probes)


DOCUMENTS, GATES, PLACES = "document mask", "tanh gating", "local and global"

MODIFICATIONS = (
    _bug(
        "rows past the end are read",
        "softmax",
        "{uint32_t(at_most(rows.last_row, rows.row(0)))",
        "{uint32_t(rows.row(0))",
        DOCUMENTS,
    ),
    _bug(
        "the second row past the end is read",
        "softmax",
        "uint32_t(at_most(rows.last_row, rows.row(1)))}",
        "uint32_t(rows.row(1))}",
        DOCUMENTS,
    ),
    _bug(
        "the last row is one past the end",
        "forward",
        "first_row, work.seqlen_q - 1);",
        "first_row, work.seqlen_q);",
        DOCUMENTS,
    ),
    _bug(
        "keys past the end are read",
        "softmax",
        "    if (LAST) key = at_most(rows.mask.seqlen_k - 1, key);\n",
        "",
        DOCUMENTS,
    ),
    _bug(
        "the last key is one past the end",
        "softmax",
        "key = at_most(rows.mask.seqlen_k - 1, key)",
        "key = at_most(rows.mask.seqlen_k, key)",
        DOCUMENTS,
    ),
    _bug(
        "both rows are the first",
        "softmax",
        "rows.mod(x * rows.scale, int(row[half]), key)",
        "rows.mod(x * rows.scale, int(row[0]), key)",
        PLACES,
    ),
    _bug(
        "rows and keys change places",
        "softmax",
        "rows.mod(x * rows.scale, int(row[half]), key)",
        "rows.mod(x * rows.scale, key, int(row[half]))",
        "prefix lm",
    ),
    _bug(
        "a tile's keys start at 0",
        "softmax",
        "int key = first_key + lane_id() % 4 * 2",
        "int key = lane_id() % 4 * 2",
        PLACES,
    ),
    _bug(
        "blocks of keys are four apart",
        "softmax",
        "% 4 * 2 + i / 2 * 8 + i % 2;\n    if (LAST)",
        "% 4 * 2 + i / 2 * 4 + i % 2;\n    if (LAST)",
        PLACES,
    ),
    _bug(
        "lanes are one key apart",
        "softmax",
        "int key = first_key + lane_id() % 4 * 2",
        "int key = first_key + lane_id() % 4",
        PLACES,
    ),
    _bug(
        "two keys are one",
        "softmax",
        "+ i / 2 * 8 + i % 2;\n    if (LAST)",
        "+ i / 2 * 8;\n    if (LAST)",
        "checkerboard",
    ),
    _bug(
        "the modification takes the plain product", "softmax", "rows.mod(x * rows.scale, ", "rows.mod(x, ", "soft cap"
    ),
    _bug(
        "what it leaves is scaled again",
        "softmax",
        "  if (SCORE_MOD) scale = 1.0f;  // of what the modification leaves\n",
        "",
        "soft cap",
    ),
    _bug(
        "a head reads for its KV head",
        "softmax",
        "bind_score_mod(params.score_params(), sequence, head)",
        "bind_score_mod(params.score_params(), sequence, kv_head)",
        GATES,
    ),
    _bug(
        "every sequence reads for the first",
        "softmax",
        "bind_score_mod(params.score_params(), sequence, head)",
        "bind_score_mod(params.score_params(), 0, head)",
        DOCUMENTS,
    ),
    _bug(
        "the last tile is not modified",
        "softmax",
        "if constexpr (SCORE_MOD) modify<LAST>",
        "if constexpr (SCORE_MOD && !LAST) modify<LAST>",
        GATES,
    ),
    _bug(
        "only the last tile is modified",
        "softmax",
        "if constexpr (SCORE_MOD) modify<LAST>",
        "if constexpr (SCORE_MOD && LAST) modify<LAST>",
        GATES,
    ),
    _bug(
        "the mask comes before the modification",
        "consumer",
        "    score<true>(r.s, rows, first_key);\n    apply_mask(r.s, rows, first_key);",
        "    apply_mask(r.s, rows, first_key);\n    score<true>(r.s, rows, first_key);",
        GATES,
    ),
    _bug(
        "mended rows are not modified",
        "nonfinite",
        "const float modified = score(",
        "const float modified = make_unmodified_score<float>(params, work.sequence, work.head, work.kv_head, 0)(",
        "nonfinite, modified",
    ),
    _bug(
        "signs are those of distances",
        "softmax",
        "ALIBI_SIGNED ? distance : fabsf(distance)",
        "fabsf(distance)",
        "signed alibi",
    ),
    _bug(
        "distances have the other sign",
        "softmax",
        "ALIBI_SIGNED ? distance : fabsf(distance)",
        "ALIBI_SIGNED ? -distance : fabsf(distance)",
        "signed alibi",
    ),
)

OPTIONS = MODIFICATIONS
