// Transposes V for forward_sm90 on 8-bit elements, whose products take no other V (hopper/transposed_v.cuh).
//
//     a block:  one tile of BLOCK_N keys, COLUMNS columns of one head
//
//       v, a key a thread           shared memory                transposed
//       key 0  | 16 B | 16 B ..     column 0  | positions |      column 0  | 16 B | 16 B ..  a unit a thread
//       key 1  | 16 B | 16 B ..     column 1  | ..        |      ..
//          \-- bytes go one by one --^
//
// Keys past the end of the sequence are zeros, whatever lies there: the product with a weight of 0 would keep a NaN.
#include "ptx/memory.cuh"
#include "hopper/transposed_v.cuh"

LITTLE_ARITHMETIC

#if !defined(HEAD_DIM_V) || !defined(BLOCK_N) || !defined(VARLEN) || !defined(SHARED_BYTES)
#error "HEAD_DIM_V, BLOCK_N, VARLEN and SHARED_BYTES must be given"
#endif

constexpr int THREADS = BLOCK_N;
constexpr int COLUMNS = 64;  // of a block, as the launch counts its blocks
constexpr int LAYOUT_BYTES = COLUMNS * BLOCK_N;
constexpr int GROUPS = (HEAD_DIM_V + COLUMNS - 1) / COLUMNS;

static_assert(HEAD_DIM_V % 16 == 0 && BLOCK_N % 32 == 0, "whole units of 16 bytes, and whole warps");
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what the columns of a block take");

struct ValuesParams {
  const void* v;
  void* transposed;  // (batch, heads_kv, HEAD_DIM_V, tiles * BLOCK_N); a batch of 1 where VARLEN
  const int32_t* cu_seqlens_k;
  int64_t batch_stride;  // of v, in bytes
  int64_t row_stride;
  int64_t head_stride;
  int32_t tiles;
  int32_t heads_kv;
  int32_t seqlen_k;  // where dense
  int32_t batch;
};

// The keys of a tile: `count` from row `first` on, of sequence `batch` where dense.
struct TileKeys {
  int64_t batch, first;
  int count;
};

DEVICE TileKeys keys_of(const ValuesParams& params, int batch, int tile) {
  if (!VARLEN) return {batch, int64_t(tile) * BLOCK_N, params.seqlen_k - tile * BLOCK_N};
  // The last of the sequences that start at the tile or before it; of several at one place only it can have keys.
  int low = 0, high = params.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (values_start<BLOCK_N>(params.cu_seqlens_k[middle], middle) <= tile * BLOCK_N) low = middle;
    else high = middle;
  }
  const int start = params.cu_seqlens_k[low], before = tile * BLOCK_N - values_start<BLOCK_N>(start, low);
  return {0, int64_t(start) + before, params.cu_seqlens_k[low + 1] - start - before};
}

DEVICE void scatter_key(const ValuesParams& params, const TileKeys& keys, int head, int first_column,
                        unsigned char* shared) {
  const int key = threadIdx.x;
  const char* const row = static_cast<const char*>(params.v) + keys.batch * params.batch_stride +
                          (keys.first + key) * params.row_stride + head * params.head_stride;
#pragma unroll
  for (int unit = 0; unit < COLUMNS / 16; unit++) {
    if (first_column + unit * 16 >= HEAD_DIM_V) break;
    uint32_t words[4] = {0, 0, 0, 0};
    if (key < keys.count) ptx::load_global_v4(words, row + first_column + unit * 16);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      shared[(unit * 16 + i) * BLOCK_N + position_of_key(key)] = words[i / 4] >> i % 4 * 8 & 0xff;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_v(const __grid_constant__ ValuesParams params) {
  DYNAMIC_SHARED(shared);
  const int first_column = int(blockIdx.x) % GROUPS * COLUMNS;
  const int tile = int(blockIdx.x) / GROUPS % params.tiles;
  const int sequence_head = int(blockIdx.x) / GROUPS / params.tiles;
  const int batch = sequence_head / params.heads_kv, head = sequence_head % params.heads_kv;
  const TileKeys keys = keys_of(params, batch, tile);
  if (keys.count <= 0) return;  // no one reads a tile without keys
  scatter_key(params, keys, head, first_column, shared);
  __syncthreads();
  const int columns = HEAD_DIM_V - first_column < COLUMNS ? HEAD_DIM_V - first_column : COLUMNS;
  const int64_t positions = int64_t(params.tiles) * BLOCK_N;
  char* const out = static_cast<char*>(params.transposed) +
                    (int64_t(sequence_head) * HEAD_DIM_V + first_column) * positions + int64_t(tile) * BLOCK_N;
  for (int n = threadIdx.x; n < columns * (BLOCK_N / 16); n += THREADS) {
    const int column = n / (BLOCK_N / 16), unit = n % (BLOCK_N / 16);
    uint32_t words[4];
    ptx::load_shared_v4(words, ptx::shared_address(shared + column * BLOCK_N + unit * 16));
    ptx::store_global_v4(out + column * positions + unit * 16, words);
  }
}
