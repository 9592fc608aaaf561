// The end of a tile: its rows are divided by their sums and stored, and so is its LSE.
//
//     registers --stmatrix--> boxes in shared memory --TMA--> out           dense: TMA writes no row past the end
//         |                              \--16 bytes a thread, row by row--> out      VARLEN: there the next sequence
//         |                                                                          begins, which TMA would overwrite
//         \--quads exchange columns, 16 bytes a thread--> out              O_DIRECT: no room in shared memory
#pragma once

#include "forward_sm90/nonfinite.cuh"

// Named barriers (0 is __syncthreads). A ping-pong barrier takes the threads of two consumers, `own` those of one.
DEVICE int pingpong_barrier(int consumer) { return 1 + consumer; }
DEVICE void sync_consumer(int consumer) { ptx::barrier_sync(1 + CONSUMERS + consumer, WARPGROUP); }

DEVICE float sink_of(const Params& params, int head) {
  if constexpr (SINKS) return sink_logit(params, head);
  else return -INFINITY;
}

// Stores the LSE of a row, and its parts.
DEVICE void store_stats(const LaunchParams& params, const Work& work, int row, const RowResult& result) {
  if constexpr (!LSE && !ROW_STATS) return;
  if (row < work.seqlen_q) {
    const int64_t at = work.q_start + row;
    if (LSE) *element_of<float>(params.lse, params.lse_strides, work.sequence, at, work.head) = result.lse;
    store_row_stats(params, work.sequence, at, work.head, result.largest, result.sum);
  }
}

// Rows that see no key: O is 0, and the LSE is the learned sink.
DEVICE void store_nothing(const LaunchParams& params, const Work& work, int consumer) {
  constexpr int UNITS = DIM_V / 8;
  const int thread = threadIdx.x % WARPGROUP, first_row = work.row_begin + consumer * ROWS;
  const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int n = thread; n < ROWS * UNITS; n += WARPGROUP) store_unit(params, work, first_row + n / UNITS, n % UNITS, zeros);
  if (thread < ROWS) {
    const float sink = sink_of(params, work.head);
    store_stats(params, work, first_row + thread, {0.0f, sink, sink, sink == -INFINITY ? 0.0f : 1.0f});
  }
}

// Two neighbouring columns of the output: those that the thread holds of the n-th eight, of one of its rows. `factor` is
// that row's, and `scale` that of all values. A row without weights is 0, whatever the values of keys that it does not
// see.
DEVICE uint32_t output_pair(const Output& o, int n, int half, float factor, float scale) {
  const float low = o[4 * n + 2 * half], high = o[4 * n + 2 * half + 1];
  return factor == 0.0f ? 0 : FormatOf<OUT_ELEMENT>::pack(low * (factor * scale), high * (factor * scale));
}

DEVICE void put_output(uint32_t place, const Output& o, const float (&factor)[2], float scale) {
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id() % 16;  // whose 16 bytes this lane names
#pragma unroll
  for (int block = 0; block < DIM_V / 8; block += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = output_pair(o, block + i / 2, i % 2, factor[i % 2], scale);
    ptx::stmatrix_x4(OBoxes::place(place, row, block + lane_id() / 16), words);
  }
}

// A lane holds two columns of each eight. Of two neighbouring eights, the even lanes of a quad get the first one's
// words from the odd lanes, and the odd lanes get the second one's. Then each has four columns of one, and a quad
// stores 32 bytes at once, which memory takes whole. Nothing waits for a store of registers.
DEVICE void store_registers(const Params& params, const Work& work, const Rows& rows, const Output& o,
                            const float (&factor)[2], float scale) {
  const bool odd = lane_id() & 1, upper = lane_id() & 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = rows.row(half);
    const auto first_out = reinterpret_cast<uint64_t>(output_row(params, work, row) + 8 * odd + 4 * upper);
    uint32_t address[2] = {uint32_t(first_out), uint32_t(first_out >> 32)};
    ptx::pin_registers(address);  // otherwise ptxas computes it again for each store
    const auto out = reinterpret_cast<OUT_ELEMENT*>(uint64_t(address[1]) << 32 | address[0]);
#pragma unroll
    for (int n = 0; n < DIM_V / 8; n += 2) {
      const uint32_t first = output_pair(o, n, half, factor[half], scale);
      const uint32_t second = output_pair(o, n + 1, half, factor[half], scale);
      const uint32_t got = __shfl_xor_sync(ALL_LANES, odd ? first : second, 1);
      const uint64_t low = odd ? got : first, high = odd ? second : got;
      if (row < work.seqlen_q && 8 * (n + odd) < HEAD_DIM_V) *reinterpret_cast<uint64_t*>(out + 8 * n) = high << 32 | low;
    }
  }
}

// Sends the output in shared memory to `out`. Its place is free again after the next call's wait.
DEVICE void send_output(const Sm90Params& all, const Work& work, const Shared& shared, int consumer) {
  constexpr int UNITS = DIM_V / 8;
  const int thread = threadIdx.x % WARPGROUP, first_row = work.row_begin + consumer * ROWS;
  const uint32_t place = shared.o(consumer);
  if constexpr (VARLEN) {
    sync_consumer(consumer);
#pragma unroll 4
    for (int i = 0; i < ROWS * UNITS / WARPGROUP; i++) {
      const int n = i * WARPGROUP + thread;
      uint32_t bits[4];
      ptx::load_shared_v4(bits, OBoxes::place(place, n / UNITS, n % UNITS));
      store_unit(all.params, work, first_row + n / UNITS, n % UNITS, bits);
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
  }
}

DEVICE float scale_of_values(const Params& params, const Work& work) {
  if constexpr (DROPOUT) return static_cast<float>(params.dropout_scale);
  if constexpr (!DESCALES) return 1.0f;
  return descale(params.v_descale, params.v_descale_strides, work.sequence, work.kv_head);
}

DEVICE void store(const Sm90Params& all, const Work& work, const Shared& shared, int consumer, const Rows& rows,
                  const SoftmaxRow (&softmax)[2], const Output& o) {
  const float sink = sink_of(all.params, work.head);
  const RowResult results[2] = {finish(softmax[0], rows.exponents, sink), finish(softmax[1], rows.exponents, sink)};
  if (lane_id() % 4 == 0) {
    store_stats(all.params, work, rows.row(0), results[0]);
    store_stats(all.params, work, rows.row(1), results[1]);
  }
  const float factor[2] = {results[0].factor, results[1].factor}, scale = scale_of_values(all.params, work);
  if constexpr (O_DIRECT) {
    store_registers(all.params, work, rows, o, factor, scale);
    mend_nonfinite(all, work, rows, results, o, scale, 0);
    __syncwarp();  // without it ptxas takes the ring's stage for the lanes' own, and moves each descriptor over
    return;
  }
  if constexpr (!VARLEN) {  // the last tile's output has left this place
    if (threadIdx.x % WARPGROUP == 0) ptx::bulk_wait_read<0>();
    sync_consumer(consumer);
  }
  put_output(shared.o(consumer), o, factor, scale);
  mend_nonfinite(all, work, rows, results, o, scale, shared.o(consumer));
  send_output(all, work, shared, consumer);
}
