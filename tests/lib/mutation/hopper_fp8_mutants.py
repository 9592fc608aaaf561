"""Bugs to seed into what forward_sm90 has for 8-bit floats alone; `mutation.hopper_fp8` runs them."""

from __future__ import annotations

from mutation.forward_mutants import Mutant

__all__ = ["DEFECTS", "MUTANTS"]


def _bug(name: str, file: str, old: str, new: str, *probes: str) -> Mutant:
    elsewhere = {"rows": "mma/softmax.cuh", "forward": "hopper/forward_sm90.cu", "ptx": "ptx/wgmma.cuh"}
    file = elsewhere.get(file, f"hopper/{file}.cuh")
    return Mutant(name, "forward_sm90", file, old, new, probes or ("causal",))


# The default test run seeds these.
DEFECTS = (
    _bug("ldmatrix does not transpose", "transposer", "ldmatrix_x4_trans(", "ldmatrix_x4("),
    _bug(
        "negated queries are not fenced",
        "consumer",
        "    ptx::fence_proxy_async();\n    sync_consumer(number);\n  }\n\n  __device__ __forceinline__ void wait",
        "    sync_consumer(number);\n  }\n\n  __device__ __forceinline__ void wait",
        "negative",
    ),
)

_WEIGHTS = (
    _bug("weights are packed at their size", "rows", "NARROW_WEIGHTS ? 8.0f : 0.0f", "0.0f", "faint"),
    _bug("the LSE keeps the weights' exponent", "rows", "LN_2, top)", "LN_2, top + WEIGHT_EXPONENT * LN_2)"),
    _bug("the correction lacks the exponent", "rows", "ptx::ex2(before - base)", "ptx::ex2(before - base - 8.0f)"),
    _bug("rows computed again have the exponent", "nonfinite", "LOG2_E) : 0.0f", "LOG2_E + 8.0f) : 0.0f", "nonfinite"),
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
    _bug("weights beside e5m2 lack their exponent", "rows", "NARROW_WEIGHTS ? 8.0f : 0.0f", "0.0f", "e5m2 faint"),
)

_LOADS = (
    _bug(
        "V overwrites the tile before it", "producer", "    ptx::mbarrier_wait(shared.v_taken(), values.parity);\n", ""
    ),
    _bug(
        "lanes of the producer drift a phase apart",
        "producer",
        "    __syncwarp();\n    if (leader) ptx::store_shared",
        "    if (leader) ptx::store_shared",
    ),
    _bug(
        "every tile of V has the first one's own keys",
        "producer",
        "work.mask.seqlen_k - work.keys.at(n) * BLOCK_N",
        "work.mask.seqlen_k",
        "neighbours",
    ),
    _bug("transposers are not told of the end", "forward", "  if constexpr (FP8) end_values();\n", ""),
    _bug(
        "V is free after one of its transposers",
        "forward",
        "mbarrier_init(shared.v_taken(), TRANSPOSERS)",
        "mbarrier_init(shared.v_taken(), 1)",
    ),
    _bug("V is whole after one of its transposers", "forward", "FP8 ? TRANSPOSERS : 1", "1"),
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
    _bug("keys keep their order", "transposer", "? 0x6420 : 0x7531", "? 0x4260 : 0x5371"),
    _bug("columns of a pair change places", "transposer", "? 0x6420 : 0x7531", "? 0x7531 : 0x6420"),
    _bug("a pair has one column twice", "transposer", "second = first ^ 0x1111", "second = first"),
    _bug("quads name the lines of others", "transposer", "(lane / 4 ^ lane / 8) & 1", "lane / 8 & 1"),
    _bug("keys of a box change places", "transposer", "VBoxes::along(to, key / 16)", "VBoxes::along(to, key / 16 ^ 2)"),
    _bug(
        "matrices of 16 keys change places",
        "transposer",
        "words[half] = __byte_perm(pairs[half], pairs[half + 1], first)",
        "words[half] = __byte_perm(pairs[2 - half], pairs[3 - half], first)",
    ),
    _bug("all keys are the first 32", "transposer", "from + key * ArrivingV::LINE", "from", "wide tile"),
    _bug("later boxes are the first", "boxes", " + units / UNITS * BOX_BYTES;", ";", "wide head"),
    _bug(
        "a unit is left out",
        "transposer",
        "unit < DIM_V / 16; unit += TRANSPOSERS) {\n      const",
        "unit < DIM_V / 16 - 1; unit += TRANSPOSERS) {\n      const",
        "unmended",
    ),
    _bug(
        "tiles go to one stage",
        "transposer",
        "shared.arriving_v(), shared.v(stage)",
        "shared.arriving_v(), shared.v(0)",
    ),
    _bug(
        "V is transposed before it is there", "transposer", "      ptx::mbarrier_wait(shared.v_arrived(), stage);\n", ""
    ),
    _bug(
        "transposed values are overwritten",
        "transposer",
        "      ptx::mbarrier_wait(shared.v_empty(stage), (tile >> 1 & 1) ^ 1);\n",
        "",
    ),
    _bug("stages change parity with each tile", "transposer", "(tile >> 1 & 1) ^ 1", "(tile & 1) ^ 1"),
    _bug("transposed values are not fenced", "transposer", "      ptx::fence_proxy_async();\n", ""),
    _bug(
        "a lane arrives before its warp has stored",
        "transposer",
        "      __syncwarp();\n      if (lane_id() == 0)",
        "      if (lane_id() == 0)",
    ),
    _bug(
        "V is free before it is transposed",
        "transposer",
        "      transpose(shared.arriving_v()",
        "      if (lane_id() == 0) ptx::mbarrier_arrive(shared.v_taken());\n      transpose(shared.arriving_v()",
    ),
    _bug(
        "what lies behind the last key stays",
        "transposer",
        "      if (OTHERS_FOLLOW && own_keys < BLOCK_N) clear_past(own_keys);\n",
        "",
        "varlen",
        "neighbours",
    ),
    _bug(
        "what lies behind the last key is transposed before other lanes have cleared it",
        "transposer",
        "      }\n    }\n    __syncwarp();\n",
        "      }\n    }\n",
        "neighbours",
    ),
    _bug(
        "the last key is cleared",
        "transposer",
        "int key = own_keys + lane_id()",
        "int key = own_keys - 1 + lane_id()",
        "varlen",
    ),
    _bug(
        "the first key behind stays",
        "transposer",
        "int key = own_keys + lane_id()",
        "int key = own_keys + 1 + lane_id()",
        "neighbours",
    ),
    _bug(
        "32 keys are cleared",
        "transposer",
        "own_keys + lane_id(); key < BLOCK_N",
        "own_keys + lane_id(); key < own_keys + 32 && key < BLOCK_N",
        "neighbours",
    ),
)

MUTANTS = (*DEFECTS, *_WEIGHTS, *_DESCALES, *_E5M2, *_LOADS, *_SUMS, *_TRANSPOSITION)
