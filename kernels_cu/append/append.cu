// Append: new rows of K and V of many sequences go to the ends of their caches, rotated and quantised on the way.
//
// Rotary embedding: Su et al., "RoFormer", arXiv 2104.09864, section 3.2.2, in float, rounded once at the end. A block
// owns up to MAX_ROWS rows of the packed batch, or with many heads a part of one row. It runs in three steps:
//
//   1  a thread a row     sequence (by bisection) -> place in it -> page (block table) -> address in the caches
//   2  a thread a pair    position -> angle -> (cos, sin), once for all heads           only where something is rotated
//   3  a thread a unit    16 bytes of the destination; neighbouring lanes, neighbouring chunks
//
//      row:    | K head 0 . . . | K head 1 . . . | ... | V head 0 . . . | ... | q head 0 . . . | ...
//      units of a rotated head, halves:     | 0 1 2 3 | 4 5 | 0 1 2 3 | 4 5 |      a unit takes both halves of its
//                                           |<-- ROTARY_DIM / 2 -->|     rest      pairs; interleaved, pairs lie in it
//
// A row is not written if its place is outside its cache or its page is not in the pool. So a step that was captured
// for more sequences is padded with sequences of length 0.
#include "append/params.cuh"
#include "ptx/math.cuh"
#include "common/vector_rows.cuh"

LITTLE_ARITHMETIC

constexpr int THREADS = WARPS * 32;
constexpr int PAIRS = ROTARY_DIM / 2;
static_assert(ROTARY_DIM % 2 == 0 && ROTARY_DIM <= HEAD_DIM, "pairs of columns are rotated");
static_assert(!QUERY || ROTARY_DIM != 0, "q is here only to be rotated");

struct Place {  // of a new row
  uint64_t k, v;  // addresses of the row of head 0 in the caches; k is 0 if the row is not written
  int sequence, position;  // position: of the rotation
};
constexpr int LAYOUT_BYTES = MAX_ROWS * (sizeof(Place) + PAIRS * sizeof(float2));
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide this much");

// The sequence s with ends[s] <= row < ends[s + 1]. Sequences without rows are skipped.
DEVICE int sequence_of(const int32_t* ends, int batch, int row) {
  int low = 0, high = batch;  // ends[low] <= row < ends[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= row) low = middle;
    else high = middle;
  }
  return low;
}

// The address of a sequence's caches, or of the page `block`.
template <class Pointer>
DEVICE uint64_t base_of(Pointer cache, int64_t block_stride, int sequence, int block) {
  if constexpr (POINTERS) return static_cast<const uint64_t*>(cache)[sequence];
  return reinterpret_cast<uint64_t>(cache) + (PAGED ? block : sequence) * block_stride * int64_t(sizeof(CACHE_ELEMENT));
}

DEVICE Place locate(const Params& params, int row) {
  Place at{0, 0, 0, 0};
  int end = 0;
  if (params.cu_seqlens != nullptr) {
    if (row >= params.cu_seqlens[params.batch]) return at;
    at.sequence = sequence_of(params.cu_seqlens, params.batch, row);
    end = params.cu_seqlens[at.sequence + 1];
  } else {
    at.sequence = row / params.rows;
    end = (at.sequence + 1) * params.rows;
  }
  const int place = params.cache_seqlens[at.sequence] - (end - row);
  at.position = POSITIONS ? params.positions[row] : place;
  if (place < 0 || place >= params.capacity) return at;
  int block = 0, block_row = place;
  if constexpr (PAGED) {
    block = params.block_table[at.sequence * params.block_table_row + place / params.page_size];
    if (block < 0 || block >= params.num_blocks) return at;
    block_row = place % params.page_size;
  }
  const int64_t bytes = sizeof(CACHE_ELEMENT);
  at.k = base_of(params.k_cache, params.k_cache_block, at.sequence, block) + block_row * params.k_cache_row * bytes;
  at.v = base_of(params.v_cache, params.v_cache_block, at.sequence, block) + block_row * params.v_cache_row * bytes;
  return at;
}

