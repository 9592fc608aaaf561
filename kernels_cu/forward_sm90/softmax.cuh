// From the scores of a tile, as wgmma leaves them in registers, to the weights that the next wgmma takes.
//
// A thread holds pieces of two rows, g and g + 8 of its warp's 16; the four threads of a quad share the rows (drawn in
// mma/softmax.cuh). Scores packed to 16 bits are the A fragments of P V without any shuffle (ptx/wgmma.cuh).
//
// 8-bit scores in the order of their registers are A fragments whose keys are in another order; V has its keys in that
// order, too (forward_sm90/transposer.cuh).
//
// Weights are 2^(s * factor - base): one multiply-add and one ex2. The factor includes the scale, unless softcap, bias
// or a score modification needs scaled products: s are plain products then, less ALiBi's share of them.
#pragma once

#include "common/mask.cuh"
#include "mma/softmax.cuh"
#include "forward_sm90/format.cuh"
#include "forward_sm90/layout.cuh"

using Scores = float[BLOCK_N / 2];
using Weights = uint32_t[BLOCK_N / STEP][4];
using Output = float[DIM_V / 2];

// Whether products are scaled one by one; with softcap, tanh's argument includes the scale.
constexpr bool SCALED = SCORE_MOD || (BIAS && !BIAS_HIDES && !SOFTCAP);

// A thread's two rows, and what makes scores of their products.
struct Rows {
  Mask mask;
  int first;          // the other is first + 8; both may lie past the sequence's end
  Exponents exponents;  // of what `softmax_tile` is given
  float to_exponent;    // of a product: 2 * scale / softcap, in base 2
  float softcap;
  float slope;          // in the unit of s
  bool negated;       // s are to be products of -q: a negative descale would turn maxima into minima
  float scale;        // of products, if SCALED
  int last_row;       // of the sequence: rows past it read what is read for this one
  ScoreMod mod;
  Dropout dropout;
  const BIAS_ELEMENT* bias[2];  // of each row
  bool bias_in_pairs;           // whether two neighbours can be read at once

  __device__ __forceinline__ int row(int half) const { return first + 8 * half; }
};

// The factor of products, descales included.
DEVICE float scale_of(const Params& params, int sequence, int kv_head) {
  if constexpr (!DESCALES) return static_cast<float>(params.softmax_scale);
  // In double: a tiny scale may come with large descales.
  double scale = params.softmax_scale;
  scale *= descale(params.q_descale, params.q_descale_strides, sequence, kv_head);
  scale *= descale(params.k_descale, params.k_descale_strides, sequence, kv_head);
  return static_cast<float>(scale);
}

constexpr float LEAST_SCALE = 0x1p-80f, GREATEST_SCALE = 0x1p125f;

// A magnitude to divide by and to multiply with -inf. A scale too small to move a score stands for 0, and infinity for
// NaN: it makes weights NaN, but not those of hidden keys.
DEVICE float usable_magnitude(float scale) {
  const float magnitude = fabsf(scale);
  return magnitude < LEAST_SCALE ? LEAST_SCALE : magnitude <= GREATEST_SCALE ? magnitude : INFINITY;
}

