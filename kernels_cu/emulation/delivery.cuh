// What lands when, and what must not be left at the end of a thread or block.
#pragma once

#include "emulation/copy_async.cuh"
#include "emulation/tma.cuh"
#include "emulation/wgmma.cuh"

namespace emulation {

inline void deliver(const InFlight& load) {
  Block& block = *load.fiber->block;
  blame(block, load.fiber->linear, load.issued);
  switch (load.kind) {
    case InFlight::copy_arrival: land_and_arrive(load); break;
    case InFlight::tensor: land_tensor(load); break;
    case InFlight::bulk: land_bulk(load); break;
  }
  if (load.kind != InFlight::copy_arrival)
    update_mbarrier(find_mbarrier(load.mbarrier, "complete_tx"), 0, -int64_t(load.bytes), "complete_tx");
  blame_running(block);
}

bool deliver_one(Block& block) {
  if (block.in_flight.empty()) return false;
  uint32_t at = block.request->delivery == Delivery::random ? block.random.below(block.in_flight.size) : 0;
  InFlight load = block.in_flight[at];
  block.in_flight.erase(at);
  deliver(load);
  return true;
}

inline void check_thread_end(Fiber& fiber) {
  uint64_t awaited = fiber.copies.finished;  // an mbarrier arrival on its way waits for them as well
  for (const InFlight& load : fiber.block->in_flight)
    if (load.kind == InFlight::copy_arrival && load.fiber == &fiber) awaited = upper(awaited, load.copies);
  Block& block = *fiber.block;
  if (awaited < fiber.copies.issued) {
    const CopyAsync& copy = fiber.copies.pending.back();
    blame(block, -1, copy.issued);
    fail(kind::leftover, "the thread ends with cp.async that it has not waited for, to shared address 0x%x",
         copy.destination);
  }
  BulkStoreState& bulk = fiber.bulk;
  if (bulk.committed < bulk.stores.size) {
    blame(block, -1, bulk.stores[bulk.committed].issued);
    fail(kind::leftover, "the thread ends with bulk or tensor stores that it has not committed, of shared address 0x%x",
         bulk.stores[bulk.committed].shared);
  }
  for (BulkStore& store : bulk.stores) {
    blame(block, -1, store.issued);
    if (!store.read)
      fail(kind::leftover, "the thread ends while its bulk or tensor stores may still read shared address 0x%x",
           store.shared);
    finish_write(store);
  }
  blame_running(block);
}

inline void check_block_end(Block& block) {
  if (!block.in_flight.empty()) {
    const InFlight& load = block.in_flight[0];
    blame(block, load.fiber->linear, load.issued);
    return report(block, kind::leftover, "the block ends with %u loads on their way, the first to shared address 0x%x",
                  block.in_flight.size, load.shared);
  }
  for (int i = 1; i < 16; i++)
    if (block.barrier[i].arrived)
      return report(block, kind::leftover, "the block ends with %d arrivals pending at barrier %d",
                    block.barrier[i].arrived, i);
  for (int i = 0; i < block.warp_count; i++) {
    const WgmmaState& state = block.warp[i].wgmma;
    if (state.operations.size) {
      blame(block, 32 * i, state.operations.items[0].issued);
      return report(block, kind::leftover, "the block ends with wgmma of warp %d not waited for", i);
    }
    if (i % 4 && state.issued != block.warp[i - i % 4].wgmma.issued)
      return report(block, kind::divergence, "warps %d and %d of a warpgroup issued %llu and %llu wgmma", i - i % 4, i,
                    static_cast<unsigned long long>(block.warp[i - i % 4].wgmma.issued),
                    static_cast<unsigned long long>(state.issued));
    const int first = block.warp[i - i % 4].registers;
    if (block.warp[i].registers != first)
      return report(block, kind::divergence, "warps %d and %d of a warpgroup have %d and %d registers a thread",
                    i - i % 4, i, first, block.warp[i].registers);
  }
}

// Frees what a block that ended early may have left behind, and empties the lists for the next one.
inline void release_asynchronous_state(Block& block) {
  end_orders(block);
  for (uint32_t i = 0; i < block.request->buffer_count; i++) block.unfenced[i].clear();
  block.stores_unfenced = false;
  block.in_flight.clear();
  for (int i = 0; i < block.threads; i++) {
    Fiber& fiber = *block.fiber[i];
    for (BulkStore& store : fiber.bulk.stores) free(store.snapshot);
    fiber.bulk.stores.release();
    fiber.bulk.groups.release();
    fiber.copies.pending.release();
    fiber.copies.groups.release();
    block.written[i].clear();
  }
  for (Warp& warp : block.warp) release_wgmma(warp.wgmma);
  for (List<WgmmaIssue>& issues : block.issues) issues.clear();
}

}  // namespace emulation
