// Asynchronous copies (PTX ISA 9.7.9.25 to 9.7.9.27): cp.async, bulk and tensor copies; their readers and meanings.
#pragma once

#include "emulation/assembly/parser.cuh"
#include "emulation/copy_async.cuh"
#include "emulation/tma.cuh"

namespace emulation {

// ---- cp.async.ca|cg.shared.global{.L2::128B} [to], [from], bytes {, valid}
inline void copy_asynchronously(const Instruction& i, Frame& f) {
  const int bytes = value_of<int>(f, i.slots[2]);
  const bool fits = i.number ? bytes == 16 : bytes == 4 || bytes == 8 || bytes == 16;
  if (!fits) fail(kind::assembly, "cp.async.%s of %d bytes", i.number ? "cg" : "ca", bytes);
  issue_copy(value_of<uint32_t>(f, i.slots[0]), value_of<const void*>(f, i.slots[1]), bytes,
             i.slots.size > 3 ? value_of<int>(f, i.slots[3]) : bytes);
}
inline void copies_committed(const Instruction&, Frame&) { commit_copies(); }
inline void copies_awaited(const Instruction& i, Frame& f) { wait_for_copies(value_of<uint32_t>(f, i.slots[0])); }
inline void all_copies_awaited(const Instruction&, Frame&) { wait_for_all_copies(); }
inline void copies_arrive(const Instruction& i, Frame& f) {
  issue_copy_arrival(value_of<uint32_t>(f, i.slots[0]), i.flags != 0);
}

// ---- cp.async.bulk: shared::cluster.global.mbarrier::complete_tx::bytes{.L2::cache_hint}, and
// global.shared::cta.bulk_group, also as cp.reduce with .add.f32, .add.noftz.f16 or .add.noftz.bf16 (number: which)
constexpr int HAS_POLICY = 8;

inline ptx::CachePolicy policy_of(const Instruction& i, const Frame& f) {
  if (!(i.flags & HAS_POLICY)) return ptx::CachePolicy::evict_normal;
  return static_cast<ptx::CachePolicy>(value_of<uint64_t>(f, i.slots[i.slots.size - 1]));
}
inline void load_bulk(const Instruction& i, Frame& f) {
  issue_bulk_load(value_of<uint32_t>(f, i.slots[0]), value_of<const void*>(f, i.slots[1]),
                  value_of<uint32_t>(f, i.slots[2]), value_of<uint32_t>(f, i.slots[3]), policy_of(i, f));
}
inline void store_bulk(const Instruction& i, Frame& f) {
  issue_bulk_store(value_of<void*>(f, i.slots[0]), value_of<uint32_t>(f, i.slots[1]), value_of<uint32_t>(f, i.slots[2]),
                   i.number, i.number ? "bulk reduction" : "bulk store");
}
inline void stores_committed(const Instruction&, Frame&) { commit_stores(); }
inline void stores_awaited(const Instruction& i, Frame& f) { wait_for_stores(value_of<uint32_t>(f, i.slots[0])); }
inline void reads_awaited(const Instruction& i, Frame& f) { wait_for_reads(value_of<uint32_t>(f, i.slots[0])); }

inline int coordinate_list(const Instruction& i, const Frame& f, uint32_t first, int* coordinate) {
  for (int d = 0; d < i.number; d++) coordinate[d] = value_of<int>(f, i.slots[first + d]);
  return i.number;
}
// number: the rank. Slots: destination, map, coordinates, mbarrier {, policy}
inline void load_tensor(const Instruction& i, Frame& f) {
  int coordinate[5];
  const int rank = coordinate_list(i, f, 2, coordinate);
  issue_tensor_load(value_of<uint32_t>(f, i.slots[0]), value_of<const ptx::TensorMap*>(f, i.slots[1]),
                    value_of<uint32_t>(f, i.slots[2 + rank]), rank, coordinate, policy_of(i, f));
}
// Slots: map, coordinates, source. flags: whether it adds
inline void store_tensor(const Instruction& i, Frame& f) {
  int coordinate[5];
  const int rank = coordinate_list(i, f, 1, coordinate);
  issue_tensor_store(value_of<const ptx::TensorMap*>(f, i.slots[0]), value_of<uint32_t>(f, i.slots[1 + rank]), rank,
                     coordinate, i.flags != 0);
}

inline int read_rank(Parser& p) {
  const char* const ranks[] = {"1d", "2d", "3d", "4d", "5d"};
  return 1 + p.choose(ranks);
}
inline int read_cache_hint(Parser& p) { return p.is("L2::cache_hint") ? HAS_POLICY : 0; }

inline void read_tensor_copy(Parser& p) {
  const int rank = read_rank(p);
  if (p.is("global")) {
    p.needs("shared::cta", "tile", "bulk_group");
    p.address(64, "tensor map", rank);
    p.address(32, "source");
    return p.means(store_tensor, "TMA store", rank);
  }
  p.needs("shared::cluster", "global", "tile", "mbarrier::complete_tx::bytes");
  const int flags = read_cache_hint(p);
  p.address(32, "destination");
  p.address(64, "tensor map", rank);
  p.address(32, "mbarrier");
  if (flags) p.reads(B64, "cache policy");
  p.means(load_tensor, "TMA load", rank, flags);
}

inline void read_bulk_copy(Parser& p) {
  if (p.is("commit_group")) return p.means(stores_committed, "bulk commit");
  if (p.is("wait_group")) {
    const bool reads = p.is("read");
    p.number_in(0, 1 << 20, "number of groups");
    return p.means(reads ? reads_awaited : stores_awaited, "bulk wait");
  }
  if (p.is("tensor")) return read_tensor_copy(p);
  if (p.is("global")) {
    p.need("shared::cta");
    p.need("bulk_group");
    p.address(64, "destination");
    p.address(32, "source");
    p.reads(U32, "size");
    return p.means(store_bulk, "bulk store");
  }
  p.needs("shared::cluster", "global", "mbarrier::complete_tx::bytes");
  const int flags = read_cache_hint(p);
  p.address(32, "destination");
  p.address(64, "source");
  p.reads(U32, "size");
  p.address(32, "mbarrier");
  if (flags) p.reads(B64, "cache policy");
  p.means(load_bulk, "bulk load", 0, flags);
}

inline void read_bulk_reduction(Parser& p) {
  p.needs("async", "bulk");
  if (p.is("tensor")) {
    const int rank = read_rank(p);
    p.needs("global", "shared::cta", "add", "tile", "bulk_group");
    p.address(64, "tensor map", rank);
    p.address(32, "source");
    return p.means(store_tensor, "TMA reduction", rank, 1);
  }
  p.needs("global", "shared::cta", "bulk_group", "add");
  const char* const types[] = {"f16", "bf16"};
  const int number = p.is("f32") ? 1 : (p.need("noftz"), 2 + p.choose(types));
  p.address(64, "destination");
  p.address(32, "source");
  p.reads(U32, "size");
  p.means(store_bulk, "bulk reduction", number);
}

inline void read_cp(Parser& p) {
  p.touches_memory();
  if (p.is("reduce")) return read_bulk_reduction(p);
  p.need("async");
  if (p.is("bulk")) return read_bulk_copy(p);
  if (p.is("commit_group")) return p.means(copies_committed, "cp.async.commit_group");
  if (p.is("wait_all")) return p.means(all_copies_awaited, "cp.async.wait_all");
  if (p.is("wait_group")) {
    p.number_in(0, 1 << 20, "number of groups");
    return p.means(copies_awaited, "cp.async.wait_group");
  }
  if (p.is("mbarrier")) {
    p.need("arrive");
    const bool increments = !p.is("noinc");
    p.need("shared::cta");
    p.need("b64");
    p.address(32, "mbarrier");
    return p.means(copies_arrive, "cp.async.mbarrier.arrive", 0, increments);
  }
  const char* const levels[] = {"ca", "cg"};
  const int level = p.choose(levels);
  p.need("shared");
  p.need("global");
  p.is("L2::128B");
  p.address(32, "destination");
  p.address(64, "source");
  p.number_in(4, 16, "size");
  if (p.has_more()) p.reads(U32, "valid bytes");
  p.means(copy_asynchronously, "cp.async", level);
}

// ---- prefetch.tensormap [map]
inline void prefetch_map(const Instruction& i, Frame& f) {
  if (value_of<uint64_t>(f, i.slots[0]) % 64) fail(kind::misaligned, "prefetch.tensormap: not 64-byte aligned");
}
inline void read_prefetch(Parser& p) {
  p.need("tensormap");
  p.address(64, "tensor map");
  p.touches_memory();
  p.means(prefetch_map, "prefetch.tensormap");
}

}  // namespace emulation
