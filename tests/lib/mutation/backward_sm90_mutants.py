"""Bugs to seed into backward_sm90 and the kernels beside it; `mutation.backward_sm90` runs them.

One table of one family's bugs, which is why the file has over 600 lines.
"""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]

_ELSEWHERE = {
    "main": "hopper_backward/backward_sm90.cu",
    "boxes": "hopper/boxes.cuh",
    "mask": "common/mask.cuh",
    "keys": "backward/keys.cuh",
    "params": "backward/params.cuh",
    "gradient": "common/score_gradient.cuh",
    "bounds": "backward/bounds.cuh",
}


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    path = _ELSEWHERE.get(file, f"hopper_backward/{file}.cuh")
    return Mutant(name, "backward_sm90", path, old, new, probes or ("plain",))


def _prepare(name: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "backward_prepare_sm90", "backward/prepare.cuh", old, new, probes or ("plain",))


def _finish(name: str, old: str, new: str, *probes: str) -> Mutant:
    path = "hopper_backward/backward_finish_sm90.cu"
    return Mutant(name, "backward_finish_sm90", path, old, new, probes or ("plain",))


# Of those that the barriers, waits and fences are there against; the default test run seeds three.
DEFECTS = (
    _bug(
        "weights do not wait for S",
        "main",
        "  ptx::wgmma_wait<DP_LATER ? 0 : 1>();\n  ptx::pin_registers(s);",
        "  ptx::pin_registers(s);",
    ),
    _bug("dS is multiplied unfenced", "main", "number);\n  ptx::fence_proxy_async();\n  sync", "number);\n  sync"),
    _bug(
        "Q is released before dK is done",
        "main",
        (
            "  ptx::wgmma_wait<0>();\n  ptx::pin_registers(dk);\n  ptx::pin_registers(ds);\n"
            "  release(shared.q_empty(stage));\n"
        ),
        (
            "  release(shared.q_empty(stage));\n"
            "  ptx::wgmma_wait<0>();\n  ptx::pin_registers(dk);\n  ptx::pin_registers(ds);\n"
        ),
    ),
    _bug(
        "dP is not waited for",
        "main",
        "  ptx::wgmma_wait<DV_FIRST ? 0 : 1>();\n  ptx::pin_registers(dp);",
        "  ptx::pin_registers(dp);",
    ),
    _bug(
        "dQ leaves before it is multiplied",
        "main",
        "  ptx::wgmma_wait<1>();\n  if constexpr (!DV_FIRST && !SHARED_KEYS) {",
        "  if constexpr (!DV_FIRST && !SHARED_KEYS) {",
    ),
    _bug(
        "consumers do not wait for each other's dS",
        "main",
        "  sync_consumers();  // dS of both is there; and both are done with the last but one, or with P\n",
        "",
    ),
    _bug("dS has one place", "consumer", "shared.ds(ds_half) + first_row", "shared.ds(0) + first_row"),
    _bug("dS's places take no turns", "main", "  if constexpr (!SHARED_KEYS) ds_half ^= 1;\n", ""),
    _bug(
        "Q is not waited for", "main", "  ptx::mbarrier_wait(shared.q_full(stage), parity);\n  if (HIDES", "  if (HIDES"
    ),
    _bug(
        "dO is not waited for",
        "main",
        "    ptx::mbarrier_wait(shared.dout_full(dout_stage), dout_parity);\n    multiply_gradients",
        "    multiply_gradients",
    ),
    _bug(
        "keys are not waited for",
        "consumer",
        "    ptx::mbarrier_wait(shared.keys_full(), keys_parity);\n",
        "",
        "narrow",
    ),
    _bug(
        "weights are multiplied without a fence",
        "main",
        "  ptx::wgmma_fence();\n  if constexpr (DP_LATER) multiply_gradients(dp);",
        "  if constexpr (DP_LATER) multiply_gradients(dp);",
    ),
    _bug(
        "dS is multiplied without a fence of registers",
        "main",
        "  ptx::pin_registers(ds);\n  ptx::wgmma_fence();\n",
        "  ptx::pin_registers(ds);\n",
    ),
    _bug(
        "dQ is sent unfenced",
        "consumer",
        "    ptx::fence_proxy_async();\n    ptx::barrier_arrive",
        "    ptx::barrier_arrive",
        "sent",
    ),
    _bug(
        "dQ's place is written before it is free",
        "consumer",
        "    ptx::barrier_sync(dq_empty(number), SENDING);\n",
        "",
        "sent",
    ),
    _bug(
        "dQ's place is free before it was read",
        "producer",
        "      ptx::bulk_commit();\n      ptx::bulk_wait_read<0>();\n",
        "      ptx::bulk_commit();\n",
        "sent",
    ),
    _bug("a sender does not wait for dQ", "main", "    ptx::barrier_sync(dq_full(consumer), SENDING);\n", "", "sent"),
    _bug(
        "the producer does not wait for a free stage",
        "producer",
        "    ptx::mbarrier_wait(empty, parity);\n",
        "",
    ),
    _bug(
        "lanes of the producer drift apart",
        "producer",
        "    ptx::mbarrier_wait(empty, parity);\n    __syncwarp();\n",
        "    ptx::mbarrier_wait(empty, parity);\n",
    ),
    _bug("bytes of the statistics are not announced", "producer", "Tile::BYTES + ROW_BYTES)", "Tile::BYTES)"),
    _bug(
        "bytes of values are announced as keys'",
        "producer",
        "KBoxes::BYTES + VBoxes::BYTES)",
        "2 * KBoxes::BYTES)",
        "shared mixed",
    ),
    _bug("barriers start unfenced", "main", "  ptx::fence_mbarrier_init();\n", ""),
    _bug("keys are overwritten by dK under a product", "main", "  sync_consumers();  // both are done with K\n", ""),
    _bug(
        "the next keys do not wait",
        "producer",
        "    ptx::mbarrier_wait(shared.keys_empty(), keys_parity);\n",
        "",
        "long",
    ),
    _bug(
        "dK's place is given back unfenced",
        "main",
        "    ptx::fence_proxy_async();  // TMA may bring the next keys there\n",
        "",
        "long",
    ),
    _bug(
        "keys are given back before other lanes have stored dK",
        "main",
        "    __syncwarp();\n    release(shared.keys_empty",
        "    release(shared.keys_empty",
        "long",
    ),
    _bug("keys are never given back", "main", "    release(shared.keys_empty());\n", "", "long"),
    _bug(
        "cleared keys are multiplied unfenced",
        "consumer",
        "      ptx::fence_proxy_async();\n      sync_consumers();\n",
        "      sync_consumers();\n",
        "neighbours",
    ),
    _bug(
        "cleared rows are multiplied unfenced",
        "main",
        "    ptx::fence_proxy_async();\n    sync_consumers();\n  }\n",
        "    sync_consumers();\n  }\n",
        "nonfinite",
    ),
)

