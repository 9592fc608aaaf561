// CUDA's built-in arithmetic functions and atomics. Approximate ones (__expf ...) are accurate here, unless
// Arithmetic::hardware makes them deviate: their last bits differ from a GPU's.
#pragma once

template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline void __stcs(T* p, T v) {
  *p = v;
}

// ---- bits
inline unsigned __float_as_uint(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return u;
}
inline int __float_as_int(float f) {
  int u;
  memcpy(&u, &f, 4);
  return u;
}
inline float __uint_as_float(unsigned u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float __int_as_float(int u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline long long __double_as_longlong(double d) {
  long long u;
  memcpy(&u, &d, 8);
  return u;
}
inline double __longlong_as_double(long long u) {
  double d;
  memcpy(&d, &u, 8);
  return d;
}
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    unsigned s = selector >> (4 * i) & 15u, byte = static_cast<unsigned>(bytes >> (8 * (s & 7u))) & 0xFFu;
    if (s & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
    r |= byte << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31u));
}

// ---- integers
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
#define EMULATED_MIN_MAX(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(unsigned long)
EMULATED_MIN_MAX(long long)
EMULATED_MIN_MAX(unsigned long long)
#undef EMULATED_MIN_MAX
inline unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
inline unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ---- floats
// A number that the compiler knows nothing about, so that these additions and products are never fused with others,
// whatever -ffp-contract says.
inline float opaque(float a) {
  __asm__("" : "+m"(a));
  return a;
}
inline float __fadd_rn(float a, float b) { return opaque(a) + opaque(b); }
inline float __fsub_rn(float a, float b) { return opaque(a) - opaque(b); }
inline float __fmul_rn(float a, float b) { return opaque(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) { return static_cast<int>(rintf(a)); }
inline int __float2int_rz(float a) { return static_cast<int>(a); }
inline int __float2int_rd(float a) { return static_cast<int>(floorf(a)); }
inline int __float2int_ru(float a) { return static_cast<int>(ceilf(a)); }
inline unsigned __float2uint_rn(float a) { return static_cast<unsigned>(rintf(a)); }

// ---- functions that CUDA's library approximates. The largest errors of those with a plain name, in ulp from the correctly
// rounded result, are those of the CUDA C++ Programming Guide 12.6, mathematical functions, table 13.
#define EMULATED_FUNCTION(name, host, ulps, number)                                                     \
  inline float emulated_##name(float a) {                                                               \
    if (!emulation::like_hardware()) return host##f(a);                                                 \
    return emulation::within_ulps(host(static_cast<double>(a)), ulps, a, emulation::number);            \
  }
EMULATED_FUNCTION(expf, exp, 2, exp_)
EMULATED_FUNCTION(exp2f, exp2, 2, exp2_)
EMULATED_FUNCTION(logf, log, 1, log_)
EMULATED_FUNCTION(log2f, log2, 1, log2_)
EMULATED_FUNCTION(tanhf, tanh, 2, tanh_)
EMULATED_FUNCTION(sinf, sin, 2, sin_)
EMULATED_FUNCTION(cosf, cos, 2, cos_)
EMULATED_FUNCTION(erff, erf, 2, erf_)
#undef EMULATED_FUNCTION
inline float emulated_sinpif(float a) {
  return emulation::within_ulps(sin(3.14159265358979323846 * a), 1, a, emulation::sinpi_);
}
inline float emulated_cospif(float a) {
  return emulation::within_ulps(cos(3.14159265358979323846 * a), 1, a, emulation::cospi_);
}
inline float rsqrtf(float a) {
  if (!emulation::like_hardware()) return 1.0f / sqrtf(a);
  return emulation::within_ulps(1.0 / sqrt(static_cast<double>(a)), 2, a, emulation::rsqrt_);
}