#if ROTARY_DIM
// (cos, sin) of a pair at a position. A position outside the tables gives NaN.
DEVICE float2 rotation(const Arguments& arguments, int position, int pair) {
#if TABLES
  const Params& params = arguments.params;
  if (position < 0 || position >= params.table_rows) return {NAN, NAN};
  return {params.rope_cos[position * params.rope_cos_row + pair], params.rope_sin[position * params.rope_sin_row + pair]};
#else
  const uint64_t phase = uint64_t(int64_t(position)) * arguments.steps[pair];
  // The upper half as a signed number of 2^-31 half turns, from -1 to 1.
  const float half_turns = float(int32_t(phase >> 32)) * 0x1p-31f;
  return {cospi_of(half_turns), sinpi_of(half_turns)};
#endif
}
#endif

DEVICE float quantiser(const float* descales, int64_t row_stride, int64_t head_stride, int sequence, int head) {
  if (!DESCALES || descales == nullptr) return 1.0f;
  return 1.0f / descales[sequence * row_stride + head * head_stride];
}

// Rotates N pairs whose halves lie SPAN columns apart, or N / 2 pairs of neighbours.
template <int N, int SPAN, class From, class To>
DEVICE void rotate(const From* from, To* to, const float2* rotations, float scale) {
  float x[N];
  load_elements(x, from);
  if constexpr (INTERLEAVED) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 turn = rotations[i / 2];
      const float even = x[i], odd = x[i + 1];
      x[i] = even * turn.x - odd * turn.y;
      x[i + 1] = odd * turn.x + even * turn.y;
    }
  } else {
    float y[N];
    load_elements(y, from + SPAN);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float2 turn = rotations[i];
      const float low = x[i], high = y[i];
      x[i] = low * turn.x - high * turn.y;
      y[i] = high * turn.x + low * turn.y;
    }
    store_elements(to + SPAN, y, scale);
  }
  store_elements(to, x, scale);
}

// Moves one unit of a row of one head. rotations: those of the row's position, for ROTATED of the DIM columns. A unit
// that is not whole, or not aligned, is moved one element or pair at a time.
template <int DIM, int ROTATED, class From, class To>
DEVICE void move_unit(int unit, const From* from, To* to, const float2* rotations, float scale) {
  constexpr int N = vector_length<From, To>();
  constexpr int SPAN = INTERLEAVED ? ROTATED : ROTATED / 2;
  constexpr int ROTATED_UNITS = (SPAN + N - 1) / N;
  if (unit >= ROTATED_UNITS) {
    const int first = ROTATED + (unit - ROTATED_UNITS) * N, end = min(DIM, first + N);
    if (end - first == N && is_aligned(from + first) && is_aligned(to + first)) {
      move_elements<N>(from + first, to + first, scale);
    } else {
#pragma unroll 1
      for (int i = first; i < end; i++) move_elements<1>(from + i, to + i, scale);
    }
  } else if constexpr (ROTATED != 0) {
    const int first = unit * N, end = min(SPAN, first + N);
    constexpr int PAIR = INTERLEAVED ? 2 : 1;  // elements between a pair and the next
    const bool aligned = is_aligned(from + first) && is_aligned(to + first) &&
                         (INTERLEAVED || (is_aligned(from + SPAN + first) && is_aligned(to + SPAN + first)));
    if (end - first == N && aligned) {
      rotate<N, SPAN>(from + first, to + first, rotations + first / PAIR, scale);
    } else {
#pragma unroll 1
      for (int i = first; i < end; i += PAIR) rotate<PAIR, SPAN>(from + i, to + i, rotations + i / PAIR, scale);
    }
  }
}