NUMBERS = (
    _bug(
        "products come before differences",
        "scores",
        "(score - ptx::as_float(lse[e % 2])) * LOG2_E",
        "score * LOG2_E - ptx::as_float(lse[e % 2]) * LOG2_E",
        "hidden",
    ),
    _bug("the scale stays natural", "consumer", "(SCALE_ONLY ? LOG2_E : 1.0f)", "1.0f"),
    _bug("the lse is added", "scores", "keys.factor[e / 2] - ptx", "keys.factor[e / 2] + ptx"),
    _bug("the lse is another query's", "scores", "ptx::as_float(lse[e % 2])", "ptx::as_float(lse[e / 2])"),
    _bug("delta is another query's", "scores", "ptx::as_float(delta[e % 2])", "ptx::as_float(delta[e / 2])"),
    _bug("delta is left out", "scores", ": x - d;", ": x;", "wide"),
    _bug("statistics are of the first block of queries", "scores", "lses + block * 32 +", "lses +"),
    _bug("dS is not weighed", "scores", "x = p[e] * difference;", "x = difference;"),
    _bug("dS is stored untransposed", "scores", "ptx::stmatrix_x4_trans", "ptx::stmatrix_x4"),
    _bug("dS of both consumers has one place", "scores", "SHARED_KEYS ? 0 : consumer * (KEYS / 8)", "0"),
    _bug("dS of a warp's halves is exchanged", "scores", "lane / 8 % 2;", "(1 - lane / 8 % 2);"),
    _bug(
        "dS of query blocks is exchanged",
        "scores",
        "lane / 16 * 8 + lane % 8",
        "(1 - lane / 16) * 8 + lane % 8",
    ),
    _bug(
        "each consumer has the first keys",
        "consumer",
        "KBoxes::rows(shared.k() + first_key() * KBoxes::LINE)",
        "KBoxes::rows(shared.k())",
    ),
    _bug(
        "each consumer has the first values",
        "consumer",
        "VBoxes::rows(shared.v() + first_key() * VBoxes::LINE)",
        "VBoxes::rows(shared.v())",
    ),
    _bug("dQ has the first rows twice", "consumer", "first_row = OWN_ROWS ? number * 64 : 0", "first_row = 0"),
    _bug(
        "dQ has the first columns twice",
        "consumer",
        "first_box = (OWN_ROWS ? piece : number) * (DQ_PIECE / KBoxes::WIDTH)",
        "first_box = 0",
        "wide",
    ),
    _bug("dQ has half of the keys", "consumer", "n < BLOCK_N / STEP; n++", "n < BLOCK_N / STEP / 2; n++"),
    _bug(
        "dQ's columns are eight bytes apart",
        "consumer",
        "(i * WARPGROUP + thread()) * 16",
        "(i * WARPGROUP + (thread() ^ 1)) * 16",
        "sent",
    ),
    _bug(
        "dK is not scaled",
        "main",
        "float(params.forward.softmax_scale) * power_of_two(-keys.ds_exponent)",
        "power_of_two(-keys.ds_exponent)",
    ),
    _bug(
        "dV is scaled",
        "main",
        "DROPOUT ? float(params.forward.dropout_scale) : 1.0f);\n  if constexpr (VARLEN)",
        "float(params.forward.softmax_scale));\n  if constexpr (VARLEN)",
    ),
    _bug(
        "gradients of keys past the end are stored",
        "consumer",
        "    if (at >= work.at.seqlen_k) return;\n",
        "",
        "varlen",
    ),
    _bug(
        "keys that no row sees have no gradient",
        "main",
        "    store_zeros<HEAD_DIM_V>(params.dv, params.dv_strides, work);\n",
        "",
        "unseen",
    ),
    _bug(
        "half of the zeros are stored",
        "consumer",
        "n < BLOCK_N / CONSUMERS * (WIDTH / 8); n += WARPGROUP",
        "n < BLOCK_N / CONSUMERS * (WIDTH / 8); n += 2 * WARPGROUP",
        "unseen",
    ),
    _bug("the second head of a group is the first", "work", "      head++;\n", "", "gqa"),
    _bug(
        "a tile of a head is skipped",
        "work",
        "(work.rows.end + BLOCK_M - 1) / BLOCK_M : ",
        "work.rows.end / BLOCK_M : ",
    ),
    _bug("heads of all groups are the first ones", "work", "at.kv_head * work.heads", "0", "gqa"),
    _bug(
        "the first tile is always the first of all",
        "work",
        "work.first_tile = work.rows.begin / BLOCK_M;",
        "work.first_tile = work.rows.begin / BLOCK_M + 1;",
        "causal",
    ),
    _bug("packed rows start at the batch's", "producer", "int(work.at.q_start) + step.tile", "step.tile", "varlen"),
    _bug("packed keys start at the batch's", "producer", "int(work.at.k_start) + work", "work", "varlen"),
    _bug(
        "the lse is delta",
        "producer",
        "                      shared.lse(stage), 0);",
        "                      shared.lse(stage), 1);",
    ),
    _bug("statistics are of the first head", "work", "step.tile) + step.head;", "step.tile);", "gqa"),
)

