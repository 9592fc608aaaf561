"""Bugs to seed into what forward_sm90 has for e4m3 alone, and into transpose_v; `mutation.hopper_fp8` runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    elsewhere = {"rows": "mma/softmax.cuh", "forward": "hopper/forward_sm90.cu", "ptx": "ptx/wgmma.cuh"}
    file = elsewhere.get(file, f"hopper/{file}.cuh")
    return Mutant(name, "forward_sm90", file, old, new, probes or ("causal",))


def _transpose_v(name: str, old: str, new: str, *probes: str, file: str = "hopper/transpose_v.cu") -> Mutant:
    return Mutant(name, "transpose_v", file, old, new, probes or ("causal",))


def _order(name: str, new: str) -> Mutant:
    old = "return (key & ~15) | (key & 6) << 1 | (key & 8) >> 2 | (key & 1);"
    return _transpose_v(name, old, f"return {new};", file="hopper/transposed_v.cuh")


# The default test run seeds these.
DEFECTS = (
    _order("keys keep their order", "key"),
    _bug(
        "negated queries are not fenced",
        "consumer",
        "    ptx::fence_proxy_async();\n    sync_consumer(number);\n  }\n\n  __device__ __forceinline__ void wait",
        "    sync_consumer(number);\n  }\n\n  __device__ __forceinline__ void wait",
        "negative",
    ),
)

_WEIGHTS = (
    _bug("weights are packed at their size", "softmax", "FP8 ? 8.0f : 0.0f", "0.0f", "faint"),
    _bug("the LSE keeps the weights' exponent", "rows", "row.l), row.base,", "row.l), row.base + 8.0f,"),
    _bug(
        "the correction lacks the exponent", "rows", "ptx::ex2(before - finite)", "ptx::ex2(before - finite - exponent)"
    ),
    _bug(
        "rows computed again lack the exponent", "nonfinite", "- nonfinite.base", "- nonfinite.base - 8.0f", "nonfinite"
    ),
    _bug(
        "halves of a word swap",
        "softmax",
        "s[first], s[first + 1], s[first + 4], s[first + 5]",
        "s[first + 4], s[first + 5], s[first], s[first + 1]",
    ),
    _bug("rows of a fragment swap", "softmax", "i / 2 * 8 + i % 2 * 2;", "i / 2 * 8 + (1 - i % 2) * 2;"),
    _bug(
        "the second half of a step is the first",
        "softmax",
        "const int first = i / 2 * 8",
        "const int first = i / 4 * 16",
    ),
)

_DESCALES = (
    _bug(
        "q's descale is forgotten",
        "softmax",
        "  scale *= descale(params.q_descale, params.q_descale_strides, sequence, kv_head);\n",
        "",
    ),
    _bug(
        "k's descale is forgotten",
        "softmax",
        "  scale *= descale(params.k_descale, params.k_descale_strides, sequence, kv_head);\n",
        "",
    ),
    _bug(
        "v's descale is forgotten",
        "store",
        "low * (factor * scale), high * (factor * scale)",
        "low * factor, high * factor",
    ),
    _bug(
        "v's descale is that of a query head",
        "store",
        "work.sequence, work.kv_head);\n}",
        "work.sequence, work.head / 2);\n}",
        "batch",
    ),
    _bug("a negative descale does not negate", "softmax", "FOLDED && scale < 0.0f", "FOLDED && false", "negative"),
    _bug(
        "maxima of negative products",
        "softmax",
        "const float magnitude = fabsf(scale);\n",
        "const float magnitude = scale;\n",
        "negative",
    ),
    _bug(
        "a quarter of Q is negated",
        "consumer",
        "at < QBoxes::BYTES; at += WARPGROUP",
        "at < QBoxes::BYTES / 4; at += WARPGROUP",
        "negative",
    ),
    _bug("one of four elements is negated", "consumer", "0x80808080u", "0x00000080u", "negative"),
    _bug(
        "products do not wait for the negation",
        "consumer",
        "    ptx::fence_proxy_async();\n    sync_consumer(number);\n  }\n\n  __device__ __forceinline__ void wait",
        "    ptx::fence_proxy_async();\n  }\n\n  __device__ __forceinline__ void wait",
        "negative",
    ),
    _bug("a scale of 0 stays 0", "softmax", "magnitude < LEAST_SCALE ? LEAST_SCALE : magnitude", "magnitude", "zero"),
    _bug(
        "a NaN scale reaches rows without keys",
        "softmax",
        "magnitude <= GREATEST_SCALE ? magnitude : INFINITY",
        "magnitude",
        "nan",
    ),
    _bug("softcap keeps an infinite scale", "softmax", "scale = NAN;", ";", "capped"),
)

_E5M2 = (
    _bug(
        "weights beside e5m2 are taken for e5m2",
        "format",
        "OPERAND == ptx::Element::e5m2 ? ptx::Element::e4m3 : OPERAND",
        "OPERAND",
        "e5m2",
    ),
    _bug(
        "e5m2 values are taken for e4m3",
        "consumer",
        "wgmma_rs<PIECE, WEIGHT, false, OPERAND>",
        "wgmma_rs<PIECE, WEIGHT>",
        "e5m2",
    ),
    _bug("e5m2 keys are taken for e4m3", "consumer", "wgmma_ss<BLOCK_N, OPERAND>", "wgmma_ss<BLOCK_N, WEIGHT>", "e5m2"),
    _bug(
        "all e5m2 is taken for e4m3",
        "format",
        "ELEMENT_OF = ptx::Element::e5m2",
        "ELEMENT_OF = ptx::Element::e4m3",
        "e5m2",
    ),
    _bug("the types of a product change places", "ptx", "k32.f32.e4m3.e5m2", "k32.f32.e5m2.e4m3", "e5m2"),
    _bug("the wrapper forgets the type of B", "ptx", "k32.f32.e4m3.e5m2", "k32.f32.e4m3.e4m3", "e5m2"),
    _bug("weights beside e5m2 lack their exponent", "softmax", "FP8 ? 8.0f : 0.0f", "0.0f", "e5m2 faint"),
)

_LOADS = (
    _bug("V is that of a query head", "producer", "WIDTH, 0, work.kv_head,", "WIDTH, 0, work.head / 2,", "batch"),
    _bug(
        "the second box of V has the first one's keys", "producer", "first + box * VBoxes::WIDTH", "first", "wide tile"
    ),
    _bug(
        "the boxes of V change places",
        "producer",
        "place + box * VBoxes::BOX_BYTES, &all.v",
        "place + (VBoxes::COUNT - 1 - box) * VBoxes::BOX_BYTES, &all.v",
        "wide tile",
    ),
    _bug(
        "V is that of the first sequence",
        "producer",
        "VARLEN ? 0 : work.sequence, ptx::CachePolicy::evict_last",
        "0, ptx::CachePolicy::evict_last",
        "batch",
    ),
    _bug("V overwrites a stage", "producer", "    ptx::mbarrier_wait(empty, values.parity);\n", ""),
    _bug(
        "lanes of the producer drift a phase apart",
        "producer",
        "    __syncwarp();\n    if (!leader) return;",
        "    if (!leader) return;",
    ),
    _bug(
        "V comes from where a packed sequence starts",
        "schedule",
        "work.values_start = values_start<BLOCK_N>(work.k_start, work.sequence)",
        "work.values_start = work.k_start",
        "varlen",
    ),
    _bug("sequences share tiles", "transposed_v", "sequence * (TILE - 1)", "sequence", "varlen"),
    _bug("V's step is one of rows", "consumer", "r.p[n], v + VBoxes::column_step", "r.p[n], v + VBoxes::row_step"),
    _bug("boxes are twice as wide", "boxes", "n * STEP % WIDTH * ITEM) / 16", "n * STEP % WIDTH * 2) / 16"),
)

_STEP = "ptx::wgmma_rs<PIECE, WEIGHT, false, OPERAND>(sums, r.p[n], v + VBoxes::column_step(n), n > 0);"

# Where the sums of the tiles before are, what is added to a tile's is O whole.
_ADD_TO_ALL = f"""if (n == 0) {{
        for (int i = 0; i < PIECE / 2; i++) {{
          float& x = r.o[piece * PIECE / 2 + i];
          sums[i] = x * r.correction[i / 2 % 2];
          x = 0.0f;
        }}
        ptx::wgmma_fence();
      }}
      {_STEP.replace("n > 0", "true")}"""

SUMMED_IN_TENSOR_CORES = _bug("all tiles are summed in the tensor cores", "consumer", _STEP, _ADD_TO_ALL, "many keys")

_SUMS = (
    SUMMED_IN_TENSOR_CORES,
    _bug("a sum starts from the last one", "consumer", _STEP, _STEP.replace("n > 0", "true"), "wide head"),
    _bug("a tile's sums are the last step's", "consumer", _STEP, _STEP.replace("n > 0", "false")),
    _bug("O is not rescaled", "consumer", "fmaf(x, correction[i / 2 % 2], sums[i])", "x + sums[i]", "wide tile"),
    _bug("O's rows change corrections", "consumer", "fmaf(x, correction[i / 2 % 2]", "fmaf(x, correction[i % 2]"),
    _bug(
        "a tile is added by the next one's correction",
        "forward",
        "add_piece(r.o, sums, r.correction, 0);",
        "add_piece(r.o, sums, correction, 0);",
        "beside",
    ),
    _bug(
        "every piece is added to the first",
        "consumer",
        "float& x = o[piece * PIECE / 2 + i];",
        "float& x = o[i];",
        "wide head",
    ),
    _bug("V's pieces are all the first", "consumer", " + piece * PIECE * VBoxes::LINE", "", "wide head"),
    _bug(
        "sums are added before they are there",
        "consumer",
        "      ptx::wgmma_wait<0>();\n      ptx::pin_registers(sums);",
        "      ptx::pin_registers(sums);",
    ),
    _bug(
        "values apart are not waited for",
        "consumer",
        "    wait_for_values();\n#pragma unroll\n",
        "#pragma unroll\n",
    ),
    _bug(
        "values apart are released before their product is done",
        "consumer",
        "    wait_for_values();\n#pragma unroll\n",
        "    wait_for_values();\n    release(shared.v_empty(values.stage));\n#pragma unroll\n",
    ),
)

_TRANSPOSITION = (
    _order("keys are shifted by one place", "(key & ~15) | (((key & 6) << 1 | (key & 8) >> 2 | (key & 1)) + 1 & 15)"),
    _order("keys are in the order of 16-bit fragments", "(key & ~31) | (key & 7) << 2 | (key & 24) >> 3"),
    _transpose_v("what lies behind the last key is loaded", "if (key < keys.count) ptx", "ptx", "varlen", "neighbours"),
    _transpose_v("the last key is not loaded", "if (key < keys.count) ptx", "if (key < keys.count - 1) ptx", "odd"),
    _transpose_v("columns go out before they are there", "  __syncthreads();\n", "", "transposed"),
    _transpose_v(
        "heads write to one place", "int64_t(sequence_head) * HEAD_DIM_V", "int64_t(batch) * HEAD_DIM_V", "batch"
    ),
    _transpose_v("every head is the first", " + head * params.head_stride", "", "batch"),
    _transpose_v("every sequence is the first", "keys.batch * params.batch_stride +", "", "batch"),
    _transpose_v("bytes of a word are reversed", "i % 4 * 8 &", "(3 - i % 4) * 8 &"),
    _transpose_v("columns past 64 are the first", "row + first_column + unit * 16", "row + unit * 16", "wide tile"),
    _transpose_v(
        "a sequence is the one before it", "<= tile * BLOCK_N) low", "< tile * BLOCK_N) low", "transposed varlen"
    ),
    _transpose_v(
        "a sequence's later tiles are its first",
        "{0, int64_t(start) + before, params",
        "{0, int64_t(start), params",
        "varlen",
    ),
)

MUTANTS = (*DEFECTS, *_WEIGHTS, *_DESCALES, *_E5M2, *_LOADS, *_SUMS, *_TRANSPOSITION)