template <int DIM, int ROTATED, class From, class To>
constexpr int units_of() {
  constexpr int N = vector_length<From, To>(), SPAN = INTERLEAVED ? ROTATED : ROTATED / 2;
  return (SPAN + N - 1) / N + (DIM - ROTATED + N - 1) / N;
}
static_assert(K_UNITS == units_of<HEAD_DIM, ROTARY_DIM, ELEMENT, CACHE_ELEMENT>(), "the grid counts units of K");
static_assert(V_UNITS == units_of<HEAD_DIM_V, 0, ELEMENT, CACHE_ELEMENT>(), "the grid counts units of V");
#if QUERY
static_assert(Q_UNITS == units_of<HEAD_DIM, ROTARY_DIM, ELEMENT, ELEMENT>(), "the grid counts units of q");
#endif

// Moves unit `unit` of a new row. The units of K come first, then those of V, then those of q.
DEVICE void move_row_unit(const Params& params, const Place& at, const float2* rotations, int64_t row, int unit) {
  const int k_units = params.heads_kv * K_UNITS, v_units = params.heads_kv * V_UNITS;
  if (unit < k_units) {
    const int head = unit / K_UNITS;
    if (at.k == 0) return;
    move_unit<HEAD_DIM, ROTARY_DIM>(
        unit % K_UNITS, static_cast<const ELEMENT*>(params.k) + row * params.k_row + head * params.k_head,
        reinterpret_cast<CACHE_ELEMENT*>(at.k) + head * params.k_cache_head, rotations,
        quantiser(params.k_descale, params.k_descale_row, params.k_descale_head, at.sequence, head));
  } else if (unit < k_units + v_units) {
    const int head = (unit - k_units) / V_UNITS;
    if (at.k == 0) return;
    move_unit<HEAD_DIM_V, 0>(
        (unit - k_units) % V_UNITS, static_cast<const ELEMENT*>(params.v) + row * params.v_row + head * params.v_head,
        reinterpret_cast<CACHE_ELEMENT*>(at.v) + head * params.v_cache_head, rotations,
        quantiser(params.v_descale, params.v_descale_row, params.v_descale_head, at.sequence, head));
  }
#if QUERY
  else {
    const int head = (unit - k_units - v_units) / Q_UNITS;
    move_unit<HEAD_DIM, ROTARY_DIM>(
        (unit - k_units - v_units) % Q_UNITS, static_cast<const ELEMENT*>(params.q) + row * params.q_row + head * params.q_head,
        static_cast<ELEMENT*>(params.q_rotated) + row * params.q_rotated_row + head * params.q_rotated_head, rotations,
        1.0f);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) append(const __grid_constant__ Arguments arguments) {
  DYNAMIC_SHARED(shared);
  Place* const places = reinterpret_cast<Place*>(shared);
  float2* const rotations = reinterpret_cast<float2*>(places + MAX_ROWS);
  const Params& params = arguments.params;

  const int first_row = int(blockIdx.x) / params.parts * params.block_rows;
  const int rows = min(params.total - first_row, params.block_rows);
  if (int(threadIdx.x) < rows) places[threadIdx.x] = locate(params, first_row + int(threadIdx.x));
  __syncthreads();
#if ROTARY_DIM
  for (int n = threadIdx.x; n < rows * PAIRS; n += THREADS) {
    rotations[n] = rotation(arguments, places[n / PAIRS].position, n % PAIRS);
  }
  __syncthreads();
#endif

#if QUERY
  const int row_units = params.heads_kv * (K_UNITS + V_UNITS) + params.heads_q * Q_UNITS;
#else
  const int row_units = params.heads_kv * (K_UNITS + V_UNITS);
#endif
  const int begin = int(blockIdx.x) % params.parts * params.part_units;
  const int end = min(rows * row_units, begin + params.part_units);
  for (int n = begin + int(threadIdx.x); n < end; n += THREADS) {
    const int row = n / row_units;
    move_row_unit(params, places[row], rotations + row * PAIRS, first_row + row, n % row_units);
  }
}