MASKS = (
    _bug(
        "a tile with hidden pairs is not masked",
        "main",
        "  if (hidden.masked) apply_mask(s",
        "  if (false) apply_mask(s",
        "causal",
    ),
    _bug(
        "hidden pairs have a gradient of their own",
        "main",
        "  if (HIDES_ROWS && hidden.masked) apply_mask(dp",
        "  if (false) apply_mask(dp",
        "nonfinite value",
    ),
    _bug(
        "keys g + 8 are masked as keys g",
        "scores",
        "const SeenRows seen = seen_queries(work, keys.of(half), row_begin);",
        "const SeenRows seen = seen_queries(work, keys.of(0), row_begin);",
        "causal",
    ),
    _bug("the diagonal is hidden", "scores", "query < seen.begin ||", "query <= seen.begin ||", "causal"),
    _bug(
        "queries of a thread are masked as the first one's",
        "scores",
        "row_begin + fresh_thread() % 4 * 2;",
        "row_begin;",
        "causal",
    ),
    _bug("a window has no last row", "scores", "(HIDES_ROWS && query >= seen.end)", "false", "window"),
    _bug(
        "keys past the end are seen",
        "scores",
        "key < work.at.seqlen_k ? rows.begin - first_row : QUERIES",
        "rows.begin - first_row",
        "negative",
    ),
    _bug(
        "only the consumer's tile decides what is cleared",
        "scores",
        "(VARLEN && tile_past_end) || !work.mask.all_visible(tile_begin, tile_end, work.key_begin, key_end)",
        "false",
        "nonfinite",
    ),
    _bug(
        "rows past a sequence's end stay",
        "scores",
        "(VARLEN || WITH_OPTIONS) && row_begin + QUERIES > work.at.seqlen_q",
        "false",
        "neighbours",
    ),
    _bug(
        "nonfinite gradients of outputs are lost",
        "main",
        "  if (HIDES && nonfinite) add_nonfinite(dv, all.params, work, keys, step, first_column(OWN_COLUMNS_V));\n",
        "",
        "nonfinite",
    ),
    _bug(
        "nonfinite gradients reach the first columns twice",
        "main",
        "work, keys, step, first_column(OWN_COLUMNS_V));",
        "work, keys, step, 0);",
        "shared nonfinite",
    ),
    _bug(
        "a shared key's NaN stays in the tile",
        "nonfinite",
        "    clear_tile(tile, KBoxes::BYTES);\n",
        "",
        "shared nonfinite key",
    ),
    _bug("nonfinite gradients reach keys that are hidden", "nonfinite", "if (seen[half]) dv", "dv", "nonfinite"),
    _bug(
        "half of dO is cleared",
        "main",
        "shared.dout(dout_stage), DoBoxes::BYTES",
        "shared.dout(dout_stage), DoBoxes::BYTES / 2",
        "nonfinite",
    ),
    _bug("Q is not cleared", "main", "    clear_tile(shared.q(stage), QBoxes::BYTES);\n", "", "nonfinite q"),
    _bug("keys stay as they came", "consumer", "      set_keys_aside(keys, shared.k(), key());\n", "", "nonfinite key"),
)

