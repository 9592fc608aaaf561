// Merges the pieces that decode_simple cut an item into: softmax over their sums, in the order of the pieces.
//
//   blockIdx.x   an item, whose pieces are neighbouring slots          item 0          item 1
//   threads      the columns of its packed rows, one after the other   | 0  1  2 |     | 3  4  . |   an item of few tiles
//                                                                                                    has fewer pieces
#include "decode/simple_output.cuh"

LITTLE_ARITHMETIC

using Real = Accumulator<ELEMENT>;
constexpr int THREADS = 32 * WARPS;

DEVICE void merge(const DecodeParams& params, const Entry& entry, int kv_head, int64_t first, int pieces, int row,
                  int column) {
  const PartialSum<Real>* const sums = partial_sums<Real>(params) + first * BLOCK_M + row;
  const Real* const values = partial_out<Real>(params) + (first * BLOCK_M + row) * HEAD_DIM_V + column;
  Real top = -INFINITY, l = 0, sum = 0;
  for (int piece = 0; piece < pieces; piece++) top = max_of(top, sums[piece * BLOCK_M].m);
  const Real base = top == -INFINITY ? Real(0) : top;
  for (int piece = 0; piece < pieces; piece++) {
    const Real weight = sums[piece * BLOCK_M].l * exp_of(sums[piece * BLOCK_M].m - base);
    l += weight;
    sum = add_weighted(sum, weight, values[int64_t(piece) * BLOCK_M * HEAD_DIM_V]);
  }
  const OutputRow to = output_row(params, entry, kv_head, entry.packed_begin + row);
  const Finished<Real> result = finish_row(params, to.head, top, l);
  to.out[column] = from_real(Rounded<OUT_ELEMENT>(), result.of(sum));
  if (LSE && column == 0) *to.lse = float(result.lse);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_simple_combine(const __grid_constant__ DecodeParams params) {
  const int item = blockIdx.x, kv_head = item % params.attention.heads_kv;
  const Entry entry = entry_of(params, item / params.attention.heads_kv);
  const int pieces = pieces_of(params, entry.tiles.count());
  if (!entry.exists() || pieces == 1) return;
  const int rows = entry.packed_end - entry.packed_begin;
  for (int index = threadIdx.x; index < rows * HEAD_DIM_V; index += THREADS) {
    merge(params, entry, kv_head, int64_t(item) * params.splits, pieces, index / HEAD_DIM_V, index % HEAD_DIM_V);
  }
}
