"""Bugs to seed into forward_wide; forward_wide.py runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]

_WIDE = "forward/forward_wide.cu"


def _bug(name: str, old: str, new: str, *probes: str, file: str = _WIDE) -> Mutant:
    return Mutant(name, "forward_wide", file, old, new, probes or ("plain",))


# What is this kernel's alone: two warps that share rows. A few that every test run seeds.
DEFECTS = (
    _bug("a warp adds its own half twice", "place_of_scores(scores, warp ^ 1)", "place_of_scores(scores, warp)"),
    _bug("scores are read before they are there", "    __syncthreads();  // barrier 2\n", ""),
    _bug("both warps sum the same columns", "value_columns{warp % PAIR}", "value_columns{0}"),
)

MUTANTS = (
    *DEFECTS,
    # Halves
    _bug("both warps multiply the same half", "key_columns{warp % PAIR}", "key_columns{0}"),
    _bug("halves are not added", "    add_scores(s, place_of_scores(scores, warp ^ 1));\n", ""),
    _bug("another pair's half is added", "place_of_scores(scores, warp ^ 1)", "place_of_scores(scores, warp ^ 3)"),
    _bug("a warp's scores overlap the next one's", "area + warp * 32 * SCORE_BYTES", "area + warp * 16 * SCORE_BYTES"),
    _bug("lanes leave their scores in one place", "+ lane_id() * 16; }", "+ lane_id() % 16 * 16; }"),
    _bug(
        "blocks of scores overlap",
        "ptx::store_shared_v4(place + block * 512, words)",
        "ptx::store_shared_v4(place, words)",
    ),
    _bug("rows are read past head_dim", "static constexpr int USED = WIDTH / 8;", "", "odd"),
    _bug("the first warp's last columns are left out", "ValueColumns{0}.column", "ValueColumns{1}.column", "odd"),
    _bug(
        "a pair that exists is left out",
        "KeyColumns{0}.blocks(pair) <= 0) break",
        "KeyColumns{0}.blocks(pair) <= 1) break",
        "odd",
    ),
    _bug("pairs share rows", "first_row = warp / PAIR * 16", "first_row = warp / (2 * PAIR) * 16"),
    _bug(
        "scores lie over V", "ring.base + STAGES * (KTile::BYTES + VTile::BYTES)", "ring.base + STAGES * KTile::BYTES"
    ),
    # Rings
    _bug(
        "the barrier before K(n) is dropped",
        "    ptx::cp_async_wait<BEHIND_KEYS>();\n    __syncthreads();\n",
        "    ptx::cp_async_wait<BEHIND_KEYS>();\n",
    ),
    _bug("the barrier before V(n) is dropped", "    __syncthreads();\n    return false;", "    return false;"),
    _bug("K(n) is not waited for", "cp_async_wait<BEHIND_KEYS>", "cp_async_wait<BEHIND_KEYS + 1>"),
    _bug("V(n) is not waited for", "cp_async_wait<BEHIND_VALUES>", "cp_async_wait<BEHIND_VALUES + 1>"),
    _bug("copies are not committed as a group", "    ptx::cp_async_commit();\n", ""),
    _bug(
        "K is refilled while it is multiplied",
        "    __syncthreads();  // barrier 2\n    ring.fill_keys(n + STAGES);\n",
        "    ring.fill_keys(n + STAGES);\n    __syncthreads();\n",
    ),
    _bug("V comes a tile late", "fill_values(n + STAGES - 1);\n  }", "fill_values(n + STAGES - 2);\n  }", "stages"),
    _bug("V comes a tile early", "fill_values(n + STAGES - 1);\n  }", "fill_values(n + STAGES);\n  }"),
    _bug(
        "V has K's stage",
        "base + STAGES * KTile::BYTES + n % STAGES * VTile::BYTES",
        "base + n % STAGES * VTile::BYTES",
    ),
    _bug(
        "stages of K overlap by a row",
        "base + n % STAGES * KTile::BYTES}",
        "base + n % STAGES * (KTile::BYTES - 64)}",
        "stages",
    ),
    _bug("stages of V overlap by a row", "n % STAGES * VTile::BYTES}", "n % STAGES * (VTile::BYTES - 64)}", "stages"),
    _bug("keys of every tile are the first tile's", "const int first = tiles.at(n) * BLOCK_N;", "const int first = 0;"),
    _bug("keys past the end are loaded", "return keys.has(first + row);", "return true;"),
    # Weights and sums
    _bug("the output is never rescaled", "    rescale(o, 0, correction);\n", "", "plain"),
    _bug("a tile with a mask is weighed without", "weigh<true>(s", "weigh<false>(s", "causal"),
    _bug(
        "rows g + 8 have the mask of rows g",
        "const int row = rows.row(half);",
        "const int row = rows.row(0);",
        "causal",
    ),
    _bug(
        "a tile on the diagonal passes as unmasked",
        "const bool masked = !unmasked(n);",
        "const bool masked = false;",
        "causal",
    ),
    _bug(
        "weights of V are a step late",
        "Products::weights(a[0], p[0], step);",
        "Products::weights(a[0], p[0], 0);",
        "stages",
    ),
    _bug(
        "dropout is left out",
        "    if constexpr (DROPOUT) drop(rows.dropout, s[0], rows.row(0), rows.row(1), key_begin);\n",
        "",
        "options",
    ),
    _bug("what is kept is not scaled up", "DROPOUT ? float(params.dropout_scale) : 1.0f", "1.0f", "options"),
    # Nonfinite values
    _bug(
        "nonfinite values stay in a tile with a mask",
        "__syncthreads_or(clear_nonfinite<KV_ELEMENT, THREADS>(v_tile(n)))",
        "__syncthreads_or(0)",
        "nonfinite",
    ),
    _bug(
        "nonfinite values are never given to their rows",
        "n = 0; nonfinite && n < count",
        "n = 0; false && n < count",
        "nonfinite",
    ),
    _bug(
        "nonfinite values are given to all rows",
        "!rows.mask.visible(rows.row(half), key) ? HIDDEN : kept",
        "kept",
        "nonfinite",
    ),
    # Stores
    _bug(
        "the second block of a pair lies over the first",
        "+ block % 2 * 8 + lane_id() % 4 * 2);",
        "+ lane_id() % 4 * 2);",
    ),
    _bug(
        "columns that do not exist are stored",
        "if (!ValueColumns::WHOLE && columns.blocks(block / 2) <= block % 2) continue;",
        "",
        "odd",
    ),
    _bug("rows past the end are stored", "if (row >= rows.end) continue;", ""),
    _bug("rows past the end of Q are loaded", "return at.row_begin + row < row_end; }", "return true; }"),
    _bug("no warp stores the LSE", "LSE && columns.warp == 0 &&", "LSE && columns.warp == 2 &&"),
)
