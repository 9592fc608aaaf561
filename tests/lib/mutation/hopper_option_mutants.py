"""Bugs in what forward_sm90 does between products and weights: score modifications. See `hopper_mutants`."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["OPTIONS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    elsewhere = {"rows": "mma/softmax.cuh", "score": "common/score.cuh", "forward": "hopper/forward_sm90.cu"}
    file = elsewhere.get(file, f"hopper/{file}.cuh")
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
        "  if (SCALED) scale = 1.0f;  // of what `score` makes of them\n",
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
        "    score<true>(r.s, rows, bias, first_key, work.is_full(last));\n    apply_mask(r.s, rows, first_key);",
        "    apply_mask(r.s, rows, first_key);\n    score<true>(r.s, rows, bias, first_key, work.is_full(last));",
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

_SOFTMAX = "softmax_tile<false>(r.s, r.softmax, correction, rows.exponents);"
_DROP = "if constexpr (DROPOUT) drop_weights(r.s, kept);"
DROPOUT = (
    _bug(
        "sums lack what is dropped",
        "forward",
        f"  {_SOFTMAX}\n  {_DROP}\n",
        f"  {_DROP}\n  {_SOFTMAX}\n",
        "dropout",
    ),
    _bug(
        "the first tile drops nothing",
        "consumer",
        "    if constexpr (DROPOUT) drop_weights(r.s, kept);\n",
        "",
        "dropout",
    ),
    _bug("further tiles drop nothing", "forward", "  if constexpr (DROPOUT) drop_weights(r.s, kept);\n", "", "dropout"),
    _bug(
        "what is kept is not scaled",
        "store",
        "  if constexpr (DROPOUT) return static_cast<float>(params.dropout_scale);\n",
        "",
        "dropout",
    ),
    _bug(
        "the other ones are dropped",
        "softmax",
        "if (!(kept[i / 32] >> i % 32 & 1)) s[i] = 0.0f;",
        "if (kept[i / 32] >> i % 32 & 1) s[i] = 0.0f;",
        "dropout",
    ),
    _bug("the second word is the first", "softmax", "kept[i / 32] >> i % 32", "kept[0] >> i % 32", "dropout"),
    _bug(
        "every tile draws for key 0 on",
        "softmax",
        "const int key = first_key + 64 * i + 8 * (block + next)",
        "const int key = 64 * i + 8 * (block + next)",
        "dropout",
    ),
    _bug(
        "both words draw for the same keys",
        "softmax",
        "first_key + 64 * i + 8 * (block + next)",
        "first_key + 8 * (block + next)",
        "dropout",
    ),
    _bug(
        "every other block is drawn twice",
        "softmax",
        "8 * (block + next) + lane_id() % 4 * 2;\n        bits",
        "8 * block + lane_id() % 4 * 2;\n        bits",
        "dropout",
    ),
    _bug("bits of two blocks mix", "softmax", "<< 4 * (block + next);", "<< 4 * block + next;", "dropout"),
    _bug(
        "the rows below are the rows",
        "softmax",
        "rows.row(0), rows.row(1), key)",
        "rows.row(0), rows.row(0), key)",
        "dropout",
    ),
    _bug(
        "heads draw alike",
        "softmax",
        "make_dropout(params, sequence, head)",
        "make_dropout(params, sequence, 0)",
        "dropout",
    ),
    _bug(
        "sequences draw alike",
        "softmax",
        "make_dropout(params, sequence, head)",
        "make_dropout(params, 0, head)",
        "dropout",
    ),
    _bug(
        "odd lanes keep the even ones' words",
        "rows",
        "const uint32_t own[2] = {odd ? word[2] : word[0], odd ? word[3] : word[1]};",
        "const uint32_t own[2] = {word[0], word[1]};",
        "dropout",
    ),
    _bug(
        "halves are not handed over",
        "rows",
        "kept |= uint32_t((odd ? own[i] : got[i]) >=",
        "kept |= uint32_t(own[i] >=",
        "dropout",
    ),
    _bug(
        "mended rows drop nothing",
        "nonfinite",
        "!DROPOUT || rows.dropout.keeps(row, key)",
        "true",
        "nonfinite, dropped",
    ),
)

BIAS = (
    _bug(
        "rows past the end read a bias",
        "softmax",
        "const int row = at_most(last_row, rows.row(half));",
        "const int row = rows.row(half);",
        "bias",
    ),
    _bug(
        "keys past the end read a bias",
        "softmax",
        "LAST ? at_most(rows.mask.seqlen_k - 1, key) : key];",
        "key];",
        "bias",
    ),
    _bug(
        "a bias in pairs is read by the last tile",
        "softmax",
        "if (!LAST && rows.bias_in_pairs)",
        "if (rows.bias_in_pairs)",
        "bias",
    ),
    _bug(
        "the second row reads the first's",
        "softmax",
        "(rows.bias[i % 2] + first + i / 2 * 8)",
        "(rows.bias[0] + first + i / 2 * 8)",
        "bias",
    ),
    _bug("pairs are four keys apart", "softmax", "+ first + i / 2 * 8)", "+ first + i / 2 * 4)", "bias"),
    _bug(
        "single keys are four apart",
        "softmax",
        "const int key = first + i / 4 * 8 + i % 2;",
        "const int key = first + i / 4 * 4 + i % 2;",
        "odd bias",
    ),
    _bug("neighbours share a bias", "softmax", ".of[i % 2]);", ".of[0]);", "bias"),
    _bug(
        "rows change biases",
        "softmax",
        "tile[i / 4][i / 2 % 2].of[i % 2]);",
        "tile[i / 4][1 - i / 2 % 2].of[i % 2]);",
        "bias",
    ),
    _bug(
        "biased products are not scaled",
        "softmax",
        "i < BLOCK_N / 2 && SCALED && !SCORE_MOD; i++) s[i] *= rows.scale;",
        "i < 0; i++) s[i] *= rows.scale;",
        "bias",
    ),
    _bug(
        "a bias is scaled with the score",
        "softmax",
        "  if (SCALED) scale = 1.0f;",
        "  if (SCORE_MOD) scale = 1.0f;",
        "bias",
    ),
    _bug("capped scores are in base 2", "softmax", "x = rows.softcap -", "x = LOG2_E * rows.softcap -", "capped bias"),
    _bug(
        "the last tile has no bias",
        "consumer",
        "    if constexpr (BIAS) load_bias<true>(bias, rows, first_key);\n",
        "    if constexpr (BIAS) load_bias<true>(bias, rows, 0);\n",
        "bias",
    ),
    _bug(
        "a bias of the first head",
        "softmax",
        "params.bias, strides, sequence, row, head)",
        "params.bias, strides, sequence, row, 0)",
        "bias",
    ),
    _bug(
        "a mask adds",
        "score",
        "return bias ? score : Real(-INFINITY);",
        "return score + Real(bias);",
        "mask",
    ),
)

OPTIONS = (*MODIFICATIONS, *DROPOUT, *BIAS)
