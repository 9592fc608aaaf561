"""Bugs to seed into the backward kernels; backward_mutation.py runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["MUTANTS"]

_MMA, _SCORES, _RING, _SHARES = "backward/backward_mma.cu", "backward/scores.cuh", "backward/ring.cuh", "mma/shares.cuh"
_ORDER = "common/block_order.cuh"
_KEYS, _PARAMS, _MASK, _DROPOUT = "backward/keys.cuh", "backward/params.cuh", "common/mask.cuh", "mma/dropout.cuh"


def _mma(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "backward_mma", file, old, new, probes or ("plain",))


def _prepare(name: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "backward_prepare", "backward/prepare.cuh", old, new, probes or ("plain",))


def _finish(name: str, old: str, new: str, *probes: str, file: str = "backward/backward_finish.cu") -> Mutant:
    return Mutant(name, "backward_finish", file, old, new, probes or ("plain",))


def _simple(name: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "backward_simple", "backward/backward_simple.cu", old, new, probes or ("simple",))


PREPARE_MUTANTS = (
    _prepare("delta is a lane's, not the row's", "sum += __shfl_xor_sync(ALL_LANES, sum, step)", "sum += 0.0f"),
    _prepare("the lse stays natural", "lse * LOG2_E;", "lse;"),
    _prepare("rows past the end keep their lse", "lse == -INFINITY ? INFINITY : ", ""),
    _prepare("delta is missing", "        delta = sum;\n", "        delta = 0.0f;\n"),
    _prepare("half of a row is added up", "chunk += LANES) {", "chunk += 2 * LANES) {", "wide"),
    _prepare("rows past the end are read", "row < at.seqlen_q ? row : at.seqlen_q - 1", "row"),
    _prepare("the sink's gradient has the wrong sign", "dsink -= exp_of", "dsink += exp_of", "options"),
    _prepare(
        "the sink's parts of all but one warp are lost",
        "warp < PREPARE_THREADS / 32; warp++",
        "warp < 1; warp++",
        "options",
    ),
    _prepare(
        "sequences share a part of the sink's gradient", "* params.batch + at.sequence)", "* params.batch)", "options"
    ),
)

FINISH_MUTANTS = (
    _finish("dQ is not scaled", "% REDUCE_WIDTH] * scale;", "% REDUCE_WIDTH];"),
    _finish("rows g + 8 are rows g", "const int row = first_row + 8 * half;", "const int row = first_row;"),
    _finish("rows past the end are stored", "    if (row >= at.seqlen_q) continue;\n", ""),
    _finish("dQ's second pair of rows is its first", "block + 2 * half + i", "block + i"),
    _finish(
        "sums of lanes are read in another width",
        "value / REDUCE_WIDTH * (REDUCE_WIDTH * THREADS)",
        "value * 1",
        "late",
    ),
    _finish(
        "parts of the sinks' gradient are left out",
        "thread < THREADS; thread++",
        "thread < THREADS / 8; thread++",
        "sinks",
        file="backward/finish.cuh",
    ),
    _finish(
        "dbias stays as it was",
        "dbias[n] = from_real",
        "if (n < 0) dbias[n] = from_real",
        "options",
        file="backward/finish.cuh",
    ),
)

RING_MUTANTS = (
    _mma("a step is not waited for", _RING, "cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>", "cp_async_wait<STAGES>"),
    _mma("the barrier of a step is dropped", _RING, "    __syncthreads();\n    return false;", "    return false;"),
    _mma(
        "a stage is refilled one step early",
        _RING,
        "(STAGES > 1) fill(next(now))",
        "(STAGES > 1) fill(now.number < 0 ? next(now) : next(next(now)))",
    ),
    _mma(
        "the only stage is refilled at once",
        _RING,
        "if (now.number > 0) __syncthreads();  // all have left the stage",
        "",
        "wide",
    ),
    _mma(
        "keys stay as they came",
        _MMA,
        "      else if (!BLOCK_MASK || now.number < 0) prepare_keys(work);\n",
        "",
        "nonfinite key",
    ),
    _mma("dO has Q's stage", _RING, "{q_tile(now).base + QTile::BYTES}", "{q_tile(now).base}"),
    _mma(
        "statistics of every step are the first's",
        _RING,
        "params.statistics + slot(now)",
        "params.statistics + slot({0, now.head, first_tile})",
    ),
    _mma("a head goes on past its last tile", _RING, "whole ? first_tile : now.tile + 1", "now.tile + 1"),
    _mma("heads of a group are all the first", _RING, "now.head + whole", "now.head"),
    _mma(
        "query heads are dealt out in turn",
        _RING,
        "{1 - STAGES, at.kv_head * heads,",
        "{1 - STAGES, at.kv_head,",
        "gqa",
    ),
    _mma(
        "packed keys start at the queries' start",
        _KEYS,
        "at.k_start = params.cu_seqlens_k[sequence];",
        "at.k_start = at.q_start;",
        "varlen",
    ),
    _mma("slots of packed sequences overlap", _PARAMS, "/ BLOCK_M + sequence;", "/ BLOCK_M;", "varlen"),
    _mma(
        "nonfinite values stay in a tile with a mask",
        _RING,
        "clear_nonfinite<ELEMENT, THREADS>(do_tile(now))",
        "false",
        "nonfinite",
    ),
    _mma(
        "nonfinite values of dO reach no key",
        _MMA,
        "if (nonfinite) add_nonfinite",
        "if (false) add_nonfinite",
        "nonfinite",
    ),
    _mma(
        "a nonfinite key stays in the tile", _MMA, "  clear_nonfinite<ELEMENT, THREADS>(keys);\n", "", "nonfinite key"
    ),
)

MASK_MUTANTS = (
    _mma(
        "the last rows of a causal tile are skipped",
        _MASK,
        "at_least(0, key_begin - diagonal);",
        "at_least(0, key_begin - diagonal + 64);",
        "causal",
    ),
    _mma(
        "a window's last rows are skipped",
        _MASK,
        "reach.end_own(key_end) - diagonal",
        "key_end - diagonal",
        "window",
    ),
    _mma(
        "sink tokens are seen by the window's rows alone",
        _MASK,
        "SINK_TOKENS && key_begin < sink_tokens;",
        "false;",
        "window",
    ),
    _mma("the diagonal is one key off", _SCORES, "if (query < begin ||", "if (query + 1 < begin ||", "causal"),
    _mma("hidden pairs keep their weights", _MMA, "  if (masked) apply_mask(p, work, now);\n", "", "causal"),
    _mma("unmasked tiles are masked instead", _MMA, "if (masked) apply_mask(p", "if (!masked) apply_mask(p", "causal"),
    _mma(
        "hidden pairs keep their dS",
        _MMA,
        "  if (masked) apply_mask(dp, work, now);  // 0 times a NaN is none\n",
        "",
        "nonfinite",
    ),
    _mma(
        "hidden pairs reach dbias",
        _MMA,
        "    if (masked) apply_mask(dp, work, now);\n    add_to",
        "    add_to",
        "nonfinite bias",
    ),
    _mma(
        "keys past the end are not hidden",
        _SCORES,
        "key < work.mask.seqlen_k ? rows.end - first_row : 0",
        "rows.end - first_row",
        "options",
    ),
    _mma(
        "a tile with a mask passes as unmasked",
        _MMA,
        "row_end, key_begin, key_begin + BLOCK_N)",
        "row_end, key_begin, key_begin)",
        "causal",
    ),
    _mma(
        "a tile with one hidden pair passes as unmasked",
        _MASK,
        "if (CAUSAL && key_end - 1 > row_begin + diagonal)",
        "if (CAUSAL && key_end - 1 > row_begin + diagonal + 1)",
        "edge",
    ),
    _mma(
        "a tile is masked as the next one",
        _MMA,
        "const bool masked = !mask.all_visible(row_begin, row_end",
        "const bool masked = !mask.all_visible(row_begin + BLOCK_M, row_end + BLOCK_M",
        "causal",
    ),
)

SCORE_MUTANTS = (
    _mma(
        "weights are in base e",
        _SCORES,
        "const float to_log2 = score.scale * LOG2_E;",
        "const float to_log2 = score.scale;",
    ),
    _mma(
        "products come before differences",
        _SCORES,
        "(x - ptx::as_float(lse[e % 2])) * LOG2_E",
        "(x * LOG2_E - ptx::as_float(lse[e % 2]) * LOG2_E)",
        "hidden",
    ),
    _mma("delta is the lse", _SCORES, "(BLOCK_M + work.warp.query(block, 0)) * 4", "work.warp.query(block, 0) * 4"),
    _mma("delta is of the neighbouring query", _SCORES, "delta[e % 2]", "delta[0]"),
    _mma("keys g + 8 are keys g", _SCORES, "16 * row + 8 * half + lane_id() / 4", "16 * row + lane_id() / 4", "causal"),
    _mma("dP is not scaled up for what was dropped", _SCORES, "? x * kept_scale : 0.0f", "? x : 0.0f", "options"),
    _mma(
        "dropped pairs keep their dP",
        _SCORES,
        "& 1 ? x * kept_scale : 0.0f",
        "& 1 ? x * kept_scale : x * kept_scale",
        "options",
    ),
    _mma(
        "dropped pairs give values' gradients",
        _SCORES,
        "if (!(kept[r] >> i & 1)) weights",
        "if (false) weights",
        "options",
    ),
    _mma(
        "lanes draw for each other's queries", _DROPOUT, "lane % 4 * 2 + mine % 2", "lane % 4 * 2 + mine / 2", "options"
    ),
    _mma("words are handed to the wrong lane", _DROPOUT, "exchange(mine & 2, 1, 3);", "", "options"),
    _mma("the softcap has no derivative", "common/score_gradient.cuh", "Real(1) - tanh * tanh", "Real(1)", "options"),
    _mma(
        "dbias has the softcap's derivative",
        _MMA,
        "    add_to_dbias(dp, work, now);\n",
        "    if constexpr (GRADIENT_NEEDS_DOT) differentiate_score(dp, dot, work, score, now);\n"
        "    add_to_dbias(dp, work, now);\n",
        "options",
    ),
    _mma(
        "scores that two warps have are added twice",
        _SCORES,
        "  if (!SPLIT && work.warp.column_warp != 0) return;\n",
        "",
        "redundant",
    ),
)

RANGE_MUTANTS = (
    _mma("dS has no factor", _SCORES, "x * factor - d * factor", "x - d", "large"),
    _mma("dS has no factor beside a bias", _MMA, "    if constexpr (DS_BITS) scale_ds(dp, work);\n", "", "options"),
    _mma("dbias takes dS with its factor", _SCORES, "DS_BITS && !BIAS_GRADIENT ? x", "DS_BITS ? x", "options"),
    _mma("dK keeps dS's factor", _MMA, " * power_of_two(-ring.ds_exponent()));", ");", "large"),
    _prepare(
        "values have no part in the bound of dS", "+ LARGEST_VALUE, sqrtf(norm))", "+ LARGEST_DOUT, 0.0f)", "opposite"
    ),
    _prepare("dO has no part in the bound of dS", "raise_bound(bounds + LARGEST_DOUT, sqrtf(norm));", "", "opposite"),
    _finish("dQ keeps dS's factor", " * power_of_two(-ds_exponent(params, at.sequence, kv_head))", "", "large"),
)

PRODUCT_MUTANTS = (
    _mma(
        "scores are not waited for",
        _MMA,
        "__syncthreads();  // all scores are in shared memory, and all of dbias is added",
        "",
    ),
    _mma("dK is not scaled", _MMA, "float(forward.softmax_scale) * power_of_two", "power_of_two"),
    _mma(
        "dV of what was kept is not scaled up",
        _MMA,
        "DROPOUT ? float(forward.dropout_scale) : 1.0f);\n}",
        "1.0f);\n}",
        "options",
    ),
    _mma("keys past the end are stored", _MMA, "    if (key >= at.seqlen_k) continue;\n", ""),
    _mma("passes start at the first query", _MMA, "first_query + pass * PASS;", "first_query;", "passes"),
    _mma("dQ's rows are the first 16", _MMA, "warp % ROW_WARPS * DQ_ROWS * ROW_CHUNKS", "0"),
    _mma(
        "later columns of dQ start at the first",
        _SHARES,
        "pair / PAIRS_A_PART * STRIDE * GROUP * 16);\n  }\n  // Pairs",
        "0);\n  }\n  // Pairs",
        "wide dq",
    ),
    _mma("warps share columns", _SHARES, "warp % PARTS * PAIRS_A_PART * PAIR, warp", "0, warp", "wide"),
    _mma("transposed scores swap places", _SHARES, "sizeof(ELEMENT) == 2 ? lane_of_b(tile)", "false ? lane_of_b(tile)"),
    _mma(
        "transposed scores of floats swap places",
        _SHARES,
        "a[1] = b[2];\n    a[2] = b[1];",
        "a[1] = b[1];\n    a[2] = b[2];",
        "float",
    ),
    _mma("rows 16 and on of dQ are its first", _MMA, "step, r * ROW_CHUNKS", "step, 0", "pairs"),
    _mma("rows 16 and on of dQ are added to its first", _MMA, "* DQ_ROWS + r) * (4", "* DQ_ROWS) * (4", "pairs"),
    _finish("rows 16 and on of dQ are left out", "half < 2 * DQ_ROWS;", "half < 2;", "pairs"),
    _finish("rows 16 and on of dQ are another column's", "4 * DQ_ROWS * block", "4 * block", "pairs"),
    _mma(
        "scores are stored a block further on",
        _SHARES,
        "lane.at<Tile>(first_key + 8 * half, block)",
        "lane.at<Tile>(first_key + 8 * half, block ^ 1)",
    ),
    _mma(
        "keys of shared scores repeat",
        _SHARES,
        "ptx::ldmatrix_x4(a, lane.at<Tile>(first_key, 2 * step))",
        "ptx::ldmatrix_x4(a, lane.at<Tile>(first_key, 0))",
        "wide",
    ),
    _mma(
        "float scores swap places",
        _SHARES,
        "a[half] = words[0];\n      a[2 + half] = words[1];",
        "a[half] = words[1];\n      a[2 + half] = words[0];",
        "float",
    ),
    _mma(
        "floats are not rounded",
        _RING,
        "constexpr bool ROUNDED = sizeof(ELEMENT) == 4;",
        "constexpr bool ROUNDED = false;",
        "float",
    ),
    _mma(
        "dQ is stored instead of added",
        _MMA,
        "ptx::reduce_add(to + e * THREADS, dq[block][r][e])",
        "to[e * THREADS] = dq[block][r][e]",
    ),
)

_PASSES_OF_A_TURN = """  }
  const int first_query = work.warp.first_query;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    work.warp.first_query = first_query + pass * PASS;
    inner_pass(dk, dv, work, score, now, masked);
  }
  work.warp.first_query = first_query;
  __syncthreads();  // all scores are in shared memory, and all of dbias is added
