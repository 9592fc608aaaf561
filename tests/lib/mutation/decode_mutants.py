"""Bugs to seed into the decode kernels; decode_mutation.py runs them."""

from __future__ import annotations

from mutation.forward_mutants import FUSED_CORRECTION, Mutant

__all__ = [
    "DECODE_DEFECTS",
    "DECODE_MUTANTS",
    "LATENT_DEFECTS",
    "PAGE_DEFECTS",
    "PLACE_DEFECTS",
    "POSITION_DEFECTS",
    "WIDE_DEFECTS",
]


def _decode(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    return Mutant(name, "decode_mma", file, old, new, probes or ("plain",))


_MMA, _PLAN, _COMBINE = "decode/decode_mma.cu", "decode/decode_plan.cu", "decode/decode_combine.cu"
_UNITS, _SOURCE, _FRAGMENTS = "decode/plan.cuh", "decode/source.cuh", "decode/fragments.cuh"
_MERGE, _OUTPUT = "decode/merge.cuh", "decode/output.cuh"
_HALF = "return {base + n % STAGES * STAGE_BYTES / 2};"
_STEPS, _MASK = "common/positions.cuh", "common/mask.cuh"
_ROWS, _PIECES, _WIDEN = "decode/rows.cuh", "decode/pieces.cuh", "decode/widen.cuh"

# What kernels over caches have shipped with.
DECODE_DEFECTS = (
    _decode(
        "the old maximum is read after it was overwritten",
        "mma/softmax.cuh",
        "ptx::ex2(before - base)",
        "ptx::ex2(base - base)",
    ),
    _decode(
        "a sequence without keys divides by 0",
        "mma/softmax.cuh",
        "  if (sum == 0.0f) return {0.0f, -INFINITY, -INFINITY, 0.0f};\n",
        "",
    ),
    _decode(
        "pieces are merged without their weights",
        _COMBINE,
        "add_weighted(values[i], weight, ",
        "add_weighted(values[i], 1.0f, ",
    ),
    _decode(
        "every query head has a KV head of its own",
        _OUTPUT,
        "head = kv_head * ratio + packed % ratio",
        "head = kv_head + packed % ratio * attention.heads_kv",
    ),
    _decode("the correction is of a fused product", "mma/softmax.cuh", *FUSED_CORRECTION, "steady"),
    _decode("keys past the end are loaded", "common/mask.cuh", "key >= begin && key < end", "key >= begin"),
    _decode("keys past the end are seen", "common/mask.cuh", "if (key >= seqlen_k) return false;", "", "pointers"),
    _decode(
        "table entries of the next tile are read past the end",
        _SOURCE,
        "const bool read = in_tile < Tile::ROWS && keys.has(key);",
        "const bool read = in_tile < Tile::ROWS;",
    ),
    _decode("a length beyond the capacity is believed", _UNITS, "sequence.keys > capacity ||", "", "broken"),
)

# Rows and keys that stand in a larger problem.
POSITION_DEFECTS = (
    _decode("rows stand at the first keys", _UNITS, "keys.at(entry.first_new())", "keys.at(0)", "last keys"),
    _decode("rows at the last keys have no step", _UNITS, ", keys.step};", ", 1};", "last keys"),
    _decode("rows stand from 0 on", _UNITS, "params.attention.q_positions == nullptr", "false", "last keys"),
    _decode("positions of rows are overruled", _UNITS, "params.attention.q_positions == nullptr", "true", "placed"),
    _decode(
        "positions are those of the first sequence",
        _UNITS,
        "lengths.keys, entry.sequence)",
        "lengths.keys, 0)",
        "placed",
    ),
    _decode(
        "distances are those of the request alone",
        _ROWS,
        "    rows.score[half].positions = entry.mask.positions;\n",
        "",
        "last keys",
    ),
    _decode("new keys are all keys", _UNITS, "? lengths.keys - lengths.rows :", "? 0 :", "last keys"),
    _decode("the tree names all keys", _ROWS, "first_new_key = entry.first_new()", "first_new_key = 0", "placed tree"),
    _decode(
        "the tree is left out in whole tiles",
        _ROWS,
        "  if (TREE && key_end > entry.first_new()) return false;\n",
        "",
        "placed tree",
    ),
    _decode("a step is 1", _STEPS, "uint32_t(index) * uint32_t(step)", "uint32_t(index)", "placed"),
    _decode("a first position is 0", _STEPS, "uint32_t(first) + ", "", "placed"),
    _decode("counts leave out the position itself", _STEPS, "/ step + 1", "/ step", "placed"),
    _decode(
        "sink tokens are indices",
        _MASK,
        "SINK_TOKENS && position < sink_tokens",
        "SINK_TOKENS && key < sink_tokens",
        "placed",
    ),
    _decode(
        "the last row speaks for all",
        _MASK,
        "first_row = positions.row(row_begin)",
        "first_row = positions.row(row_end - 1)",
        "placed",
    ),
    _decode(
        "tiles end with the first row",
        _MASK,
        "last_row = positions.row(row_end - 1)",
        "last_row = positions.row(row_begin)",
        "placed",
    ),
)

_SINGLE = "if constexpr (SINGLE) return {key, 0};"

# Pages that hold no multiple of 8 keys, so that a tile's rows lie anywhere in them.
PAGE_DEFECTS = (
    _decode("pages of one key are divided by a factor", _SOURCE, _SINGLE, "", "single"),
    _decode("pages of one key hold the next one", _SOURCE, _SINGLE, _SINGLE.replace("{key", "{key + 1"), "single"),
    _decode("the first key's page is the second", _SOURCE, _SINGLE, _SINGLE.replace("{key", "{key + !key"), "single"),
    _decode("one page has all keys", _SOURCE, _SINGLE, _SINGLE.replace("{key, 0", "{0, key"), "single"),
    _decode("every page holds one key", _SOURCE, "if constexpr (SINGLE)", "if constexpr (PAGED)", "threes"),
    _decode(
        "rows that are copied lie in pages of 8", _SOURCE, "row[i] = place.row;", "row[i] = place.row & 7;", "twelves"
    ),
    _decode("a page's rows are counted in pairs", _SOURCE, "row[i] = place.row;", "row[i] = place.row & ~1;", "threes"),
    _decode(
        "neighbouring rows share a page",
        _SOURCE,
        "page[i] = table[place.index];",
        "page[i] = table[pages.place(key & ~1).index];",
        "threes",
        "single",
    ),
    _decode(
        "eight rows share a page",
        _SOURCE,
        "page[i] = table[place.index];",
        "page[i] = table[pages.place(key & ~7).index];",
        "threes",
        "single",
    ),
    _decode(
        "a value that is no number is looked up in its neighbour's page",
        _SOURCE,
        "return rows.at(table[place.index], place.row);",
        "return rows.at(table[pages.place(key & ~7).index], place.row);",
        "threes nonfinite",
    ),
    _decode(
        "a value that is no number is looked up in the first row",
        _SOURCE,
        "return rows.at(table[place.index], place.row);",
        "return rows.at(table[place.index], 0);",
        "threes nonfinite",
    ),
    _decode(
        "pages are divided by the power of two below their size",
        _SOURCE,
        "int(__umulhi(uint32_t(key), factor) >> shift)",
        "int(uint32_t(key) >> (31 - __clz(size)))",
        "threes",
    ),
)

_PADDING = "broken leftpad cache_leftpad"
_PLACE = "broken places cache_batch_idx"
_ROOM = "broken own cache_seqlens 75"

# Keys behind padding, sequences at places of a larger cache, arrays of several layouts.
PLACE_DEFECTS = (
    _decode("padding is read", _SOURCE, "return key + padding;", "return key;", "leftpad"),
    _decode("rows are copied from the padding", _SOURCE, "read ? pages.stored(key) : -1", "read ? key : -1", "leftpad"),
    _decode("pages are counted with the padding", _SOURCE, "    key = stored(key);\n", "", "leftpad pages"),
    _decode(
        "values are read from the padding",
        _SOURCE,
        "rows.at(0, pages.stored(key))",
        "rows.at(0, key)",
        "leftpad nonfinite",
    ),
    _decode(
        "every sequence has the first one's padding",
        _SOURCE,
        ", params.cache_leftpad[sequence]",
        ", params.cache_leftpad[0]",
        "leftpad",
    ),
    _decode("padding counts as keys", _UNITS, "if (!sequence.broken) sequence.keys -= padding;", "", "leftpad"),
    _decode("padding takes one key", _UNITS, "sequence.keys -= padding;", "sequence.keys -= padding + 1;", "leftpad"),
    _decode(
        "every sequence is as much shorter as the first",
        _UNITS,
        "padding = params.cache_leftpad[index];",
        "padding = params.cache_leftpad[0];",
        "leftpad",
    ),
    _decode("more padding than rows is believed", _UNITS, " || padding > sequence.keys;", ";", f"{_PADDING} 71"),
    _decode("padding below 0 is believed", _UNITS, "padding < 0 || ", "", f"{_PADDING} -1"),
    _decode(
        "padding mends what is broken", _UNITS, "|= padding < 0", "= padding < 0", "broken leftpad cache_seqlens 1000"
    ),
    _decode("every sequence is the first of the cache", _SOURCE, "? params.cache_batch_idx[sequence]", "? 0", "places"),
    _decode("places are not looked up", _SOURCE, "place = BATCH_IDX ?", "place = false ?", "places"),
    _decode(
        "every sequence has the first one's place",
        _SOURCE,
        "params.cache_batch_idx[sequence]",
        "params.cache_batch_idx[0]",
        "places",
    ),
    _decode("places are those of the next sequence", _SOURCE, "idx[sequence]", "idx[sequence ^ 1]", "places"),
    _decode(
        "keys lie where the sequence does", _SOURCE, "params.k_ptrs, k, place", "params.k_ptrs, k, sequence", "places"
    ),
    _decode(
        "values lie where the sequence does", _SOURCE, "params.v_ptrs, v, place", "params.v_ptrs, v, sequence", "places"
    ),
    _decode("a place below 0 is believed", _UNITS, "place < 0 || ", "", f"{_PLACE} -1"),
    _decode("a place past the cache is believed", _UNITS, " || place >= params.cache_sequences", "", f"{_PLACE} 6"),
    _decode("a cache has a place too many", _UNITS, "place >= params", "place > params", f"{_PLACE} 6"),
    _decode("a place mends what is broken", _UNITS, "|= place < 0", "= place < 0", "broken places cache_seqlens -5"),
    _decode("all are as broken as the first", _UNITS, "cache_batch_idx[index]", "cache_batch_idx[0]", f"{_PLACE} 6"),
    _decode("arrays are laid out as the first", _SOURCE, "cache_layouts[sequence]", "cache_layouts[0]", "own"),
    _decode(
        "arrays are laid out as the next", _SOURCE, "cache_layouts[sequence]", "cache_layouts[sequence ^ 1]", "own"
    ),
    _decode("keys have the values' rows", _SOURCE, "k{0, own.k_row", "k{0, own.v_row", "own"),
    _decode("values have the keys' rows", _SOURCE, "v{0, own.v_row", "v{0, own.k_row", "own"),
    _decode("keys have the values' heads", _SOURCE, "own.k_row, own.k_head", "own.k_row, own.v_head", "own"),
    _decode("values have the keys' heads", _SOURCE, "own.v_row, own.v_head", "own.v_row, own.k_head", "own"),
    _decode("heads follow each other as rows do", _SOURCE, "own.k_row, own.k_head", "own.k_row, own.k_row", "own"),
    _decode("rows of values follow each other", _SOURCE, "v{0, own.v_row", "v{0, HEAD_DIM_V", "own"),
    _decode("every array has the largest capacity", _UNITS, "capacity = OWN_LAYOUTS ?", "capacity = false ?", _ROOM),
    _decode("every array has the first one's capacity", _UNITS, "[index].capacity", "[0].capacity", _ROOM),
)

# Heads of more than 256 columns, which two warps share.
WIDE_DEFECTS = (
    _decode("both warps sum the first columns", _MMA, "values.row += first_chunk * 16;", "", "wide"),
    _decode("the second warp begins late", _MMA, "first_chunk * 16;", "(first_chunk + !!first_chunk) * 16;", "wide"),
    _decode("the second warp begins half way", _MMA, "first_chunk * 16;", "first_chunk * 8;", "wide"),
    _decode("both leave the first", _MERGE, "key_warp, first_column + column_of", "key_warp, column_of", "wide"),
    _decode("a sum is not left", _MERGE, " && first_column != 0) continue;", ") continue;", "wide"),
    _decode("all columns are the first warp's", _MMA, "% VALUE_WARPS * WARP_COLUMNS", "% VALUE_WARPS * 0", "wide"),
    _decode("warps of columns are warps of keys", _MMA, "/ 32 / VALUE_WARPS, first_row", "/ 32, first_row", "wide"),
    _decode("too little is copied", _MMA, "USED = HEAD_DIM_V / CHUNK", "USED = HEAD_DIM_V / CHUNK - 1", "padded"),
    _decode("left rows are as long as V's", _MERGE, "PITCH = VALUE_COLUMNS + 8", "PITCH = HEAD_DIM_V - 8", "padded"),
    _decode("NaN goes to the first", _MMA, "column = first_column + column_of", "column = column_of", "wide NaN"),
)

# Caches whose first columns are values.
_CLEAR = "if (LATENT && masked) {"
LATENT_DEFECTS = (
    _decode("values lie behind keys", _MMA, "(LATENT ? 0 : KTile::BYTES)", "KTile::BYTES", "latent"),
    _decode("values begin a chunk late", _MMA, "(LATENT ? 0 : KTile::BYTES)", "(LATENT ? 16 : KTile::BYTES)", "latent"),
    _decode("nonfinite keys leave before the scores", _MMA, "if (masked && !LATENT) {", "if (masked) {", "latent key"),
    _decode("nonfinite latents stay", _MMA, _CLEAR, "if (false) {", "latent NaN"),
    _decode("nonfinite latents leave other tiles", _MMA, _CLEAR, "if (LATENT && !masked) {", "latent NaN"),
    _decode(
        "nonfinite latents leave early",
        _MMA,
        _CLEAR + "\n    __syncthreads();",
        _CLEAR,
        "latent key",
    ),
    _decode("latents share their first columns", _MMA, "values.row += first_chunk * 16;", "", "latent wide"),
    _decode("half of a latent begins early", _MMA, "first_chunk * 16;", "first_chunk * 8;", "latent wide8"),
    _decode("latents begin at the last columns", _MMA, "first_chunk * 16;", "(first_chunk + 8) * 16;", "latent wide"),
    _decode(
        "key warps of a latent weigh alike",
        _MERGE,
        "ptx::ex2(exponents.base(maxima[w], factor) - base)",
        "1.0f",
        "latent",
    ),
    _decode("a stage of latents is half as long", _MMA, "return {base + n % STAGES * STAGE_BYTES};", _HALF, "latent"),
)

DECODE_MUTANTS = (
    *DECODE_DEFECTS,
    *PLACE_DEFECTS,
    *WIDE_DEFECTS,
    *LATENT_DEFECTS,
    *PAGE_DEFECTS,
    *POSITION_DEFECTS,
    # The ring
    _decode("a tile is not waited for", _MMA, "ptx::cp_async_wait<STAGES - 2>();", "ptx::cp_async_wait<STAGES - 1>();"),
    _decode("the barrier of a tile is dropped", _MMA, "    } else {\n      __syncthreads();\n    }", "    }"),
    _decode("a stage is refilled one tile early", _MMA, "fill(n + STAGES - 1);", "fill(n + STAGES);"),
    _decode("pages are looked up for the tile at hand", _MMA, "look_up(n + 1);", "look_up(n);"),
    _decode("the first tile is not looked up", _MMA, "  ring.look_up(piece.first);\n", ""),
    _decode(
        "the merge begins before all have left the ring", _MMA, "  __syncthreads();  // all have left the ring\n", ""
    ),
    _decode(
        "the next piece begins before the merge is read",
        _MMA,
        "      __syncthreads();  // all have left the area that the next piece overwrites\n",
        "",
    ),
    _decode("warps multiply the same keys", _MMA, "key_warp * WARP_KEYS);", "0 * WARP_KEYS);"),
    _decode(
        "V of another warp's keys is multiplied",
        _MMA,
        "lane_of_values(v_tile, rows.first_key)",
        "lane_of_values(v_tile)",
    ),
    # Addresses
    _decode(
        "a page's rows begin at the first page's",
        _SOURCE,
        "const int index = int(__umulhi(uint32_t(key), factor) >> shift);",
        "const int index = int(__umulhi(uint32_t(key), factor) >> (shift + 1));",
    ),
    _decode("the row in a page is the key", _SOURCE, "return {index, key - index * size};", "return {index, key};"),
    _decode(
        "V's pages are strided as K's",
        _SOURCE,
        "cache_rows(attention.v, params.v_ptrs, v,",
        "cache_rows(attention.v, params.v_ptrs, k,",
        "unequal",
    ),
    _decode(
        "offsets are 32 bits wide",
        _SOURCE,
        "uint64_t(uint32_t(page)) * page_stride : 0)",
        "uint32_t(page) * page_stride : 0)",
        "far",
    ),
    _decode(
        "offsets of rows are 32 bits wide",
        _SOURCE,
        "uint64_t(uint32_t(row)) * row_stride",
        "uint64_t(uint32_t(row) * row_stride)",
        "far rows",
    ),
    _decode(
        "every sequence has the first one's table",
        _SOURCE,
        "params.block_table + sequence * params.table_stride",
        "params.block_table",
    ),
    _decode("every sequence has the first one's cache", _SOURCE, "PAGED || POINTERS ? 0 : sequence", "0", "cache"),
    _decode("every sequence has the first one's pointer", _SOURCE, "pointers[sequence]", "pointers[0]", "pointers"),
    _decode(
        "the KV head is left out",
        _SOURCE,
        "PAGED || POINTERS ? 0 : sequence, 0, head);",
        "PAGED || POINTERS ? 0 : sequence, 0, 0);",
    ),
    # Rows
    _decode(
        "heads and rows are packed the other way round",
        _ROWS,
        "rows.row[half] = packed / ratio;",
        "rows.row[half] = packed % entry.lengths.rows;",
        "rows",
    ),
    _decode("the second half of 16 rows has the first's mask", _ROWS, "first + 8 * half);", "first);", "rows"),
    _decode(
        "packed rows of Q repeat",
        _MMA,
        "entry.lengths.q_start + from / ratio, head);",
        "entry.lengths.q_start, head);",
        "rows",
    ),
    _decode("rows past the end are written", _MERGE, "    if (packed >= entry.packed_end) break;\n", "", "rows"),
    _decode(
        "packed sequences all begin at row 0",
        _UNITS,
        "    sequence.q_start = params.attention.cu_seqlens_q[index];\n",
        "",
        "varlen",
    ),
    # Masks
    _decode(
        "the diagonal is one key off",
        "common/mask.cuh",
        "if (CAUSAL && key - own > 0)",
        "if (CAUSAL && key - own > 1)",
        "rows",
    ),
    _decode(
        "new keys of the tree are all seen",
        _ROWS,
        "return fresh < 0 || (tree[half] >> fresh & 1) != 0;",
        "return true;",
        "tree",
    ),
    _decode("old keys need a bit of the tree", _ROWS, "return fresh < 0 || (tree", "return (tree", "tree"),
    _decode(
        "a tile with new keys passes as unmasked",
        _ROWS,
        "  if (TREE && key_end > entry.first_new()) return false;\n",
        "",
        "tree",
    ),
    _decode(
        "nonfinite values reach rows that do not see them",
        "mma/nonfinite.cuh",
        "words[w] &= ~nonfinite;",
        ";",
        "nonfinite",
    ),
    _decode("nonfinite values are lost", _MMA, "if (masked(n)) add_nonfinite", "if (false) add_nonfinite", "nonfinite"),
    _decode(
        "nonfinite values are every warp's",
        _MMA,
        "const int key = tile_begin + rows.first_key + i;",
        "const int key = tile_begin + i;",
        "nonfinite",
    ),
    # 8-bit values
    _decode(
        "what is no number is widened to one",
        _WIDEN,
        "  if (Widen::REST == 0 || (carried & 0x80808080u) == 0) return;",
        "  return;",
        "nonfinite8",
    ),
    _decode("subnormals lose their place", _WIDEN, "0x5c005c00u", "0x58005800u", "fp8"),
    _decode(
        "even and odd columns of V swap",
        _FRAGMENTS,
        "wide[i / 2 * 2][i % 2], wide",
        "wide[i / 2 * 2][1 - i % 2], wide",
        "fp8",
    ),
    _decode(
        "Q keeps its columns in order", _MMA, "else if constexpr (NARROW) shuffled(words[0], words[1]);", "", "fp8"
    ),
    _decode(
        "nonfinite values of 8-bit caches go to a neighbour",
        _FRAGMENTS,
        "return NARROW ? 16 * (block / 2) + 4 * t + 2 * i + block % 2 : 8 * block + 2 * t + i;",
        "return NARROW ? 16 * (block / 2) + 4 * t + i + block % 2 : 8 * block + 2 * t + i;",
        "masked8",
    ),
    # 8-bit queries
    _decode(
        "even and odd elements of 8-bit queries swap",
        _FRAGMENTS,
        "low[t] = wide[t][0], high[t] = wide[t][1];",
        "low[t] = wide[t][1], high[t] = wide[t][0];",
        "fp8 q",
    ),
    _decode(
        "8-bit queries are taken for halves",
        _MMA,
        "if constexpr (NARROW_Q) widen_query",
        "if constexpr (NARROW_Q) shuffled",
        "fp8 q",
    ),
    _decode(
        "8-bit queries are copied as twice as many",
        _MMA,
        "LOADS = NARROW_Q ? 1 : KEY_STEPS",
        "LOADS = KEY_STEPS",
        "fp8 q",
    ),
    _decode(
        "only the first columns of 8-bit queries count",
        _MMA,
        "elements + (chunk + i) * 8;",
        "elements + i * 8;",
        "fp8 q",
    ),
    _decode(
        "a byte of 8-bit queries is its neighbour",
        "mma/tile.cuh",
        "elements[4 * w + 3].bits) << 24",
        "elements[4 * w + 2].bits) << 24",
        "fp8 q odd",
    ),
    _decode(
        "8-bit queries lie at multiples of 16 bytes",
        _MMA,
        "reinterpret_cast<uint64_t>(some) % 16 == 0",
        "true",
        "fp8 q odd",
    ),
    _decode(
        "a query that is no number is widened to one",
        _WIDEN,
        "  if (Widen::REST == 0 || (carried & 0x80808080u) == 0) return;",
        "  return;",
        "fp8 q NaN",
    ),
    _decode(
        "q's descale is forgotten",
        "common/score.cuh",
        "    scale *= descale(params.q_descale, params.q_descale_strides, sequence, kv_head);\n",
        "",
        "fp8 q",
    ),
    _decode("V's descale is forgotten", _MERGE, "out_scale = descale(", "descale(", "fp8"),
    _decode("a product of maxima is taken before a negative descale", "mma/softmax.cuh", " && !DESCALES;", ";", "fp8"),
    # The merge in a block
    _decode(
        "a warp's sums count as they are",
        _MERGE,
        "sums.weight[w] = ptx::ex2(exponents.base(maxima[w], factor) - base);",
        "sums.weight[w] = 1.0f;",
    ),
    _decode(
        "the last warp's sums are left out",
        _MERGE,
        "  for (int w = 0; w < KEY_WARPS; w++) {\n    sums.weight",
        "  for (int w = 0; w < KEY_WARPS - 1; w++) {\n    sums.weight",
    ),
    _decode(
        "all warps leave their sums in one place",
        _MERGE,
        "const int warp = row / 16 * KEY_WARPS + key_warp;",
        "const int warp = row / 16;",
    ),
    # Splitting and merging
    _decode(
        "a merge leaves out the last piece",
        _COMBINE,
        "2 + ranges_inside(",
        "1 + ranges_inside(",
        "long",
    ),
    _decode(
        "a merge takes the next item's first piece for its own",
        _COMBINE,
        "__ffs(int(outside)) - 1",
        "__ffs(int(outside))",
        "long",
    ),
    _decode(
        "pieces past a warp's lanes are counted from none",
        _COMBINE,
        "return before + __ffs",
        "return __ffs",
        "many pieces",
    ),
    _decode(
        "every boundary of an item merges it", _COMBINE, "(before.same_item(at) && before.tile > 0)", "false", "long"
    ),
    _decode(
        "a range's two ends share a slot",
        _PIECES,
        "2 * int(blockIdx.x) + (at.tile == 0)",
        "2 * int(blockIdx.x)",
        "long",
    ),
    _decode(
        "partial sums are not divided", _MERGE, "sums.l == 0.0f ? 0.0f : ptx::rcp(sums.l) * out_scale;", "out_scale;"
    ),
    _decode("a partial maximum is of products", _MERGE, "[place] = sum;", "[place] = {sums.m, sums.l};"),
    _decode("pieces weigh alike however many keys they have", _COMBINE, "own.sum * ptx::ex2", "ptx::ex2"),
    _decode(
        "the sink is left out where pieces are merged",
        _COMBINE,
        "  if constexpr (SINKS) sink = sink_logit(params.attention, to.head);\n",
        "",
        "sinks",
    ),
    _decode(
        "pieces of pinned items share a slot",
        _PIECES,
        "return item * params.splits + piece_from",
        "return item * params.splits + 0 * piece_from",
        "pinned",
    ),
    _decode(
        "a pinned piece ends with its range",
        _PIECES,
        "return count == 0 ? 0 : piece_begin(piece_from(at.tile, pieces, count) + 1, pieces, count);",
        "return at.same_item(end) ? end.tile : count;",
        "pinned",
    ),
    _decode(
        "the device's sums begin with their own entry",
        _PLAN,
        "    if (other < thread) before",
        "    if (other <= thread) before",
        "device",
    ),
    _decode(
        "the device forgets the KV heads",
        _PLAN,
        "* params.attention.heads_kv;\n  }\n  __syncthreads();",
        ";\n  }\n  __syncthreads();",
        "device",
    ),
    _decode(
        "the device begins ranges inside pinned pieces",
        _PLAN,
        "return params.splits == 0 ? at : at_a_piece(params, at, entry.tiles.count());",
        "return at;",
        "device",
    ),
)