// Those with underscores: the guide's table of intrinsic functions. Where it says no more than that errors grow, outside
// [-pi, pi], sine and cosine have the bounds of PTX ISA 9.7.3.18 and 9.7.3.19; beyond 100 pi there is none.
namespace emulation {

constexpr double PI = 3.14159265358979323846;

inline float fast_angle(double exact, float angle, double near_zero, uint32_t function) {
  const double size = fabs(static_cast<double>(angle));
  return within(exact, size <= PI ? near_zero : size <= 2 * PI ? 0x1.6ap-21 : 0x1.3ap-15, angle, function);
}
inline float fast_logarithm(double exact, float a, double near_one, int ulps, uint32_t function) {
  return a >= 0.5f && a <= 2.0f ? within(exact, near_one, a, function) : within_ulps(exact, ulps, a, function);
}
inline float fast_power(double exact, float a, double growth, uint32_t function) {
  return within_ulps(exact, 2 + static_cast<int>(fmin(fabs(growth * a), 1000.0)), a, function);
}

}  // namespace emulation
inline float __expf(float a) { return emulation::fast_power(exp(static_cast<double>(a)), a, 1.173, emulation::exp_); }
inline float __exp10f(float a) { return emulation::fast_power(pow(10.0, a), a, 2.97, emulation::exp10_); }
inline float __logf(float a) {
  return emulation::fast_logarithm(log(static_cast<double>(a)), a, 0x1.81p-22, 3, emulation::log_);
}
inline float __log2f(float a) {
  return emulation::fast_logarithm(log2(static_cast<double>(a)), a, 0x1p-22, 2, emulation::log2_);
}
inline float __powf(float a, float b) { return emulated_exp2f(b * __log2f(a)); }
inline float __fdividef(float a, float b) {
  if (fabsf(b) > 0x1p126f && fabsf(b) < INFINITY) return a * 0.0f;
  return emulation::within_ulps(static_cast<double>(a) / b, 2, a / b, emulation::divide_);
}
inline float __sinf(float a) {
  return emulation::fast_angle(sin(static_cast<double>(a)), a, 0x1.81p-22, emulation::sin_);
}
inline float __cosf(float a) {
  return emulation::fast_angle(cos(static_cast<double>(a)), a, 0x1.cp-22, emulation::cos_);
}
inline float __tanhf(float a) {
  const double exact = tanh(static_cast<double>(a));
  return emulation::within(exact, fabs(exact) * 0x1p-11, a, emulation::tanh_);
}
#define expf emulated_expf
#define exp2f emulated_exp2f
#define logf emulated_logf
#define log2f emulated_log2f
#define tanhf emulated_tanhf
#define sinf emulated_sinf
#define cosf emulated_cosf
#define erff emulated_erff
#define sinpif emulated_sinpif
#define cospif emulated_cospif

// ---- atomics: real ones, since blocks run on several processors
namespace emulation {

template <size_t BYTES>
struct BitsOf;
template <>
struct BitsOf<2> {
  typedef uint16_t type;
};
template <>
struct BitsOf<4> {
  typedef uint32_t type;
};
template <>
struct BitsOf<8> {
  typedef uint64_t type;
};

inline void note_change(bool is_over, const int* at) { note_atomic(at, is_over); }
inline void note_change(bool is_over, const unsigned* at) { note_atomic(at, is_over); }
inline void note_change(bool, ...) {}

template <class T, class Update>
inline T update_atomically(T* at, Update&& update) {
  note_change(false, at);
  typedef typename BitsOf<sizeof(T)>::type Bits;
  Bits* bits = reinterpret_cast<Bits*>(at);
  Bits seen = __atomic_load_n(bits, __ATOMIC_SEQ_CST);
  for (;;) {
    T old, next;
    memcpy(&old, &seen, sizeof old);
    next = update(old);
    Bits wanted;
    memcpy(&wanted, &next, sizeof wanted);
    if (!__atomic_compare_exchange_n(bits, &seen, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    note_change(true, at);
    return old;
  }
}

// Keeps the second argument out of template deduction: atomicAdd(unsigned*, int) converts, as in CUDA.
template <class T>
struct Same {
  typedef T type;
};

}  // namespace emulation

#define EMULATED_ATOMIC(name, expression)                                                \
  template <class T>                                                                     \
  inline T name(T* at, typename emulation::Same<T>::type value) {                        \
    return emulation::update_atomically(at, [value](T old) -> T { return expression; }); \
  }
EMULATED_ATOMIC(atomicAdd, old + value)
EMULATED_ATOMIC(atomicSub, old - value)
EMULATED_ATOMIC(atomicExch, (static_cast<void>(old), value))
EMULATED_ATOMIC(atomicMax, old < value ? value : old)
EMULATED_ATOMIC(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicAnd, old& value)
EMULATED_ATOMIC(atomicOr, old | value)
EMULATED_ATOMIC(atomicXor, old ^ value)
EMULATED_ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
EMULATED_ATOMIC(atomicDec, old == 0 || old > value ? value : T(old - 1))
#undef EMULATED_ATOMIC
template <class T>
inline T atomicCAS(T* at, typename emulation::Same<T>::type expected, typename emulation::Same<T>::type value) {
  return emulation::update_atomically(at, [expected, value](T old) { return old == expected ? value : old; });
}
