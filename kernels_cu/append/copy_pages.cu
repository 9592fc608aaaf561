// Copies whole pages of K and V from one pool to another. Within one pool this is copy on write, before a sequence
// writes to a page that it shares. With a pool of a sequence's own pages it exports and imports the sequence.
//
//   pairs     | source, destination | source, destination | ...
//   block     pair 0, part 0 | pair 0, part 1 | ... | pair 1, part 0 | ...      a part is PART_BYTES of the K page, or of
//                                                                              the V page behind it
//
// Within one pool no page is both source and destination, and no page is the destination of two pairs, because pairs
// are copied in any order. Pairs with a page outside its pool are skipped, so a list may be padded with -1.
#include "ptx/memory.cuh"

LITTLE_ARITHMETIC

#if !defined(WARPS) || !defined(PART_BYTES)
#error "WARPS and PART_BYTES must be given"
#endif

constexpr int THREADS = WARPS * 32;
static_assert(PART_BYTES % (THREADS * 16) == 0, "a part is whole rounds of 16 bytes a thread");

struct Params {  // strides and sizes of pages in bytes
  const void* k_source;
  const void* v_source;
  void* k_target;
  void* v_target;
  const int32_t* pairs;
  int64_t k_source_stride;
  int64_t v_source_stride;
  int64_t k_target_stride;
  int64_t v_target_stride;
  int64_t k_bytes;
  int64_t v_bytes;
  int32_t source_blocks;
  int32_t target_blocks;
  int32_t k_parts;
  int32_t v_parts;
};

DEVICE void copy_part(uint64_t from, uint64_t to, int64_t bytes, int64_t begin) {
  const int64_t end = bytes - begin > PART_BYTES ? begin + PART_BYTES : bytes;
  int64_t whole = begin;  // up to here in chunks of 16 bytes
  if ((from | to) % 16 == 0) {
    whole = begin + (end - begin) / 16 * 16;
    for (int64_t at = begin + int(threadIdx.x) * 16; at < whole; at += THREADS * 16) {
      uint32_t words[4];
      ptx::load_global_v4(words, reinterpret_cast<const void*>(from + at));
      ptx::store_global_v4(reinterpret_cast<void*>(to + at), words);
    }
  }
  for (int64_t at = whole + int(threadIdx.x); at < end; at += THREADS) {
    *reinterpret_cast<uint8_t*>(to + at) = *reinterpret_cast<const uint8_t*>(from + at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(const __grid_constant__ Params params) {
  const int parts = params.k_parts + params.v_parts;
  const int pair = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const int source = params.pairs[2 * pair], destination = params.pairs[2 * pair + 1];
  if (source < 0 || source >= params.source_blocks) return;
  if (destination < 0 || destination >= params.target_blocks) return;
  const bool is_k = part < params.k_parts;
  const uint64_t from = reinterpret_cast<uint64_t>(is_k ? params.k_source : params.v_source);
  const uint64_t to = reinterpret_cast<uint64_t>(is_k ? params.k_target : params.v_target);
  const int64_t from_stride = is_k ? params.k_source_stride : params.v_source_stride;
  const int64_t to_stride = is_k ? params.k_target_stride : params.v_target_stride;
  copy_part(from + source * from_stride, to + destination * to_stride, is_k ? params.k_bytes : params.v_bytes,
            int64_t(is_k ? part : part - params.k_parts) * PART_BYTES);
}
