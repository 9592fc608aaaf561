// C++'s overloads of C's mathematical functions, as CUDA C++ has them: exp(float) is a float, exp(int) a double, and
// abs() takes every number. The C++ library's own headers are left out (-nostdinc++): they are most of a small
// kernel's compile.
#pragma once

#include <math.h>
#include <stddef.h>

// The part of C's library that CUDA C++ has, declared here because its headers take long to parse.
#ifdef __THROW
#define EMULATED_C __THROW
#else
#define EMULATED_C
#endif
extern "C" {
int abs(int) EMULATED_C;
long labs(long) EMULATED_C;
long long llabs(long long) EMULATED_C;
void* memcpy(void*, const void*, size_t) EMULATED_C;
void* memmove(void*, const void*, size_t) EMULATED_C;
void* memset(void*, int, size_t) EMULATED_C;
int memcmp(const void*, const void*, size_t) EMULATED_C;
size_t strlen(const char*) EMULATED_C;
void* malloc(size_t) EMULATED_C;
void free(void*) EMULATED_C;
long clock() EMULATED_C;
int printf(const char*, ...);
}
#undef EMULATED_C

#ifndef _GNU_SOURCE  // which declares what CUDA C++ has beyond the standard, and much else
extern "C" {
void sincos(double, double*, double*);
void sincosf(float, float*, float*);
double exp10(double);
float exp10f(float);
}
#endif

// Programs that do read the C++ library's headers have its overloads.
#if !defined(_GLIBCXX_MATH_H) && !defined(_LIBCPP_MATH_H)

namespace emulation {

template <class T>
struct Number {};  // double for the types that C++ computes in double where it has no better overload
#define EMULATED_NUMBER(T)  \
  template <>               \
  struct Number<T> {        \
    typedef double promoted; \
  };
EMULATED_NUMBER(bool)
EMULATED_NUMBER(char)
EMULATED_NUMBER(signed char)
EMULATED_NUMBER(unsigned char)
EMULATED_NUMBER(short)
EMULATED_NUMBER(unsigned short)
EMULATED_NUMBER(int)
EMULATED_NUMBER(unsigned)
EMULATED_NUMBER(long)
EMULATED_NUMBER(unsigned long)
EMULATED_NUMBER(long long)
EMULATED_NUMBER(unsigned long long)
EMULATED_NUMBER(float)
EMULATED_NUMBER(double)
#undef EMULATED_NUMBER

template <class T>
using Promoted = typename Number<T>::promoted;

}  // namespace emulation

#define EMULATED_UNARY(name)                                         \
  inline float name(float x) { return __builtin_##name##f(x); }      \
  template <class T>                                                 \
  inline emulation::Promoted<T> name(T x) {                          \
    return __builtin_##name(static_cast<emulation::Promoted<T>>(x)); \
  }
EMULATED_UNARY(acos)
EMULATED_UNARY(acosh)
EMULATED_UNARY(asin)
EMULATED_UNARY(asinh)
EMULATED_UNARY(atan)
EMULATED_UNARY(atanh)
EMULATED_UNARY(cbrt)
EMULATED_UNARY(ceil)
EMULATED_UNARY(cos)
EMULATED_UNARY(cosh)
EMULATED_UNARY(erf)
EMULATED_UNARY(erfc)
EMULATED_UNARY(exp)
EMULATED_UNARY(exp2)
EMULATED_UNARY(expm1)
EMULATED_UNARY(fabs)
EMULATED_UNARY(floor)
EMULATED_UNARY(lgamma)
EMULATED_UNARY(log)
EMULATED_UNARY(log10)
EMULATED_UNARY(log1p)
EMULATED_UNARY(log2)
EMULATED_UNARY(logb)
EMULATED_UNARY(nearbyint)
EMULATED_UNARY(rint)
EMULATED_UNARY(round)
EMULATED_UNARY(sin)
EMULATED_UNARY(sinh)
EMULATED_UNARY(sqrt)
EMULATED_UNARY(tan)
EMULATED_UNARY(tanh)
EMULATED_UNARY(tgamma)
EMULATED_UNARY(trunc)
#undef EMULATED_UNARY

#define EMULATED_COUNTING(R, name)                                   \
  inline R name(float x) { return __builtin_##name##f(x); }          \
  template <class T, class = emulation::Promoted<T>>                 \
  inline R name(T x) {                                               \
    return __builtin_##name(static_cast<emulation::Promoted<T>>(x)); \
  }
EMULATED_COUNTING(int, ilogb)
EMULATED_COUNTING(long, lrint)
EMULATED_COUNTING(long, lround)
EMULATED_COUNTING(long long, llrint)
EMULATED_COUNTING(long long, llround)
#undef EMULATED_COUNTING

#define EMULATED_BINARY(name)                                                \
  inline float name(float x, float y) { return __builtin_##name##f(x, y); }  \
  template <class T, class U, class = emulation::Promoted<U>>                \
  inline emulation::Promoted<T> name(T x, U y) {                             \
    return __builtin_##name(static_cast<double>(x), static_cast<double>(y)); \
  }
EMULATED_BINARY(atan2)
EMULATED_BINARY(copysign)
EMULATED_BINARY(fdim)
EMULATED_BINARY(fmax)
EMULATED_BINARY(fmin)
EMULATED_BINARY(fmod)
EMULATED_BINARY(hypot)
EMULATED_BINARY(nextafter)
EMULATED_BINARY(pow)
EMULATED_BINARY(remainder)
#undef EMULATED_BINARY

inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
template <class T, class U, class V, class = emulation::Promoted<U>, class = emulation::Promoted<V>>
inline emulation::Promoted<T> fma(T x, U y, V z) {
  return __builtin_fma(static_cast<double>(x), static_cast<double>(y), static_cast<double>(z));
}
inline float frexp(float x, int* exponent) { return __builtin_frexpf(x, exponent); }
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }
inline float scalbn(float x, int exponent) { return __builtin_scalbnf(x, exponent); }
inline float scalbln(float x, long exponent) { return __builtin_scalblnf(x, exponent); }
inline float modf(float x, float* whole) { return __builtin_modff(x, whole); }
inline float remquo(float x, float y, int* quotient) { return __builtin_remquof(x, y, quotient); }

inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline long abs(long x) { return __builtin_labs(x); }
inline long long abs(long long x) { return __builtin_llabs(x); }

// C has macros of these names.
#undef isfinite
#undef isinf
#undef isnan
#undef isnormal
#undef signbit
#define EMULATED_CLASSIFYING(name, builtin)                          \
  inline bool name(float x) { return builtin(x); }                   \
  inline bool name(double x) { return builtin(x); }                  \
  template <class T, class = emulation::Promoted<T>>                 \
  inline bool name(T x) {                                            \
    return builtin(static_cast<double>(x));                          \
  }
EMULATED_CLASSIFYING(isfinite, __builtin_isfinite)
EMULATED_CLASSIFYING(isinf, __builtin_isinf)
EMULATED_CLASSIFYING(isnan, __builtin_isnan)
EMULATED_CLASSIFYING(isnormal, __builtin_isnormal)
EMULATED_CLASSIFYING(signbit, __builtin_signbit)
#undef EMULATED_CLASSIFYING

#endif
