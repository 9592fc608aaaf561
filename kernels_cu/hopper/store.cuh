// The end of a tile: its rows are divided by their sums and leave through shared memory, its LSE goes out directly.
//
//     registers --stmatrix--> boxes in shared memory --TMA--> out           dense: TMA writes no row past the end
//                                        \--16 bytes a thread, row by row--> out      VARLEN: there the next sequence
//                                                                                   begins, which TMA would overwrite
#pragma once

#include "hopper/nonfinite.cuh"

// Named barriers (0 is __syncthreads). A ping-pong barrier takes the threads of two consumers, `own` those of one.
DEVICE int pingpong_barrier(int consumer) { return 1 + consumer; }
DEVICE void sync_consumer(int consumer) { ptx::barrier_sync(1 + CONSUMERS + consumer, WARPGROUP); }

DEVICE float sink_of(const Params& params, int head) {
  if constexpr (SINKS) return sink_logit(params, head);
  else return -INFINITY;
}

// The LSE of a row, and what it is made of.
DEVICE void store_stats(const LaunchParams& params, const Work& work, int row, const RowResult& result) {
  if constexpr (!LSE && !ROW_STATS) return;
  if (row < work.seqlen_q) {
    const int64_t at = work.q_start + row;
    if (LSE) *element_of<float>(params.lse, params.lse_strides, work.sequence, at, work.head) = result.lse;
    store_row_stats(params, work.sequence, at, work.head, result.largest, result.sum);
  }
}

// The n-th 16 bytes of a consumer's output, unless they lie past the end of the sequence or of the row.
DEVICE void store_unit(const Params& params, const Work& work, int first_row, int n, const uint32_t (&bits)[4]) {
  constexpr int UNITS = DIM_V / 8;
  const int row = first_row + n / UNITS, column = n % UNITS * 8;
  if (row >= work.seqlen_q || column >= HEAD_DIM_V) return;
  const int64_t at = work.q_start + static_cast<int64_t>(row);
  const auto out = element_of<OUT_ELEMENT>(params.out, params.out_strides, work.sequence, at, work.head);
  ptx::store_global_v4(out + column, bits);
}

// Rows that see no key: O = 0, and as LSE the learned sink. Not through shared memory: such a tile takes no Q, so with
// O_OVER_Q the next tile's Q may be landing where O would be.
DEVICE void store_nothing(const LaunchParams& params, const Work& work, int consumer) {
  const int thread = threadIdx.x % WARPGROUP, first_row = work.row_begin + consumer * ROWS;
  const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int n = thread; n < ROWS * DIM_V / 8; n += WARPGROUP) store_unit(params, work, first_row, n, zeros);
  if (thread < ROWS) {
    const float sink = sink_of(params, work.head);
    store_stats(params, work, first_row + thread, {0.0f, sink, sink, sink == -INFINITY ? 0.0f : 1.0f});
  }
}

// scale: of all values, beside the rows' own factors.
DEVICE void put_output(uint32_t place, const Output& o, const float (&factor)[2], float scale) {
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id() % 16;  // whose 16 bytes this lane names
#pragma unroll
  for (int block = 0; block < DIM_V / 8; block += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // A row without weights is 0, whatever the values of keys that it does not see.
      const float f = factor[i % 2];
      const float low = o[4 * block + 2 * i], high = o[4 * block + 2 * i + 1];
      words[i] = f == 0.0f ? 0 : FormatOf<OUT_ELEMENT>::pack(low * (f * scale), high * (f * scale));
    }
    ptx::stmatrix_x4(OBoxes::place(place, row, block + lane_id() / 16), words);
  }
}

// What lies in shared memory goes to `out`, and then its place is free again: at once where O has Q's place, else by
// the next call, which waits for it first.
DEVICE void send_output(const Sm90Params& all, const Work& work, const Shared& shared, int consumer) {
  const int thread = threadIdx.x % WARPGROUP, first_row = work.row_begin + consumer * ROWS;
  const uint32_t place = shared.o(consumer);
  if constexpr (VARLEN) {
    sync_consumer(consumer);
#pragma unroll 4
    for (int i = 0; i < ROWS * DIM_V / 8 / WARPGROUP; i++) {
      const int n = i * WARPGROUP + thread;
      uint32_t bits[4];
      ptx::load_shared_v4(bits, OBoxes::place(place, n / (DIM_V / 8), n % (DIM_V / 8)));
      store_unit(all.params, work, first_row, n, bits);
    }
    sync_consumer(consumer);
    return;
  }
  ptx::fence_proxy_async();
  sync_consumer(consumer);
  if (thread == 0) {
    if (first_row < work.seqlen_q) {
#pragma unroll
      for (int box = 0; box < OBoxes::COUNT; box++) {
        ptx::tma_store(&all.out, place + box * OBoxes::BOX_BYTES, box * OBoxes::WIDTH, first_row, work.head,
                       work.sequence);
      }
    }
    ptx::bulk_commit();
    if (O_OVER_Q) ptx::bulk_wait_read<0>();
  }
  if (O_OVER_Q) sync_consumer(consumer);
}

DEVICE float scale_of_values(const Params& params, const Work& work) {
  if constexpr (DROPOUT) return static_cast<float>(params.dropout_scale);
  if constexpr (!DESCALES) return 1.0f;
  return descale(params.v_descale, params.v_descale_strides, work.sequence, work.kv_head);
}

DEVICE void store(const Sm90Params& all, const Work& work, const Shared& shared, int consumer, const Rows& rows,
                  const SoftmaxRow (&softmax)[2], const Output& o) {
  const float sink = sink_of(all.params, work.head);
  const RowResult results[2] = {finish(softmax[0], sink, WEIGHT_EXPONENT), finish(softmax[1], sink, WEIGHT_EXPONENT)};
  if (lane_id() % 4 == 0) {
    store_stats(all.params, work, rows.row(0), results[0]);
    store_stats(all.params, work, rows.row(1), results[1]);
  }
  if (!VARLEN && !O_OVER_Q) {  // the last tile's output has left this place
    if (threadIdx.x % WARPGROUP == 0) ptx::bulk_wait_read<0>();
    sync_consumer(consumer);
  }
  const float factor[2] = {results[0].factor, results[1].factor}, scale = scale_of_values(all.params, work);
  put_output(shared.o(consumer), o, factor, scale);
  mend_nonfinite(all, work, rows, softmax, o, factor, scale, shared.o(consumer));
  if (VARLEN && O_OVER_Q) ptx::fence_proxy_async();  // TMA brings the next Q there
  send_output(all, work, shared, consumer);
}
