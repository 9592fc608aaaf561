// wgmma, modelled warp by warp (each owns 16 of the 64 rows). Results appear in the registers at
// the wait; until then the registers hold signalling NaNs, which any arithmetic changes for good (a quiet NaN would
// survive o *= x unnoticed). Operands are hashed at issue and when the group retires. Sums of 8-bit products lose their
// low bits as they do on the GPU, those of 16-bit products with Arithmetic::hardware (emulation/truncated_sum.cuh).
#pragma once

#include "emulation/approximation.cuh"
#include "emulation/collective.cuh"
#include "emulation/formats.cuh"
#include "emulation/truncated_sum.cuh"

namespace emulation {

constexpr uint64_t HASH_START = 1469598103934665603ull, HASH_PRIME = 1099511628211ull;

inline uint32_t accumulator_poison(int lane, int i) {
  return 0x7F80DE00u | static_cast<uint32_t>((lane * 131 + i) & 0xFF);
}

// ---- operands in shared memory
struct Descriptor {
  uint32_t start, leading, stride;
  int swizzle;
};

inline Descriptor parse_descriptor(uint64_t bits, const char* what) {
  constexpr uint64_t RESERVED = 0x3FF1C000C000C000ull;  // base_offset among them: boxes start at atom boundaries here
  Descriptor d{uint32_t(bits & 0x3FFF) << 4, uint32_t(bits >> 16 & 0x3FFF) << 4, uint32_t(bits >> 32 & 0x3FFF) << 4,
               int(bits >> 62)};
  if (bits & (RESERVED | 7ull << 49))
    fail(kind::descriptor, "%s: descriptor 0x%016llx has bits set that this emulation does not know", what,
         static_cast<unsigned long long>(bits));
  if (d.start >> 7 & swizzle_lines(d.swizzle))
    fail(kind::descriptor, "%s: descriptor start 0x%x is not in line 0 of a swizzle atom", what, d.start);
  return d;
}

// Address of the 16 bytes that begin with row or column `mn` and byte `byte` of its K step (K-major), or with k
// (MN-major).
inline uint32_t k_major_address(const Descriptor& d, int mn, int byte) {
  const uint32_t line = d.swizzle == 1 ? 128 : d.swizzle == 2 ? 64 : 32;
  if (!d.swizzle) return d.start + mn / 8 * d.stride + byte / 16 * d.leading + mn % 8 * 16;
  return swizzled(d.start + mn / 8 * d.stride + mn % 8 * line + byte, d.swizzle);
}
inline uint32_t mn_major_address(const Descriptor& d, int mn, int k) {
  const uint32_t line = d.swizzle == 1 ? 128 : d.swizzle == 2 ? 64 : 32, columns = line / 2;
  if (!d.swizzle) return d.start + mn / 8 * d.stride + k / 8 * d.leading + k % 8 * 16;
  return swizzled(d.start + mn / columns * d.leading + k / 8 * d.stride + k % 8 * line + mn % columns * 2, d.swizzle);
}

// Reads `count` rows or columns from `first` on, 32 bytes of K each; returns a hash of the bytes. out, where given: raw
// bytes with K innermost.
inline uint64_t read_operand(uint64_t descriptor, bool transposed, int first, int count, uint8_t* out,
                             const char* what) {
  const Descriptor d = parse_descriptor(descriptor, what);
  uint64_t hash = HASH_START;
  auto read = [&](uint32_t address, void* chunk) {
    async_read(address, chunk, 16, what);
    uint64_t words[2];
    memcpy(words, chunk, 16);
    hash = (hash ^ words[0]) * HASH_PRIME;
    hash = ((hash ^ words[1]) * HASH_PRIME) ^ hash >> 29;
  };
  uint8_t chunk[16];
  if (!transposed) {
    for (int r = 0; r < count; r++)
      for (int byte = 0; byte < 32; byte += 16) {
        read(k_major_address(d, first + r, byte), chunk);
        if (out) memcpy(out + r * 32 + byte, chunk, 16);
      }
    return hash;
  }
  for (int k = 0; k < 16; k++)
    for (int r = 0; r < count; r += 8) {
      read(mn_major_address(d, first + r, k), chunk);
      for (int i = 0; out && i < 8; i++) memcpy(out + (r + i) * 32 + 2 * k, chunk + 2 * i, 2);
    }
  return hash;
}

inline uint64_t hash_operands(const WgmmaOperation& op, int warp, uint8_t* a, uint8_t* b) {
  uint64_t hash = 0;
  if (!op.a_in_registers) hash = read_operand(op.a_descriptor, op.a_transposed, warp % 4 * 16, 16, a, "wgmma A");
  return hash * 31 + read_operand(op.b_descriptor, op.b_transposed, 0, op.n, b, "wgmma B");
}

// ---- registers
inline uint64_t hash_registers(const uint32_t* const* lane, int words) {
  uint64_t hash = HASH_START;
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < words; i++) hash = (hash ^ lane[l][i]) * HASH_PRIME;
  return hash;
}

