"""Bugs in the places and the numbers of forward_sm90: layouts, masks, softmax. See `hopper_mutants`."""

from __future__ import annotations

from mutation.forward_mutants import FUSED_CORRECTION, Mutant

__all__ = ["NUMBERS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    elsewhere = {"rows": "mma/softmax.cuh", "mask": "common/mask.cuh", "forward": "hopper/forward_sm90.cu"}
    file = elsewhere.get(file, f"hopper/{file}.cuh")
    return Mutant(name, "forward_sm90", file, old, new, probes or ("plain",))


PLACES = (
    _bug(
        "V's boxes are a row block apart",
        "boxes",
        "matrix_descriptor<SWIZZLE, BOX_BYTES, EIGHT_LINES>",
        "matrix_descriptor<SWIZZLE, EIGHT_LINES, EIGHT_LINES>",
        "causal",
    ),
    _bug(
        "eight rows are four lines",
        "boxes",
        "matrix_descriptor<SWIZZLE, 16, EIGHT_LINES>",
        "matrix_descriptor<SWIZZLE, 16, EIGHT_LINES / 2>",
    ),
    _bug("the second box is never reached", "boxes", "n * STEP / WIDTH * BOX_BYTES + ", "", "causal"),
    _bug("V's step is half as long", "boxes", "return n * STEP * LINE / 16;", "return n * STEP * LINE / 32;"),
    _bug("a step of columns is 16 bytes", "boxes", "n * STEP % WIDTH * ITEM) / 16", "n * STEP % WIDTH) / 16"),
    _bug("the 64-byte swizzle is forgotten", "boxes", "row % 8 / (8 / UNITS)", "row % 8", "narrow"),
    _bug("outputs are not swizzled", "boxes", "(unit % UNITS ^ spread) * 16", "unit % UNITS * 16"),
    _bug(
        "boxes of Q are loaded to the first's place",
        "producer",
        "shared.q(consumer) + box * QBoxes::BOX_BYTES",
        "shared.q(consumer)",
        "causal",
    ),
    _bug("both consumers have the first's rows", "producer", "work.row_begin + consumer * ROWS", "work.row_begin"),
    _bug("keys of every tile are the first's", "producer", "work.keys.at(n) * BLOCK_N + part", "part"),
    _bug("sequences share the first's keys", "producer", "work.kv_head, at.batch", "work.kv_head, 0", "batch"),
)

SOFTMAX = (
    _bug("the correction is of a fused product", "rows", *FUSED_CORRECTION, "steady"),
    _bug("the row sum is not rescaled", "rows", "      l *= correction;\n", ""),
    _bug(
        "the old maximum is forgotten", "rows", "max_of(m, max_over_quad(largest))", "max_over_quad(largest)", "outlier"
    ),
    _bug("the maximum is a thread's", "rows", "max_over_quad(largest)", "largest"),
    _bug("O is never rescaled", "softmax", "o[i] *= correction[i / 2 % 2];", ";"),
    _bug("O's rows change corrections", "softmax", "correction[i / 2 % 2]", "correction[i % 2]"),
    _bug("far maxima have rounded bases", "rows", "fabsf(m) > far ? power : to_log2", "to_log2", "hidden"),
    _bug("a row without keys is NaN", "rows", "rows[1].m = exponents.lowest;", "rows[1].m = -INFINITY;", "window"),
    _bug(
        "a key past the end is seen",
        "mask",
        "int end = seqlen_k - origin;",
        "int end = seqlen_k - origin + 1;",
        "batch",
    ),
    _bug("the diagonal is hidden", "mask", "at_most(own + 1, end)", "at_most(own, end)", "causal"),
    _bug(
        "the right edge is hidden",
        "mask",
        "own + reach.right + 1, end)",
        "own + reach.right, end)",
        "window",
    ),
    _bug(
        "the left edge is hidden",
        "mask",
        "return {sinks, reach.first(own, origin), end};",
        "return {sinks, reach.first(own, origin) + 1, end};",
        "window",
    ),
    _bug("sink tokens are hidden", "mask", "seen = seen || column < sinks;", ";", "window"),
    _bug(
        "sink tokens beyond the diagonal are seen",
        "mask",
        "at_most(sink_tokens - origin, end)",
        "sink_tokens - origin",
        "sink tokens",
    ),
    _bug(
        "tiles on the diagonal have no mask",
        "consumer",
        "const int own_end = work.row_begin + mask.diagonal + 1;",
        "const int own_end = work.row_begin + mask.diagonal + 1 + BLOCK_N;",
        "causal",
    ),
    _bug(
        "tiles on the left edge have no mask",
        "consumer",
        "(hidden + BLOCK_N - 1) / BLOCK_N",
        "(hidden - 1) / BLOCK_N",
        "window",
    ),
    _bug(
        "the first tile that all rows see is one late", "consumer", "n >= int(whole[1])", "n > int(whole[1])", "causal"
    ),
    _bug(
        "the last tile of the left edge has no mask", "consumer", "n < int(whole[0])", "n + 1 < int(whole[0])", "window"
    ),
    _bug("tiles have a mask where they need none", "consumer", "n >= int(whole[1])", "n < int(whole[1])", "causal"),
    _bug(
        "under a causal mask the window's right edge counts",
        "consumer",
        "CAUSAL ? own_end : mask.reach.end(own_end)",
        "mask.reach.end(own_end)",
        "right edge",
    ),
    _bug(
        "ALiBi's slope is per scaled score",
        "softmax",
        "SCALED ? slope : slope / scale",
        "SCALED ? slope : slope",
        "plain alibi",
    ),
    _bug(
        "ALiBi counts from key 0",
        "softmax",
        "rows.row(half) + rows.mask.diagonal - first_key",
        "rows.row(half) - first_key",
        "plain alibi",
    ),
    _bug(
        "softcap caps twice as high",
        "softmax",
        "rows.softcap - 2.0f * rows.softcap",
        "2.0f * rows.softcap - 4.0f * rows.softcap",
        "softcap",
    ),
)

NUMBERS = (*PLACES, *SOFTMAX)