TURNS = (
    _bug(
        "dQ is added out of turn",
        "producer",
        "      while (ptx::load_acquire(turns(slot)) != mine) {\n      }\n",
        "",
        "turns",
    ),
    _bug(
        "a turn ends before dQ is added",
        "producer",
        "      ptx::bulk_wait<0>();\n      ptx::fence_proxy_async_global();\n",
        "",
        "turns",
    ),
    _bug(
        "a turn ends when dQ is read",
        "producer",
        "      ptx::bulk_wait<0>();\n      ptx::fence_proxy_async_global();\n",
        "      ptx::bulk_wait_read<0>();\n      ptx::fence_proxy_async_global();\n",
        "turns",
    ),
    _bug(
        "a turn never ends",
        "producer",
        "ptx::store_release(turns(slot), mine + 1);",
        "ptx::store_release(turns(slot), mine);",
        "turns",
    ),
    _bug("consumers share a turn", "producer", "slot * CONSUMERS + consumer", "slot * CONSUMERS", "turns"),
    # Of what lanes and blocks pass on, by memory that nothing orders.
    _bug(
        "a turn is passed on by a plain store",
        "producer",
        "ptx::store_release(turns(slot), mine + 1);",
        "*turns(slot) = mine + 1;",
        "turns",
    ),
    _bug(
        "a turn at dQ is passed on by a plain store",
        "consumer",
        "ptx::store_release(turns, turn + 1);\n      }\n    }\n  }\n\n  // Hands",
        "*turns = turn + 1;\n      }\n    }\n  }\n\n  // Hands",
        "shared turns",
    ),
    _bug(
        "a turn at dbias is passed on by a plain store",
        "consumer",
        "if (threadIdx.x == WARPGROUP) ptx::store_release(turns, turn + 1);",
        "if (threadIdx.x == WARPGROUP) *turns = turn + 1;",
        "turns bias",
    ),
    _bug(
        "gradients of keys leave before other lanes have put them there",
        "consumer",
        "    __syncwarp();\n#pragma unroll 4\n",
        "#pragma unroll 4\n",
    ),
    _bug(
        "blocks are numbered by their place",
        "keys",
        "if constexpr (!DETERMINISTIC) return int(blockIdx.x);",
        "return int(blockIdx.x);",
        "turns",
    ),
)