// Where products after a wgmma.fence found registers, counted down from the thread's record: the same for all threads
// of a kernel. Kept for the module, as long as it is loaded.
struct RegisterPlace {
  const void* fence;
  ptrdiff_t below;
  int words;
};
inline List<RegisterPlace> register_places;
inline pthread_mutex_t register_places_lock = PTHREAD_MUTEX_INITIALIZER;

inline FencedRegisters* find_registers(WgmmaState& state, const uint32_t* const* lane, int words) {
  for (FencedRegisters& r : state.registers)
    if (r.words == words && !memcmp(r.lane, lane, sizeof r.lane)) return &r;
  return nullptr;
}

inline void learn_place(const RegisterPlace& place) {
  const Locked locked(*self().block, register_places_lock);
  bool known = false;
  for (const RegisterPlace& p : register_places)
    known |= p.fence == place.fence && p.below == place.below && p.words == place.words;
  if (!known) register_places.push(place);
}

// Registers that products after this fence read in another warp, block or launch: these will be read too.
inline void expect_registers(WgmmaState& state) {
  const Fiber& fiber = self();
  const Locked locked(*fiber.block, register_places_lock);
  for (const RegisterPlace& place : register_places) {
    if (place.fence != state.fence) continue;
    FencedRegisters r{};
    for (int l = 0; l < 32; l++)
      r.lane[l] = reinterpret_cast<const uint32_t*>(
          reinterpret_cast<const char*>(fiber.block->fiber[fiber.warp * 32 + l]) - place.below);
    r.words = place.words;
    if (!find_registers(state, r.lane, r.words)) state.registers.push(r);
  }
}

// Registers that wgmma reads must not change between the last wgmma.fence and the instruction.
inline void check_fenced(WgmmaState& state, const uint32_t* const* lane, int words, const char* what) {
  if (const FencedRegisters* r = find_registers(state, lane, words)) {
    if (hash_registers(lane, words) != r->hash)
      fail(kind::race, "wgmma: %s registers were written after the last wgmma.fence", what);
    return;
  }
  FencedRegisters r{};
  memcpy(r.lane, lane, sizeof r.lane);
  r.words = words;
  r.hash = hash_registers(lane, words);
  state.registers.push(r);
  const Fiber& fiber = self();
  const char* const record = reinterpret_cast<const char*>(fiber.block->fiber[fiber.warp * 32]);
  learn_place({state.fence, record - reinterpret_cast<const char*>(lane[0]), words});
}

inline Accumulator* find_accumulator(WgmmaState& state, const float* home) {
  for (Accumulator& a : state.accumulators)
    if (a.home == home) return &a;
  return nullptr;
}

inline int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
inline int accumulator_column(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

inline Accumulator& start_accumulator(WgmmaState& state, float* const* lane, int n) {
  Accumulator a{};
  a.home = lane[0];
  a.n = n;
  a.value = static_cast<float*>(malloc(sizeof(float) * 16 * n));
  memcpy(a.lane, lane, sizeof a.lane);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < n / 2; i++) {
      a.value[accumulator_row(l, i) * n + accumulator_column(l, i)] = lane[l][i];
      uint32_t poison = accumulator_poison(l, i);
      memcpy(&lane[l][i], &poison, 4);
    }
  return state.accumulators.push(a);
}

