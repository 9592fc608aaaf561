// Conversions, arithmetic, comparisons and moves in registers (PTX ISA 9.7.3 to 9.7.9): their readers and meanings.
#pragma once

#include "emulation/approximation.cuh"
#include "emulation/assembly/parser.cuh"
#include "emulation/bulk.cuh"
#include "emulation/formats.cuh"
#include "emulation/shared_memory.cuh"

namespace emulation {

constexpr int FLUSHES = 1;  // .ftz

// ---- .approx{.ftz}.f32, with the largest errors of PTX ISA 9.7.3: rcp (9.7.3.13) 1 ulp; lg2 (9.7.3.20) 2^-22, absolute
// between 0.5 and 2 and relative elsewhere; ex2 (9.7.3.21) 2 ulp from the correctly rounded result.
inline float power_of_two(float x) {
  if (x == 0.0f) return 1.0f;
  if (!like_hardware()) return exp2f(x);
  return within_ulps(exp2(static_cast<double>(x)), 2, x, ex2_);
}
inline float binary_logarithm(float x) {
  if (!like_hardware()) return log2f(x);
  const double exact = log2(static_cast<double>(x));
  return within(exact, 0x1p-22 * (x > 0.5f && x < 2.0f ? 1.0 : fabs(exact)), x, lg2_);
}
inline float reciprocal(float x) {
  if (!like_hardware()) return 1.0f / x;
  return within_ulps(1.0 / static_cast<double>(x), 1, x, rcp_);
}

template <float (*FUNCTION)(float)>
inline void approximate(const Instruction& i, Frame& f) {
  const float x = value_of<float>(f, i.slots[1]);
  set_value(f, i.slots[0], i.flags & FLUSHES ? flushed(FUNCTION(flushed(x))) : FUNCTION(x));
}
template <float (*FUNCTION)(float)>
inline void read_approximate(Parser& p) {
  p.need("approx");
  const int flags = p.is("ftz") ? FLUSHES : 0;
  p.need("f32");
  p.writes(F32, "result");
  p.reads(F32, "operand");
  p.means(approximate<FUNCTION>, "approximate function", 0, flags);
}

// ---- two 16-bit floats in a word: mul.rn{.ftz}.f16x2, fma.rn.bf16x2 (9.7.4)
inline float f16_operand(uint32_t bits, bool flush) {
  return flush && !(bits & 0x7C00) ? copysignf(0.0f, from_f16(bits)) : from_f16(bits & 0xFFFF);
}
inline void multiply_halves(const Instruction& i, Frame& f) {
  const uint32_t a = value_of<uint32_t>(f, i.slots[1]), b = value_of<uint32_t>(f, i.slots[2]);
  const bool flush = i.flags & FLUSHES;
  uint32_t result = 0;
  for (int part = 0; part < 32; part += 16) {
    const float x = f16_operand(a >> part & 0xFFFF, flush), y = f16_operand(b >> part & 0xFFFF, flush);
    uint32_t product = to_f16(x * y);
    if (flush && !(product & 0x7C00)) product &= 0x8000;
    result |= product << part;
  }
  set_value(f, i.slots[0], result);
}
inline void read_mul(Parser& p) {
  p.need("rn");
  const int flags = p.is("ftz") ? FLUSHES : 0;
  p.need("f16x2");
  p.writes(B32, "product");
  p.reads(B32, "factor");
  p.reads(B32, "factor");
  p.means(multiply_halves, "mul.f16x2", 0, flags);
}

// The last bit says whether something was cut off, so that a second rounding to fewer bits gives the same as one.
inline double sum_to_odd(double a, double b) {
  const double sum = a + b, part = sum - a, lost = (a - (sum - part)) + (b - part);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  if (lost == 0.0 || lost != lost || bits & 1) return sum;
  bits += (lost > 0.0) == (sum > 0.0) ? 1 : -1;
  double odd;
  memcpy(&odd, &bits, 8);
  return odd;
}
inline float float_to_odd(double value) {
  const float nearest = static_cast<float>(value);
  if (value != value || static_cast<double>(nearest) == value || fabsf(nearest) > 0x1.fffffep127f) return nearest;
  uint32_t bits = __float_as_uint(nearest);
  if (!(bits & 1)) bits += fabs(value) > fabs(static_cast<double>(nearest)) ? 1 : -1;
  return __uint_as_float(bits);
}
inline void fma_bfloat16s(const Instruction& i, Frame& f) {
  uint32_t word[3], result = 0;
  for (int o = 0; o < 3; o++) word[o] = value_of<uint32_t>(f, i.slots[1 + o]);
  for (int part = 0; part < 32; part += 16) {
    double x[3];
    for (int o = 0; o < 3; o++) x[o] = from_bf16(word[o] >> part & 0xFFFF);
    result |= uint32_t(to_bf16(float_to_odd(sum_to_odd(x[0] * x[1], x[2])))) << part;
  }
  set_value(f, i.slots[0], result);
}
inline void read_fma(Parser& p) {
  p.need("rn");
  p.need("bf16x2");
  p.writes(B32, "result");
  p.reads(B32, "factor");
  p.reads(B32, "factor");
  p.reads(B32, "summand");
  p.means(fma_bfloat16s, "fma.bf16x2");
}

// ---- cvt (9.7.9): narrowing rounds to nearest even; of a pair, the first source becomes the upper half
inline void widen_half(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], from_f16(value_of<uint16_t>(f, i.slots[1])));
}
inline void narrow_half(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], to_f16(value_of<float>(f, i.slots[1])));
}
template <class Narrow, Narrow (*NARROW)(float), class Word>
inline void narrow_pair(const Instruction& i, Frame& f) {
  const Word high = NARROW(value_of<float>(f, i.slots[1])), low = NARROW(value_of<float>(f, i.slots[2]));
  set_value(f, i.slots[0], static_cast<Word>(high << 8 * sizeof(Narrow) | low));
}
inline void truncate_word(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], static_cast<uint32_t>(value_of<uint64_t>(f, i.slots[1])));
}
inline void read_cvt(Parser& p) {
  if (p.is("u32")) {
    p.need("u64");
    p.writes(U32, "result");
    p.reads(U64, "source");
    return p.means(truncate_word, "cvt.u32.u64");
  }
  if (p.is("f32")) {
    p.need("f16");
    p.writes(F32, "result");
    p.reads(B16, "source");
    return p.means(widen_half, "cvt.f32.f16");
  }
  p.need("rn");
  const bool saturates = p.is("satfinite");
  const char* const eights[] = {"e4m3x2"};
  const char* const halves[] = {"f16", "f16x2", "bf16x2"};
  const int kind = saturates ? 3 + p.choose(eights) : p.choose(halves);
  p.need("f32");
  p.writes(kind == 0 || kind == 3 ? B16 : B32, "result");
  p.reads(F32, "source");
  if (kind) p.reads(F32, "second source");
  constexpr Meaning meanings[] = {narrow_half, narrow_pair<uint16_t, to_f16, uint32_t>,
                                  narrow_pair<uint16_t, to_bf16, uint32_t>, narrow_pair<uint8_t, to_e4m3, uint16_t>};
  p.means(meanings[kind], "cvt");
}