OPTIONS = (
    _bug("a cap has no derivative", "gradient", "  derivative *= 4.0f * r * (1.0f - r);\n", "", "cap"),
    _bug("a cap is twice as wide", "gradient", "- 2.0f * score.softcap * r", "- score.softcap * r", "cap"),
    _bug("weights have no derivative", "scores", "GRADIENT_NEEDS_DOT ? x * derivatives[e] : x;", "x;", "cap"),
    _bug(
        "weights of dV have a derivative",
        "scores",
        "      weights[e] = hidden[e] ? 0.0f : x;\n",
        "      weights[e] = hidden[e] ? 0.0f : x * derivative;\n",
        "cap",
    ),
    _bug("ALiBi knows no distance after the diagonal", "scores", "fabsf(distance)", "distance", "alibi"),
    _bug("queries are all as far as the first", "scores", "distance[e / 2] + float(query)", "distance[e / 2]", "alibi"),
    _bug("keys g + 8 are as far as keys g", "scores", "distance[e / 2] + float", "distance[0] + float", "alibi"),
    _bug(
        "the bias is another key's",
        "scores",
        "score.bias[row * score.bias_row_stride + key]",
        "score.bias[row * score.bias_row_stride]",
        "bias",
    ),
    _bug(
        "the bias is read past the last row",
        "scores",
        "row = at_most(work.at.seqlen_q - 1, first_row + query);",
        "row = first_row + query;",
        "bias",
    ),
    _bug(
        "dbias is added to other keys",
        "scores",
        "query * strides.row + keys.of(i / 2 % 2)",
        "query * strides.row + keys.of(0)",
        "bias",
    ),
    _bug(
        "dbias is taken with what is hidden",
        "main",
        "  if (HIDES_ROWS && hidden.masked) apply_mask(dp",
        "  if (false) apply_mask(dp",
        "nonfinite bias",
    ),
    _bug(
        "a turn at dbias begins for one thread alone",
        "consumer",
        "turns) != turn) {\n      }\n    }\n    sync_consumers();\n",
        "turns) != turn) {\n      }\n    }\n",
        "turns bias",
    ),
    _bug(
        "a turn at dbias ends as it begins",
        "consumer",
        "    sync_consumers();\n  }\n  __device__ __forceinline__ void end_turn(int32_t* turns, int turn) const {\n"
        "    if (threadIdx.x == WARPGROUP) ptx::store_release(turns, turn + 1);\n",
        "    sync_consumers();\n"
        "    if (threadIdx.x == WARPGROUP) ptx::store_release(const_cast<int32_t*>(turns), turn + 1);\n"
        "  }\n  __device__ __forceinline__ void end_turn(int32_t* turns, int turn) const {\n",
        "turns bias",
    ),
    _bug("dbias takes no turns", "main", "      begin_turn(turns, turn);\n", "", "turns bias"),
    _bug(
        "heads take the same turn at dbias",
        "scores",
        "(one_head ? head : 0);\n  const int64_t",
        "0;\n  const int64_t",
        "turns bias",
    ),
    _bug("dropped weights are multiplied", "scores", "& 1 ? x : x * 0.0f", "& 1 ? x : x", "dropout"),
    _bug(
        "gradients of dropped weights stay",
        "scores",
        "& 1 ? x * terms.kept_scale : 0.0f",
        "& 1 ? x * terms.kept_scale : x",
        "dropout",
    ),
    _bug("kept gradients are not scaled", "scores", "? x * terms.kept_scale :", "? x :", "dropout"),
    _bug(
        "all blocks of queries drop alike",
        "scores",
        "row_begin + 64 * i + 8 * block, first_key",
        "row_begin + 64 * i, first_key",
        "dropout",
    ),
    _bug(
        "all heads drop alike",
        "main",
        "draw_kept(kept, all.params, work, step.head",
        "draw_kept(kept, all.params, work, work.first_head",
        "dropout",
    ),
    _bug("all warps drop alike", "main", "first_key() + thread() / 32 * 16;  // of", "first_key();  // of", "dropout"),
)

