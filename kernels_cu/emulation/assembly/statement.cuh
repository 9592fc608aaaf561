// One inline-asm statement of a kernel as the build captured it, and the addresses of its operands when it runs.
#pragma once

#include "emulation/core.cuh"

namespace emulation {

struct Program;

// constraints: of the outputs and then the inputs, as written, with a comma between. clobbers: the same. program: what
// the template means, from its first execution on.
struct Statement {
  const char* text;
  const char* constraints;
  const char* clobbers;
  bool is_volatile;
  const char* file;
  int line;
  Program* program;
};

// In the executor. The program of a statement, or null and what is wrong with it in `error`, which has `room` bytes.
Program* read_statement(const Statement& statement, char* error, size_t room);
void execute(Statement& statement, const void* const* operands);

template <int N>
struct Operands {
  const void* at[N];
};

template <class T>
struct Unqualified {
  typedef T type;
};
template <class T>
struct Unqualified<const T> {
  typedef T type;
};

// A constraint names a class of registers, and its operand is a value of that class: "h", "r" and "l" take integers of
// 16, 32 and 64 bits ("l" a pointer too), "f" and "d" a float and a double.
template <class T>
struct RegisterClass {
  static constexpr char letter = '?';
};
#define EMULATED_REGISTER_CLASS(T, constraint)  \
  template <>                                   \
  struct RegisterClass<T> {                     \
    static constexpr char letter = constraint; \
  };
EMULATED_REGISTER_CLASS(short, 'h')
EMULATED_REGISTER_CLASS(unsigned short, 'h')
EMULATED_REGISTER_CLASS(int, 'r')
EMULATED_REGISTER_CLASS(unsigned, 'r')
EMULATED_REGISTER_CLASS(long, 'l')
EMULATED_REGISTER_CLASS(unsigned long, 'l')
EMULATED_REGISTER_CLASS(long long, 'l')
EMULATED_REGISTER_CLASS(unsigned long long, 'l')
EMULATED_REGISTER_CLASS(float, 'f')
EMULATED_REGISTER_CLASS(double, 'd')
#undef EMULATED_REGISTER_CLASS
template <class T>
struct RegisterClass<T*> {
  static constexpr char letter = 'l';
};

template <char CONSTRAINT, class T>
constexpr void check_constraint() {
  static_assert(RegisterClass<typename Unqualified<T>::type>::letter == CONSTRAINT,
                "the constraint of an asm operand names registers of another size or kind than its type");
}

template <char CONSTRAINT, class T>
__attribute__((always_inline)) inline const void* output(T& variable) {
  check_constraint<CONSTRAINT, T>();
  return &variable;
}
// Also of a temporary, which lives as long as the statement runs.
template <char CONSTRAINT, class T>
__attribute__((always_inline)) inline const void* input(const T& value) {
  check_constraint<CONSTRAINT, T>();
  return &value;
}
template <auto VALUE>
struct Immediate {
  static constexpr int64_t value = static_cast<int64_t>(VALUE);
};
template <auto VALUE>
__attribute__((always_inline)) inline const void* immediate() {
  return &Immediate<VALUE>::value;
}

}  // namespace emulation