"""
_END_OF_A_TURN = "  if constexpr (BIAS_GRADIENT && DETERMINISTIC) end_turn(dbias_turns, turn);\n"

ORDER_MUTANTS = (
    _mma("no block waits its turn", _SCORES, "    while (ptx::load_acquire(turns) != turn) {\n    }\n", "", "turns"),
    _mma(
        "turns end before all have added",
        _SCORES,
        "  __syncthreads();\n  if (threadIdx.x == 0) ptx::store_release",
        "  if (threadIdx.x == 0) ptx::store_release",
        "turns",
    ),
    _mma(
        "a turn is never passed on",
        _SCORES,
        "ptx::store_release(turns, turn + 1)",
        "ptx::store_release(turns, turn)",
        "turns",
    ),
    _mma(
        "a turn is passed on by a plain store",
        _SCORES,
        "ptx::store_release(turns, turn + 1)",
        "*turns = turn + 1",
        "turns",
    ),
    _mma(
        "turns count tiles that see nothing",
        _MASK,
        "tile < sinks ? tile : tile - begin + sinks",
        "tile",
        "turns window",
    ),
    _mma(
        "blocks are numbered by their place in the grid",
        _KEYS,
        "if constexpr (!DETERMINISTIC) return int(blockIdx.x);",
        "return int(blockIdx.x);",
        "turns",
    ),
    _mma(
        "a number is read before it is drawn",
        _KEYS,
        "atomicAdd(params.tickets, 1)));\n  __syncthreads();",
        "atomicAdd(params.tickets, 1)));",
        "turns",
    ),
    _mma(
        "keys overwrite a number that is not yet read",
        _KEYS,
        "  __syncthreads();  // all have read it\n",
        "",
        "turns",
    ),
    _mma(
        "a block waits for later ones: the last keys come first",
        _KEYS,
        "sequence_head % params.heads_kv, rank)",
        "sequence_head % params.heads_kv, parts - 1 - rank)",
        "turns",
    ),
    _mma(
        "packed sequences lose their first keys",
        _KEYS,
        "rank < missing ? parts - missing : -missing",
        "rank < missing ? parts - missing : 0",
        "varlen",
    ),
    _mma(
        "a tile of keys is taken twice, and one never",
        _ORDER,
        "within / size}",
        "within / size / 2 * 2}",
        "causal",
    ),
    _mma(
        "a turn at dbias ends as it begins",
        _MMA,
        f"    begin_turn(dbias_turns, turn);\n{_PASSES_OF_A_TURN}{_END_OF_A_TURN}",
        f"    begin_turn(dbias_turns, turn);\n    end_turn(dbias_turns, turn);\n{_PASSES_OF_A_TURN}",
        "turns bias",
    ),
    _mma(
        "turns of dbias forget the batch",
        _SCORES,
        "(one_batch ? sequence : 0) * (one_head",
        "0 * (one_head",
        "turns bias",
    ),
)

SIMPLE_MUTANTS = (
    _simple("delta is of dout alone", "sum += dout[column] * Real(to_real(out[column]))", "sum += dout[column]"),
    _simple("delta is a lane's", "  sum = sum_over_lanes(sum);\n", ""),
    _simple("delta lies in the slot of the tile before", "row / BLOCK_M) + head", "row / BLOCK_M / 2) + head"),
    _simple("the queries are still read", "    __syncthreads();  // all have read the queries before\n", ""),
    _simple("the keys are still read", "    __syncthreads();  // all have read the keys before\n", ""),
    _simple(
        "the queries have not come",
        "row_begin);\n      __syncthreads();\n      differentiate<KEY_PASS>",
        "row_begin);\n      differentiate<KEY_PASS>",
    ),
    _simple("the pairs are not waited for", "  __syncwarp();  // a half-warp reads its own rows alone\n", ""),
    _simple("hidden pairs count", "      if (tiles.weights[place] == HIDDEN) continue;\n", "", "simple causal"),
    _simple("a hidden NaN comes through", "weight = HIDDEN;", "weight = 0, gradient = 0;", "simple nonfinite"),
    _simple("rows past the end are seen", "row >= head.seqlen_q || ", "", "simple"),
    _simple(
        "dropout does not reach dV", "weight = kept ? p * dropout_scale : Real(0);", "weight = p;", "simple options"
    ),
    _simple("dropped pairs are not scaled", "kept ? gradient * dropout_scale", "kept ? gradient", "simple options"),
    _simple("dbias is that of the dot product", "PASS == OPTION_PASS ? dscore : ", "", "simple options"),
    _simple(
        "dS forgets the softcap", "score_gradient(head.score, product, dscore, row, key)", "dscore", "simple double"
    ),
    _simple("a group has one head", "member < group", "member < 1", "simple gqa"),
    _simple("the heads of groups are mixed", "at.kv_head * group + member)", "at.kv_head + member)", "simple gqa"),
    _simple("dK is not scaled", "dk, Real(params.forward.softmax_scale)", "dk, Real(1)"),
    _simple("dQ is not scaled", "dq, head.score.scale", "dq, Real(1)"),
    _simple("dV is of dS", "(dv, tiles, tiles.weights", "(dv, tiles, tiles.gradients"),
    _simple("the first query tile is left out", "row_begin = seen.begin / BLOCK_N * BLOCK_N", "row_begin = BLOCK_N"),
    _simple("keys past the end are stored", "key_end - key_begin, dk", "BLOCK_M, dk"),
    _simple("a last column is left out", "if (column < WIDTH) rows", "if (column < WIDTH - 1) rows"),
    _simple("the sink's gradient has the wrong sign", "sum -= exp_of", "sum += exp_of", "simple options"),
    _simple(
        "one sequence has sinks",
        "sequence < params.batch; sequence++) {\n    const KeyPlace",
        "sequence < 1; sequence++) {\n    const KeyPlace",
        "simple options",
    ),
    _simple("a part of a block's sum is lost", "thread < THREADS; thread++", "thread < 32; thread++", "simple options"),
    _simple(
        "a packed sequence begins at the batch's rows",
        "sequence, q_start + row, head);\n    const auto dout",
        "sequence, row, head);\n    const auto dout",
        "simple varlen",
    ),
    _simple(
        "the second block of a bias writes the first rows",
        "row = part * BLOCK_M + first + r",
        "row = first + r",
        "simple options",
    ),
    _simple(
        "a bias' later keys are those of the first tile",
        "head.load_keys<BLOCK_N>(tiles.other, key_begin);\n        for",
        "head.load_keys<BLOCK_N>(tiles.other, 0);\n        for",
        "simple options",
    ),
)

MUTANTS = (
    *PREPARE_MUTANTS,
    *FINISH_MUTANTS,
    *RING_MUTANTS,
    *MASK_MUTANTS,
    *SCORE_MUTANTS,
    *RANGE_MUTANTS,
    *PRODUCT_MUTANTS,
    *ORDER_MUTANTS,
    *SIMPLE_MUTANTS,
)