RANGE = (
    _bug(
        "dS has no factor",
        "scores",
        "x * terms.factor - d * terms.factor",
        "x - d",
    ),
    _bug("dK keeps dS's factor", "main", " * power_of_two(-keys.ds_exponent));", ");"),
    _prepare(
        "values have no part in the bound of dS", "+ LARGEST_VALUE, sqrtf(norm))", "+ LARGEST_DOUT, 0.0f)", "opposite"
    ),
    _prepare("dO has no part in the bound of dS", "raise_bound(bounds + LARGEST_DOUT, sqrtf(norm));", "", "opposite"),
    _finish("dQ keeps dS's factor", " * power_of_two(-ds_exponent(params, at.sequence, kv_head))", ""),
)

OUTER = (
    _prepare("the lse stays natural", "lse * LOG2_E;", "lse;"),
    _prepare("rows past the end keep their lse", "lse == -INFINITY ? INFINITY : ", "", "few"),
    _prepare("delta is missing", "        delta = sum;\n", "        delta = 0.0f;\n"),
    _prepare("the sink's gradient has the wrong sign", "dsink -= exp_of", "dsink += exp_of", "sinks"),
    _finish("dQ is not scaled", "pair[0] * scale", "pair[0]"),
    _finish("rows g + 8 are rows g", "const int row = first_row + 8 * half;", "const int row = first_row;"),
    _finish("rows past the end are stored", "    if (row >= at.seqlen_q) continue;\n", "", "varlen"),
    _finish("columns past the end are stored", "      if (column >= HEAD_DIM) break;\n", "", "narrow"),
    _finish("the second pair is the first", "(4 * WARPGROUP) + 2 * half", "(4 * WARPGROUP)"),
    _finish("consumers have the same columns", "(OWN_ROWS ? 0 : COLUMNS * consumer)", "0", "wide"),
    _finish("consumers have the same rows", "(OWN_ROWS ? 64 * consumer : 0)", "0"),
)