inline void finish_accumulator(const Accumulator& a) {
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < a.n / 2; i++) {
      uint32_t poison = accumulator_poison(l, i);
      if (memcmp(&a.lane[l][i], &poison, 4))
        fail(kind::race, "wgmma: accumulator register %d of lane %d was written while in flight (before wgmma_wait)", i,
             l);
      a.lane[l][i] = a.value[accumulator_row(l, i) * a.n + accumulator_column(l, i)];
    }
  free(a.value);
}

// ---- the product: 16 x n += 16 x k times (n x k) transposed
inline void multiply(Element e, const float* a, Element of_b, const uint8_t* b_bytes, int n, float* value,
                     bool accumulate) {
  const int k = 32 / element_bytes(e);
  float b[32 * 256], row[32];
  for (int j = 0; j < n; j++) {
    decode(of_b, b_bytes + 32 * j, k, row);
    for (int x = 0; x < k; x++) b[x * n + j] = row[x];
  }
  if (element_bytes(e) == 1) {
    if (!accumulate) memset(value, 0, sizeof(float) * 16 * n);
    int a_exponents[16 * 32], b_exponents[32 * 256];
    exponents_of(e, a, 16 * k, a_exponents);
    exponents_of(of_b, b, k * n, b_exponents);
    const Factors rows{a, a_exponents}, columns{b, b_exponents};
    for (int j = 0; j < n; j += 8)
      for (int i = 0; i < 16; i++) add_truncated<8>(rows.from(i * k), columns.from(j), n, k, value + i * n + j);
    return;
  }
  if (like_hardware()) {
    if (!accumulate) memset(value, 0, sizeof(float) * 16 * n);
    int a_exponents[16 * 16], b_exponents[16 * 256];
    exponents_of(e, a, 16 * k, a_exponents);
    exponents_of(of_b, b, k * n, b_exponents);
    const Factors rows{a, a_exponents}, columns{b, b_exponents};
    for (int j = 0; j < n; j += 8)
      for (int i = 0; i < 16; i++) add_cut_off<8>(rows.from(i * k), columns.from(j), n, k, 25, value + i * n + j);
    return;
  }
  for (int i = 0; i < 16; i++) {
    float sum[256] = {};
    for (int x = 0; x < k; x++) {
      const float factor = a[i * k + x];
      const float* line = b + x * n;
      for (int j = 0; j < n; j++) sum[j] += factor * line[j];
    }
    float* d = value + i * n;
    for (int j = 0; j < n; j++) d[j] = accumulate ? d[j] + sum[j] : sum[j];
  }
}

struct WgmmaArguments {
  float* d;
  const uint32_t* a;
  uint64_t a_descriptor, b_descriptor;
  int accumulate;
};

inline void check_uniform(Block& block, int warp, WgmmaArguments** lane, const WgmmaOperation& op) {
  for (int l = 1; l < 32; l++)
    if (lane[l]->b_descriptor != op.b_descriptor || (!op.a_in_registers && lane[l]->a_descriptor != op.a_descriptor) ||
        lane[l]->accumulate != lane[0]->accumulate)
      fail(kind::divergence, "wgmma: descriptors or the accumulate flag differ between lanes 0 and %d of the warp", l);
  List<WgmmaIssue>& issues = block.issues[warp / 4];
  const uint64_t number = block.warp[warp].wgmma.issued++;
  const uint64_t a = op.a_in_registers ? 0 : op.a_descriptor;
  if (number == issues.size) issues.push({a, op.b_descriptor, op.n});
  const WgmmaIssue& first = issues[uint32_t(number)];
  if (first.a_descriptor != a || first.b_descriptor != op.b_descriptor || first.n != op.n)
    fail(kind::divergence, "wgmma: the warps of the warpgroup give different operands");
}