DEVICE Rows rows_of(const LaunchParams& params, const Mask& mask, int sequence, int head, int kv_head, int first,
                    int last_row) {
  constexpr bool FOLDED = DESCALES && !SOFTCAP && !SCALED;  // descales are in the exponents' factor
  float scale = scale_of(params, sequence, kv_head);
  const bool negated = FOLDED && scale < 0.0f;
  if (FOLDED) scale = usable_magnitude(scale);
  if (DESCALES && SOFTCAP && !(fabsf(scale) <= GREATEST_SCALE)) scale = NAN;  // which tanh would make finite
  const float product_scale = scale;
  if (SCALED) scale = 1.0f;  // of what `score` makes of them
  Rows rows{mask, first, exponents_of(SOFTCAP ? 1.0f : scale), 0.0f, 0.0f, 0.0f, negated, product_scale, last_row, {},
            make_dropout(params, sequence, head), {}};
  if constexpr (SCORE_MOD) rows.mod = bind_score_mod(params.score_params(), sequence, head);
  if constexpr (SOFTCAP) {
    rows.softcap = static_cast<float>(params.softcap);
    rows.to_exponent = scale / rows.softcap * (2.0f * LOG2_E);
    if (DESCALES && fabsf(rows.to_exponent) == INFINITY) rows.to_exponent = copysignf(LOWEST, rows.to_exponent);  // times 0
  }
  if constexpr (BIAS) {
    const Strides& strides = params.bias_strides;
    rows.bias_in_pairs = reinterpret_cast<uint64_t>(params.bias) % (2 * sizeof(BIAS_ELEMENT)) == 0 &&
                         (strides.batch | strides.row | strides.head) % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = at_most(last_row, rows.row(half));
      rows.bias[half] = element_of<const BIAS_ELEMENT>(params.bias, strides, sequence, row, head);
    }
  }
  if constexpr (ALIBI) {
    const float slope = *element_of<const float>(params.alibi_slopes, params.alibi_slopes_strides, sequence, 0, head);
    rows.slope = SOFTCAP || SCALED ? slope : slope / scale;
    // A slope for products may be too large to be multiplied by a distance. Any steep one gives the same weights.
    if (!SOFTCAP && !SCALED && fabsf(rows.slope) > STEEP && fabsf(slope) < INFINITY) {
      rows.slope = copysignf(STEEP, slope);
      rows.exponents.steep = slope / rows.slope / scale;
    }
  }
  return rows;
}

// The modification of scaled products. What it computes for a key serves both rows.
// LAST: of the last tile, whose keys may end before it does; those past the end are scored as the last one, and hidden.
// full: whether the tile is in a full block of a block mask, so that the masking function shows all its keys.
template <bool LAST>
DEVICE void modify(Scores& s, const Rows& rows, int first_key, bool full) {
  uint32_t row[2] = {uint32_t(at_most(rows.last_row, rows.row(0))), uint32_t(at_most(rows.last_row, rows.row(1)))};
  ptx::pin_registers(row);  // otherwise ptxas keeps for all tiles what follows from a row, and spills
#if BLOCK_MASK_SHOWS
  if (full) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; i++) {
      int key = first_key + lane_column() + column_of_register(i);
      if (LAST) key = at_most(rows.mask.seqlen_k - 1, key);
      s[i] = rows.mod.shown(s[i] * rows.scale, int(row[half_of_register(i)]), key);
    }
    return;
  }
#endif
#pragma unroll
  for (int i = 0; i < BLOCK_N / 4; i++) {
    int key = first_key + lane_column() + column_at(i);
    if (LAST) key = at_most(rows.mask.seqlen_k - 1, key);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& x = s[register_at(half, i)];
      x = rows.mod(x * rows.scale, int(row[half]), key);
    }
  }
}

// A thread's part of a tile of the bias. Read before the scores are there, so that memory answers while the tensor cores
// multiply.
struct alignas(2 * sizeof(BIAS_ELEMENT)) BiasPair {  // of neighbouring keys
  BIAS_ELEMENT of[2];
};
using BiasTile = BiasPair[BIAS ? BLOCK_N / 8 : 1][2];

template <bool LAST>
DEVICE void load_bias(BiasTile& tile, const Rows& rows, int first_key) {
  const int first = first_key + lane_column();
  if (!LAST && rows.bias_in_pairs) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      tile[i / 2][i % 2] = *reinterpret_cast<const BiasPair*>(rows.bias[i % 2] + first + i / 2 * 8);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++) {
    const int half = half_of_register(i), key = first + column_of_register(i);
    tile[i / 4][half].of[i % 2] = rows.bias[half][LAST ? at_most(rows.mask.seqlen_k - 1, key) : key];
  }
}

DEVICE void add_bias(Scores& s, const BiasTile& tile) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++) s[i] = biased(s[i], tile[i / 4][half_of_register(i)].of[i % 2]);
}