# Of consumers that share their keys.
SHARED = (
    _bug("P is multiplied unfenced", "main", "p, number);\n    ptx::fence_proxy_async();\n", "p, number);\n", "shared"),
    _bug(
        "consumers do not wait for each other's P",
        "main",
        "    sync_consumers();  // P of both is there; and both are done with the last dS\n",
        "",
        "shared",
    ),
    _bug(
        "each consumer has the first queries",
        "consumer",
        " + first_query() * QBoxes::LINE",
        "",
        "shared",
    ),
    _bug("each consumer has the first gradients of rows", "consumer", " + first_query() * DoBoxes::LINE", "", "shared"),
    _bug(
        "each consumer has the first columns of dK and dV",
        "consumer",
        "first_column(OWN) / Tile::WIDTH * Tile::BOX_BYTES",
        "0 * Tile::BOX_BYTES",
        "shared",
    ),
    _bug("both halves of P have one place", "scores", "SHARED_KEYS ? consumer * QUERIES : 0", "0", "shared"),
    _bug(
        "half of the queries are summed",
        "consumer",
        "n < BLOCK_M / STEP; n++) {",
        "n < BLOCK_M / STEP / 2; n++) {",
        "shared",
    ),
    _bug(
        "both halves of the rows have the first lse",
        "main",
        "shared.lse(stage) + first_query() * 4",
        "shared.lse(stage)",
        "shared",
    ),
    _bug(
        "both halves of the rows have the first delta",
        "main",
        "shared.delta(dout_stage) + first_query() * 4",
        "shared.delta(dout_stage)",
        "shared",
    ),
    _bug(
        "both halves of the rows are masked as the first",
        "main",
        "row_begin = tile_begin + first_query();",
        "row_begin = tile_begin;",
        "shared causal",
    ),
    _bug(
        "the pieces of dQ are the first", "consumer", "(OWN_ROWS ? piece : number)", "(OWN_ROWS ? 0 : number)", "shared"
    ),
    _bug("the pieces of dQ are added to the first", "consumer", " + piece * (64 * DQ_PIECE)", "", "shared"),
    _bug(
        "the last pieces of dQ are not multiplied",
        "main",
        "piece < DQ_PIECES; piece++",
        "piece < DQ_PIECES - 1; piece++",
        "shared",
    ),
    _bug(
        "a piece of dQ is added before it is multiplied",
        "main",
        "    multiply_keys(dq, piece);\n    ptx::wgmma_wait<0>();\n",
        "    multiply_keys(dq, piece);\n",
        "shared",
    ),
    _bug("dO has the stage of Q", "work", "DO_STAGES == STAGES ? ring.parity", "true ? ring.parity", "shared mixed"),
    _bug(
        "dO is released before dV is done",
        "main",
        "    ptx::wgmma_wait<0>();\n    ptx::pin_registers(dv);\n  }\n  store_ds",
        "  }\n  store_ds",
        "shared mixed",
    ),
    _bug(
        "a consumer stores the first columns",
        "consumer",
        "const int first_unit = first_column(OWN) / 8;",
        "const int first_unit = 0;",
        "shared mixed",
    ),
    _bug(
        "columns past the end of dK are stored",
        "consumer",
        "      if (SHARED_KEYS && unit >= WIDTH / 8) continue;\n",
        "",
        "shared narrow",
    ),
    _bug(
        "dQ is added without a turn",
        "consumer",
        "          while (ptx::load_acquire(turns) != turn) {\n          }\n",
        "",
        "shared turns",
    ),
    _bug("consumers share a turn at dQ", "consumer", "slot * CONSUMERS + number;", "slot * CONSUMERS;", "shared turns"),
    _bug(
        "a turn at dQ begins with its last piece",
        "consumer",
        "      if (piece == 0) {\n        if (thread",
        "      if (piece == DQ_PIECES - 1) {\n        if (thread",
        "shared turns",
    ),
    _bug(
        "a turn at dQ begins for one thread alone",
        "consumer",
        "          }\n        }\n        sync_consumer(number);\n",
        "          }\n        }\n",
        "shared turns",
    ),
    _bug(
        "a turn at dQ ends before all threads have added",
        "consumer",
        "        sync_consumer(number);\n        if (thread() == 0) ptx::store_release",
        "        if (thread() == 0) ptx::store_release",
        "shared turns",
    ),
    _bug(
        "a turn at dQ never ends",
        "consumer",
        "ptx::store_release(turns, turn + 1);\n      }\n    }\n  }\n\n  // Hands",
        "ptx::store_release(turns, turn);\n      }\n    }\n  }\n\n  // Hands",
        "shared turns",
    ),
)

# Of products that are kept for a second computation of the weights, where a bias stands beside a derivative.
AGAIN = (
    _bug(
        "kept products are the first block's",
        "scores",
        "load_shared_v4(again, kept_products + block * (16 * WARPGROUP))",
        "load_shared_v4(again, kept_products)",
        "cap bias",
    ),
    _bug(
        "kept products of threads have one place",
        "main",
        "shared.dq(number) + thread() * 16;",
        "shared.dq(number);",
        "cap bias",
    ),
    _bug(
        "consumers keep products in one place",
        "main",
        "kept_products = shared.dq(number)",
        "kept_products = shared.dq(0)",
        "cap bias",
    ),
    _bug(
        "dbias has the derivative",
        "scores",
        "      if (hidden[e]) x = 0.0f;\n",
        "      x = hidden[e] ? 0.0f : x * derivatives[e];\n",
        "cap bias",
    ),
    _bug(
        "dS has no derivative beside dbias",
        "scores",
        "x = hidden[e] ? 0.0f : x * derivatives[e];",
        "x = hidden[e] ? 0.0f : x;",
        "cap bias",
    ),
    _bug("tiles of dbias share their turns", "scores", " + tile) * key_tiles", ") * key_tiles", "turns bias"),
    _bug(
        "heads of dbias share a turn",
        "scores",
        "+ (one_head ? head : 0);\n  const int64_t matrix",
        "+ 0;\n  const int64_t matrix",
        "turns bias",
    ),
    _bug("dbias of hidden pairs is added", "scores", "      if (hidden[e]) x = 0.0f;\n", "", "nonfinite cap bias"),
)

MUTANTS = (*DEFECTS, *NUMBERS, *MASKS, *TURNS, *OPTIONS, *RANGE, *OUTER, *SHARED, *AGAIN)
