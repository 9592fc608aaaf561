// Which elements of a product a lane holds, as mma.sync and wgmma leave it in registers.
//
// A lane has two rows of a warp's 16, g and g + 8: half 0 and half 1, g = lane / 4. Of each it has columns 2t and 2t + 1 of
// every block of 8 columns, t = lane % 4.
//
//   register           0   1 | 2   3 | 4   5 | 6   7 | ..
//   half               0   0 | 1   1 | 0   0 | 1   1 | ..
//   column, from 2t    0   1 | 0   1 | 8   9 | 8   9 | ..
//
// PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Register Fragments for wgmma.mma_async.m64nNk16".
#pragma once

#include "ptx/types.cuh"

DEVICE int lane_id() { return threadIdx.x % 32; }

// The first column that the lane has; the others are counted from it.
DEVICE int lane_column() { return lane_id() % 4 * 2; }

// The i-th column that the lane has of a row, and the register that holds it.
DEVICE constexpr int column_at(int i) { return i / 2 * 8 + i % 2; }
DEVICE constexpr int register_at(int half, int i) { return i / 2 * 4 + 2 * half + i % 2; }

// What a register holds: of which of the two rows, and of which column.
DEVICE constexpr int half_of_register(int i) { return i / 2 % 2; }
DEVICE constexpr int column_of_register(int i) { return i / 4 * 8 + i % 2; }