// ---- cvta.to.shared.u64 (9.7.9.20): a generic address becomes the 32-bit one of the shared window
inline void to_shared_address(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], uint64_t(shared_address_of(value_of<const void*>(f, i.slots[1]))));
}
inline void read_cvta(Parser& p) {
  p.need("to");
  p.need("shared");
  p.need("u64");
  p.writes(U64, "result");
  p.reads(U64, "address");
  p.means(to_shared_address, "cvta.to.shared");
}

// ---- mov.b32 d, {low, high} (9.7.9.2)
inline void pack_halves(const Instruction& i, Frame& f) {
  const uint32_t low = value_of<uint16_t>(f, i.slots[1]), high = value_of<uint16_t>(f, i.slots[2]);
  set_value(f, i.slots[0], high << 16 | low);
}
inline void read_mov(Parser& p) {
  p.need("b32");
  p.writes(B32, "result");
  p.reads_list(2, B16, "halves");
  p.means(pack_halves, "mov.b32");
}

// ---- setp, selp (9.7.7), bra (9.7.12)
inline void compare_words(const Instruction& i, Frame& f) {
  const bool equal = value_of<uint32_t>(f, i.slots[1]) == value_of<uint32_t>(f, i.slots[2]);
  set_value(f, i.slots[0], static_cast<uint8_t>(equal == (i.number == 0)));
}
inline void read_setp(Parser& p) {
  const char* const comparisons[] = {"eq", "ne"};
  const int comparison = p.choose(comparisons);
  p.need_type(" b32 u32 s32 ");
  p.writes(PREDICATE, "result");
  p.reads(U32, "operand");
  p.reads(U32, "operand");
  p.means(compare_words, "setp", comparison);
}
inline void select_word(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], value_of<uint32_t>(f, i.slots[predicate(f, i.slots[3]) ? 1 : 2]));
}
inline void read_selp(Parser& p) {
  p.need_type(" b32 u32 s32 ");
  p.writes(U32, "result");
  p.reads(U32, "first value");
  p.reads(U32, "second value");
  p.reads(PREDICATE, "predicate");
  p.means(select_word, "selp");
}
inline void branch(const Instruction& i, Frame& f) {
  if (i.number < f.next) poll();  // a loop may wait for what others do
  f.next = i.number;
}
inline void read_bra(Parser& p) {
  p.branches_to();
  p.means(branch, "bra");
}

}  // namespace emulation