__attribute__((noinline)) inline void issue_wgmma(WgmmaOperation op, WgmmaArguments** lane) {
  Block& block = *self().block;
  const int warp = self().warp, words = op.n / 2;
  WgmmaState& state = block.warp[warp].wgmma;
  const Element e = Element(op.element);
  op.a_descriptor = lane[0]->a_descriptor;
  op.b_descriptor = lane[0]->b_descriptor;
  op.accumulator = lane[0]->d;
  op.issued = self().statement;
  check_uniform(block, warp, lane, op);
  if (!state.fenced) fail(kind::race, "wgmma without wgmma_fence since the last wgmma_wait<0>");
  float* d[32];
  for (int l = 0; l < 32; l++) {
    d[l] = lane[l]->d;
    if (!op.a_in_registers) continue;
    op.a[l] = lane[l]->a;
    memcpy(op.a_value[l], lane[l]->a, 16);
  }
  alignas(16) uint8_t a_bytes[16 * 32], b_bytes[256 * 32];
  op.hash = hash_operands(op, warp, a_bytes, b_bytes);
  for (int l = 0; op.a_in_registers && l < 32; l++)
    place_a_fragment(op.a_value[l], l, reinterpret_cast<uint32_t*>(a_bytes));
  float a[16 * 32];
  decode(e, a_bytes, 16 * 32 / element_bytes(e), a);
  if (op.a_in_registers) check_fenced(state, op.a, 4, "A operand");
  Accumulator* accumulator = find_accumulator(state, op.accumulator);
  if (!accumulator && lane[0]->accumulate)
    check_fenced(state, reinterpret_cast<const uint32_t* const*>(d), words, "accumulator");
  if (!accumulator) accumulator = &start_accumulator(state, d, op.n);
  if (accumulator->n != op.n) fail(kind::race, "wgmma: an accumulator in flight is used with another shape");
  multiply(e, a, Element(op.b_element), b_bytes, op.n, accumulator->value, lane[0]->accumulate);
  accumulator->uses++;
  state.operations.push(op);
}

inline void retire_wgmma(WgmmaState& state, const WgmmaOperation& op) {
  blame(*self().block, -1, op.issued);
  if (hash_operands(op, self().warp, nullptr, nullptr) != op.hash)
    fail(kind::race,
         "wgmma: an operand in shared memory changed while in flight (before wgmma_wait): %s 0x%x",
         op.a_in_registers ? "B at shared address" : "A, or B at shared address",
         uint32_t(op.b_descriptor & 0x3FFF) << 4);
  for (int l = 0; op.a_in_registers && l < 32; l++)
    if (memcmp(op.a[l], op.a_value[l], 16))
      fail(kind::race, "wgmma: the A registers of lane %d changed while in flight (before wgmma_wait)", l);
  Accumulator& accumulator = *find_accumulator(state, op.accumulator);
  if (--accumulator.uses == 0) {
    finish_accumulator(accumulator);
    state.accumulators.erase(uint32_t(&accumulator - state.accumulators.items));
  }
  blame_running(*self().block);
}

inline WgmmaState& this_wgmma() { return self().block->warp[self().warp].wgmma; }

inline void fence_wgmma() {
  once_a_warp("wgmma.fence", [] {
    WgmmaState& state = this_wgmma();
    state.fenced = true;
    state.fence = self().statement;
    expect_registers(state);
    for (FencedRegisters& r : state.registers)
      if (!find_accumulator(state, reinterpret_cast<const float*>(r.lane[0]))) r.hash = hash_registers(r.lane, r.words);
  });
}

inline void commit_wgmma() {
  once_a_warp("wgmma.commit_group", [] {
    WgmmaState& state = this_wgmma();
    state.groups.push(state.operations.size - state.committed);
    state.committed = state.operations.size;
  });
}

inline void wait_for_wgmma(uint32_t pending_groups) {
  once_a_warp("wgmma.wait_group", [pending_groups] {
    WgmmaState& state = this_wgmma();
    while (state.groups.size > pending_groups) {
      const uint32_t count = state.groups[0];
      for (uint32_t i = 0; i < count; i++) retire_wgmma(state, state.operations[i]);
      state.operations.erase(0, count);
      state.committed -= count;
      state.groups.erase(0);
    }
    if (pending_groups == 0) state.fenced = false;
  });
}

inline void release_wgmma(WgmmaState& state) {
  for (Accumulator& a : state.accumulators) free(a.value);
  state.operations.release();
  state.groups.release();
  state.accumulators.release();
  state.registers.release();
}

}  // namespace emulation