// The modification, softcap, ALiBi and bias. tanh x = 1 - 2 / (1 + e^2x): to about 1e-7 absolute, and without a branch.
template <bool LAST>
DEVICE void score(Scores& s, const Rows& rows, const BiasTile& bias, int first_key, bool full = false) {
  if constexpr (SCORE_MOD) modify<LAST>(s, rows, first_key, full);
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2 && SCALED && !SCORE_MOD; i++) s[i] *= rows.scale;
#pragma unroll
  for (int half = 0; half < 2 && (SOFTCAP || ALIBI); half++) {
    // As a float: exact up to 2^24 keys away, and no conversion for each key.
#if POSITIONS
    const Positions& positions = rows.mask.positions;
    const int own = positions.row(rows.row(half)), other = positions.key(first_key + lane_column());
    const float diagonal = static_cast<float>(own - other), step = static_cast<float>(positions.keys.step);
#else
    const float diagonal = static_cast<float>(rows.row(half) + rows.mask.diagonal - first_key - lane_column());
    constexpr float step = 1.0f;
#endif
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      float& x = s[register_at(half, i)];
      if constexpr (SOFTCAP) {
        x = rows.softcap - 2.0f * rows.softcap * ptx::rcp(1.0f + ptx::ex2(x * rows.to_exponent));
      }
      if constexpr (ALIBI) {
        const float distance = diagonal - static_cast<float>(column_at(i)) * step;
        x -= rows.slope * (ALIBI_SIGNED ? distance : fabsf(distance));
      }
    }
  }
  if constexpr (BIAS) add_bias(s, bias);
}

// Sets scores whose key the row does not see to -inf.
DEVICE void apply_mask(Scores& s, const Rows& rows, int first_key) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const SeenColumns seen = rows.mask.columns(rows.row(half), first_key + lane_column());
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      if (!seen.has(column_at(i))) s[register_at(half, i)] = -INFINITY;
    }
  }
}

// Online softmax: scores to weights. Earlier sums must be multiplied by `correction`. `l` is the thread's own share of
// the row's sum until the end.
template <bool FIRST>
DEVICE void softmax_tile(Scores& s, SoftmaxRow (&softmax)[2], float (&correction)[2],
                         const Exponents& exponents) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    SoftmaxRow& row = softmax[half];
    float top[4] = {s[2 * half], s[2 * half + 1], s[2 * half + 4], s[2 * half + 5]};
#pragma unroll
    for (int i = 4; i < BLOCK_N / 4; i++) top[i % 4] = max_of(top[i % 4], s[register_at(half, i)]);
    const float largest = max_of(max_of(top[0], top[1]), max_of(top[2], top[3]));
    float factor;
    const float base = row.raise<FIRST>(largest, exponents, factor, correction[half]);
    float sum[2];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      float& x = s[register_at(half, i)];
      x = ptx::ex2(x * factor - base);
      sum[i % 2] = i < 2 ? x : sum[i % 2] + x;
    }
    row.l = FIRST ? sum[0] + sum[1] : row.l + (sum[0] + sum[1]);
  }
}

// A bit for each of the thread's weights that dropout keeps: 4 * block + e, of 64 keys a word.
using Kept = uint32_t[(BLOCK_N + 63) / 64];

// Draws need no scores. Rolled, with eight bits a turn, because Philox's ten rounds are some seventy instructions.
DEVICE void draw_kept(Kept& kept, const Rows& rows, int first_key) {
#pragma unroll
  for (int i = 0; i < (BLOCK_N + 63) / 64; i++) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int block = 0; block < (BLOCK_N - 64 * i < 64 ? BLOCK_N / 8 - 8 * i : 8); block += 2) {
#pragma unroll
      for (int next = 0; next < 2; next++) {
        const int key = first_key + 64 * i + 8 * (block + next) + lane_column();
        bits |= kept_in_block(rows.dropout, rows.row(0), rows.row(1), key) << 4 * (block + next);
      }
    }
    kept[i] = bits;
  }
}

// Sums include all weights; a dropped one only adds no value.
DEVICE void drop_weights(Scores& s, const Kept& kept) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2; i++) {
    if (!(kept[i / 32] >> i % 32 & 1)) s[i] = 0.0f;
  }
}

template <class Format = FormatOf<ELEMENT>>
DEVICE void pack(Weights& p, const Scores& s) {
  if constexpr (FP8) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; i++) {
      const int first = i / 2 * 8 + i % 2 * 2;  // of a row's two scores in one block of keys; the next two are 4 on
      p[i / 4][i % 4] = Format::pack(s[first], s[first + 1], s[first + 4], s[first + 5]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) p[i / 4][i % 4] = Format::pack(s[2 * i], s[2 * i + 1]);
  }
}

DEVICE void rescale(Output& o, const float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < DIM_V / 2; i++) o[i] *= correction[half_of_register(i)];
}
