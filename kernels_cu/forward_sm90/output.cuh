// A row of forward_sm90's output in global memory.
#pragma once

#include "forward_sm90/schedule.cuh"

DEVICE OUT_ELEMENT* output_row(const Params& params, const Work& work, int row) {
  const int64_t at = work.q_start + static_cast<int64_t>(row);
  return element_of<OUT_ELEMENT>(params.out, params.out_strides, work.sequence, at, work.head);
}

// Stores the 16 bytes of a row from column 8 * unit on, unless they lie past the end of the sequence or of the row.
DEVICE void store_unit(const Params& params, const Work& work, int row, int unit, const uint32_t (&bits)[4]) {
  if (row >= work.seqlen_q || 8 * unit >= HEAD_DIM_V) return;
  ptx::store_global_v4(output_row(params, work, row) + 8 * unit, bits);
}
