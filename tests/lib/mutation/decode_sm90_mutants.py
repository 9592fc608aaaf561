"""Bugs to seed into decode_sm90; `mutation.decode_sm90` runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    path = {"main": "hopper_decode/decode_sm90.cu", "boxes": "hopper/boxes.cuh", "rows": "decode/rows.cuh"}
    path |= {"widen": "decode/widen.cuh", "score": "common/score.cuh"}
    return Mutant(name, "decode_sm90", path.get(file, f"hopper_decode/{file}.cuh"), old, new, probes or ("plain",))


# Of those that the barriers, waits and fences are there against; the default test run seeds two.
DEFECTS = (
    _bug("a stage is not waited for", "main", "  ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);\n", ""),
    _bug(
        "a stage is released before O is done",
        "main",
        "  ptx::wgmma_wait<0>();\n  ptx::pin_registers(o);\n  ptx::pin_registers(p);\n  release();",
        "  release();\n  ptx::wgmma_wait<0>();\n  ptx::pin_registers(o);\n  ptx::pin_registers(p);",
        "long",
    ),
    _bug(
        "a stage is filled before it is free",
        "producer",
        "      ptx::mbarrier_wait(shared.taken(ring.stage), ring.parity);\n",
        "",
        "long",
    ),
    _bug(
        "values are multiplied unfenced after nonfinite ones were cleared",
        "consumer",
        "    ptx::fence_proxy_async();\n    sync_consumers();",
        "    sync_consumers();",
        "nonfinite",
    ),
    _bug(
        "a warpgroup multiplies what the other has not cleared yet",
        "consumer",
        "    ptx::fence_proxy_async();\n    sync_consumers();",
        "    ptx::fence_proxy_async();",
        "nonfinite two",
    ),
    _bug(
        "weights are packed behind the fence",
        "main",
        "  pack(p, s);\n  ptx::pin_registers(o);\n  ptx::pin_registers(p);\n  ptx::wgmma_fence();\n",
        "  ptx::wgmma_fence();\n  pack(p, s);\n",
        "short",
    ),
    _bug("barriers start unfenced", "main", "  ptx::fence_mbarrier_init();\n", ""),
)

MUTANTS = (
    *DEFECTS,
    # Barriers and products
    _bug(
        "barriers are used before they start",
        "main",
        "  __syncthreads();\n  const int warpgroup",
        "  const int warpgroup",
    ),
    _bug("consumers begin with what is empty", "consumer", "ring{0, 0}", "ring{0, 1}"),
    _bug("the producer waits for a first release", "producer", "ring{0, 1}", "ring{0, 0}"),
    _bug(
        "one warp's release frees a stage",
        "main",
        "shared.empty(i), 4 * CONSUMERS);",
        "shared.empty(i), 1);",
        "long",
    ),
    _bug(
        "the first warpgroup's releases free a stage",
        "main",
        "shared.empty(i), 4 * CONSUMERS);",
        "shared.empty(i), 4);",
        "two",
    ),
    _bug("V's bytes are not announced", "producer", "(full, ARRIVING_BYTES)", "(full, ArrivingK::BYTES)"),
    _bug("a ring does not go round", "consumer", "    ring.advance();\n", ""),
    _bug("V lies over K", "layout", "return k(stage) + KBoxes::BYTES;", "return k(stage);"),
    _bug(
        "weights do not wait for S",
        "main",
        "  ptx::wgmma_wait<0>();\n  ptx::pin_registers(s);",
        "  ptx::pin_registers(s);",
    ),
    _bug("Q K^T is not fenced", "main", "  ptx::wgmma_fence();\n  multiply_keys", "  multiply_keys"),
    _bug("P V is not fenced", "main", "  ptx::wgmma_fence();\n  multiply_values", "  multiply_values"),
    _bug(
        "S adds to what was there",
        "consumer",
        "k + KBoxes::column_step(n), n > 0);",
        "k + KBoxes::column_step(n), true);",
    ),
    _bug(
        "O is of the last keys alone", "consumer", "v + VBoxes::row_step(n), true);", "v + VBoxes::row_step(n), n > 0);"
    ),
    _bug(
        "the same columns of K are multiplied", "consumer", "k + KBoxes::column_step(n)", "k + KBoxes::column_step(0)"
    ),
    _bug("the same rows of V are multiplied", "consumer", "v + VBoxes::row_step(n)", "v + VBoxes::row_step(0)"),
    # The producer
    _bug(
        "a part is as long as a page",
        "producer",
        "at_most(BLOCK_N, size & -size)",
        "at_most(BLOCK_N, size)",
        "odd pages",
    ),
    _bug("every part is a tile's first", "producer", "lane % parts * size, size", "0 * size, size"),
    _bug("every tile is the first of those looked up", "producer", "turn * parts + p", "p"),
    _bug("the last tile is not looked up", "producer", "if (tile < piece.last)", "if (tile < piece.last - 1)"),
    _bug("pages are looked up once", "producer", "if (turn == 0)", "if (n == piece.first)", "long"),
    _bug(
        "a part that ends past the last key is left out",
        "producer",
        "key < keys.end && key + part",
        "key + part <= keys.end && key + part",
    ),
    _bug(
        "a part that begins before the window is left out",
        "producer",
        "key + part > keys.begin;",
        "key >= keys.begin;",
        "window",
    ),
    _bug(
        "parts of sink tokens are left out", "producer", "if (!ranged && key >= keys.sinks)", "if (!ranged)", "window"
    ),
    _bug("the row in a page is the first", "producer", "place.index], place.row}", "place.index], 0}", "odd pages"),
    _bug(
        "every sequence has the first one's cache", "producer", "return {sequence, key};", "return {0, key};", "cache"
    ),
    _bug("values are keys", "producer", "load_part<ArrivingV>(&all.v", "load_part<ArrivingV>(&all.k"),
    _bug("every box is a tile's first", "producer", "box * Tile::WIDTH, at.row", "0, at.row"),
    _bug("every part goes to a tile's beginning", "producer", " + first * Tile::LINE", ""),
    _bug("the KV head is left out", "producer", "at.row, head, at.batch", "at.row, 0, at.batch"),
    # Queries
    _bug("rows g + 8 have the queries of rows g", "consumer", "first_row() + 8 * half);", "first_row());"),
    _bug("parts of Q's fragments swap", "consumer", "[half + block % 2 * 2]", "[half * 2 + block % 2]"),
    _bug(
        "columns past head_dim are read",
        "consumer",
        "if (block * 8 >= HEAD_DIM) word = 0;\n        else if",
        "if",
        "narrow",
    ),
    _bug("both warpgroups have the same rows", "consumer", "return number * ROWS +", "return 0 * ROWS +", "two"),
    _bug("the heads of a group are read as rows", "consumer", "q_start + packed / ratio", "q_start + packed % ratio"),
    # Softmax
    _bug("rows g + 8 have the mask of rows g", "softmax", "columns(rows.row[half]", "columns(rows.row[0]"),
    _bug(
        "a lane's second key has the first one's mask", "softmax", "column = i / 2 * 8 + i % 2,", "column = i / 2 * 8,"
    ),
    _bug("tiles with a mask pass without", "main", "  if (masked) apply_mask(s, rows, first_key);\n", ""),
    _bug("new keys of the tree are all seen", "softmax", "(rows.tree[half] >> fresh & 1) != 0", "true", "tree"),
    _bug("old keys need a bit of the tree", "softmax", "(fresh < 0 || (rows", "((rows", "tree"),
    _bug(
        "scores of rows g + 8 are those of rows g",
        "softmax",
        "rows.score[half](s[i], rows.row[half]",
        "rows.score[0](s[i], rows.row[0]",
        "alibi",
    ),
    _bug(
        "ALiBi measures from a block's first key",
        "softmax",
        "i / 4 * 8 + lane_id() % 4 * 2 + i % 2;",
        "i / 4 * 8;",
        "alibi",
    ),
    _bug("O is not rescaled", "main", "  rescale(o, correction);\n", ""),
    _bug("rows g + 8 are rescaled as rows g", "softmax", "o[i] *= correction[i / 2 % 2];", "o[i] *= correction[0];"),
    _bug("rises of rows g + 8 are not seen", "softmax", " || correction[1] != 1.0f", "", "rise"),
    _bug("half of a row's weights are not summed", "softmax", "l += sum[0] + sum[1];", "l += sum[0];"),
    _bug("weights are packed out of order", "softmax", "p[i / 4][i % 4]", "p[i / 4][i % 4 ^ 1]"),
    # Nonfinite values
    _bug("nonfinite values reach rows that do not see them", "nonfinite", "words[w] &= ~nonfinite;", ";", "nonfinite"),
    _bug("nonfinite values are lost", "nonfinite", "found |= all != 0 && keys", "found |= false && keys", "nonfinite"),
    _bug("nonfinite values go to all rows", "nonfinite", "if (seen[half]) o", "if (true) o", "nonfinite"),
    _bug(
        "nonfinite values go to a quad's first columns",
        "nonfinite",
        "source.value(key) + lane_id() % 4 * 2;",
        "source.value(key);",
        "nonfinite",
    ),
    _bug(
        "half of a tile is searched for nonfinite values",
        "nonfinite",
        "n < BLOCK_N * UNITS;",
        "n < BLOCK_N / 2 * UNITS;",
        "nonfinite",
    ),
    # 8-bit caches
    _bug(
        "what has not arrived is widened",
        "widener",
        "      ptx::mbarrier_wait(shared.arrived(from.stage), from.parity);\n",
        "",
        "fp8",
    ),
    _bug(
        "what is multiplied is widened over",
        "widener",
        "      ptx::mbarrier_wait(shared.empty(to.stage), to.parity);\n",
        "",
        "fp8",
    ),
    _bug("what is widened is multiplied unfenced", "widener", "      ptx::fence_proxy_async();\n", "", "fp8"),
    _bug("a warp's first lane speaks for all", "widener", "      __syncwarp();\n", "", "fp8"),
    _bug("one warp's widening counts for four", "main", "NARROW ? 4 : 1);", "1);", "fp8"),
    _bug(
        "a stage of 8 bits is free when one warp is done", "main", "shared.taken(i), 4);", "shared.taken(i), 1);", "fp8"
    ),
    _bug(
        "V is not widened",
        "widener",
        "      widen_tile<ArrivingV, VBoxes>(shared.arriving_v(from.stage), shared.v(to.stage));\n",
        "",
        "fp8",
    ),
    _bug("elements of a word change places", "widener", "0x5410", "0x1054", "fp8"),
    _bug("the last elements of a word are its first", "widener", "0x7632", "0x5410", "fp8"),
    _bug("two rows of eight are one", "widener", "lane_id() / 4 % 2 * 5", "lane_id() / 4 % 2 * 0", "fp8"),
    _bug("the second group of a row is the first", "widener", "n % GROUPS * 4 +", "0 * 4 +", "fp8"),
    _bug("widened units lie on each other", "widener", "row, 2 * unit + 1)", "row, 2 * unit)", "fp8"),
    _bug("8-bit queries are taken for halves", "consumer", "word = widen_pair(", "word = (", "fp8 q"),
    _bug(
        "both of two 8-bit queries are the second",
        "consumer",
        "widen_pair(row[block * 8].bits",
        "widen_pair(row[block * 8 + 1].bits",
        "fp8 q",
    ),
    _bug(
        "the second of two 8-bit queries is odd",
        "consumer",
        "uint32_t(row[block * 8 + 1].bits) << 16);\n        else if",
        "uint32_t(row[block * 8 + 1].bits) << 24);\n        else if",
        "fp8 q",
    ),
    _bug(
        "8-bit queries are widened from other bytes",
        "widen",
        "return widen_numbers<0>(pair)",
        "return widen_numbers<1>(pair)",
        "fp8 q",
    ),
    _bug(
        "a query that is no number is widened to one",
        "widen",
        "widen_numbers<0>(pair) | nonfinite_exponents<0>(pair)",
        "widen_numbers<0>(pair)",
        "fp8 q NaN",
    ),
    _bug(
        "q's descale is forgotten",
        "score",
        "    scale *= descale(params.q_descale, params.q_descale_strides, sequence, kv_head);\n",
        "",
        "fp8 q",
    ),
    _bug("V's descale is forgotten", "store", "    out_scale = descale(", "    descale(", "fp8"),
    # The end of a piece
    _bug("partial sums are not divided", "store", "ptx::rcp(sums[half]) * out_scale", "out_scale"),
    _bug("a partial maximum is of products", "store", "[place] = sum;", "[place] = {softmax[half].m, sums[half]};"),
    _bug("slots have 64 rows", "store", "int64_t(slot) * BLOCK_M + row", "int64_t(slot) * ROWS + row", "two"),
    _bug("rows past the end are written", "store", "    if (packed >= entry.packed_end) continue;\n", ""),
    _bug(
        "the learned sink is left out",
        "store",
        "    if constexpr (SINKS) sink = sink_logit(attention, to.head);\n",
        "",
        "sinks",
    ),
    _bug("a lane's sum is the row's", "store", "{sum_over_quad(softmax[0].l), sum", "{softmax[0].l, sum"),
    _bug(
        "columns of O are a lane's neighbours", "store", "to + 8 * j + lane_id() % 4 * 2", "to + 8 * j + lane_id() % 4"
    ),
)
