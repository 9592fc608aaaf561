// Matrix instructions of a warp and of a warpgroup (PTX ISA 9.7.14, 9.7.15): their readers and meanings.
#pragma once

#include "emulation/assembly/parser.cuh"
#include "emulation/matrix.cuh"
#include "emulation/mma.cuh"
#include "emulation/wgmma.cuh"

namespace emulation {

constexpr int TRANSPOSES = 1;

// The registers of a list as one array, if they lie one after another in memory, else null.
inline void* array_of(const Frame& f, const Slot* slot, int count) {
  if (slot[0].kind != Slot::operand) return nullptr;
  const char* first = static_cast<const char*>(f.operand[slot[0].index]);
  for (int s = 1; s < count; s++)
    if (slot[s].kind != Slot::operand || f.operand[slot[s].index] != first + 4 * s) return nullptr;
  return const_cast<char*>(first);
}

// ---- ldmatrix, stmatrix: .sync.aligned.m8n8.x1|x2|x4{.trans}.shared.b16; number: how many matrices
inline void load_matrix(const Instruction& i, Frame& f) {
  uint32_t copy[4];
  uint32_t* const registers = static_cast<uint32_t*>(array_of(f, i.slots.items, i.number));
  uint32_t* const word = registers ? registers : copy;
  load_matrices(i.name, word, i.number, value_of<uint32_t>(f, i.slots[i.number]), i.flags & TRANSPOSES);
  for (int m = 0; !registers && m < i.number; m++) set_value(f, i.slots[m], word[m]);
}
inline void store_matrix(const Instruction& i, Frame& f) {
  uint32_t word[4];
  for (int m = 0; m < i.number; m++) word[m] = value_of<uint32_t>(f, i.slots[1 + m]);
  store_matrices(i.name, word, i.number, value_of<uint32_t>(f, i.slots[0]), i.flags & TRANSPOSES);
}
inline void read_matrix_access(Parser& p, bool store) {
  static const char* const names[2][3][2] = {{{"ldmatrix.x1", "ldmatrix.x1.trans"},
                                              {"ldmatrix.x2", "ldmatrix.x2.trans"},
                                              {"ldmatrix.x4", "ldmatrix.x4.trans"}},
                                             {{"stmatrix.x1", "stmatrix.x1.trans"},
                                              {"stmatrix.x2", "stmatrix.x2.trans"},
                                              {"stmatrix.x4", "stmatrix.x4.trans"}}};
  p.need("sync");
  p.need("aligned");
  p.need("m8n8");
  const char* const counts[] = {"x1", "x2", "x4"};
  const int size = p.choose(counts), count = 1 << size;
  const int flags = p.is("trans") ? TRANSPOSES : 0;
  p.need("shared");
  p.need("b16");
  if (store) p.address(32, "row");
  if (store) p.reads_list(count, B32, "matrices");
  else p.writes_list(count, B32, "matrices");
  if (!store) p.address(32, "row");
  p.touches_memory();
  p.means(store ? store_matrix : load_matrix, names[store][size][flags], count, flags);
}
inline void read_ldmatrix(Parser& p) { read_matrix_access(p, false); }
inline void read_stmatrix(Parser& p) { read_matrix_access(p, true); }

// ---- movmatrix.sync.aligned.m8n8.trans.b16
inline void move_matrix(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], transpose_matrix(value_of<uint32_t>(f, i.slots[1])));
}
inline void read_movmatrix(Parser& p) {
  p.needs("sync", "aligned", "m8n8", "trans", "b16");
  p.writes(B32, "result");
  p.reads(B32, "matrix");
  p.has_effect();
  p.means(move_matrix, "movmatrix.trans");
}

// ---- mma.sync.aligned.shape.row.col.f32.type.type.f32 d, a, b, c; number: the element
constexpr int IN_PLACE = 1;  // c is d

inline void multiply_warp(const Instruction& i, Frame& f) {
  float* const registers = i.flags & IN_PLACE ? static_cast<float*>(array_of(f, i.slots.items, 4)) : nullptr;
  const uint32_t* const factors = static_cast<const uint32_t*>(array_of(f, i.slots.items + 4, 4));
  if (registers && factors)
    return mma(i.name, Element(i.number), registers, factors, value_of<uint32_t>(f, i.slots[8]),
               value_of<uint32_t>(f, i.slots[9]));
  float d[4];
  uint32_t a[4], b[2];
  for (int s = 0; s < 4; s++) a[s] = value_of<uint32_t>(f, i.slots[4 + s]);
  for (int s = 0; s < 2; s++) b[s] = value_of<uint32_t>(f, i.slots[8 + s]);
  for (int s = 0; s < 4; s++) d[s] = value_of<float>(f, i.slots[10 + s]);
  mma(i.name, Element(i.number), d, a, b[0], b[1]);
  for (int s = 0; s < 4; s++) set_value(f, i.slots[s], d[s]);
}
inline void read_mma(Parser& p) {
  struct Kind {
    const char* shape;
    const char* type;
    Element element;
    const char* name;
  };
  static const Kind kinds[] = {{"m16n8k16", "f16", Element::f16, "mma.m16n8k16"},
                               {"m16n8k16", "bf16", Element::bf16, "mma.m16n8k16"},
                               {"m16n8k8", "tf32", Element::tf32, "mma.m16n8k8"},
                               {"m16n8k32", "e4m3", Element::e4m3, "mma.m16n8k32"},
                               {"m16n8k32", "e5m2", Element::e5m2, "mma.m16n8k32"}};
  p.need("sync");
  p.need("aligned");
  const char* const shapes[] = {"m16n8k16", "m16n8k8", "m16n8k32"};
  const char* shape = shapes[p.choose(shapes)];
  p.need("row");
  p.need("col");
  p.need("f32");
  const Kind* kind = nullptr;
  for (const Kind& k : kinds)
    if (!kind && !strcmp(k.shape, shape) && p.is(k.type)) kind = &k;
  if (!kind) p.refuse("%s: '%s' is not known where the type of A stands", p.opcode, p.modifier);
  p.need(kind->type);
  p.need("f32");
  p.writes_list(4, F32, "result");
  p.reads_list(4, B32, "A registers");
  p.reads_list(2, B32, "B registers");
  p.reads_list(4, F32, "accumulator");
  p.has_effect();
  bool in_place = true;
  for (int s = 0; s < 4; s++) {
    const Slot &d = p.instruction->slots[s], &c = p.instruction->slots[10 + s];
    in_place &= d.kind == Slot::operand && c.kind == Slot::operand && d.index == c.index;
  }
  p.means(multiply_warp, kind->name, int(kind->element), in_place ? IN_PLACE : 0);
}

// ---- wgmma.mma_async.sync.aligned.m64nNkK.f32.type.type d, a, b, scale-d, 1, 1 {, transpositions} (9.7.15.5.2)
// The types are those of A and of B, which may differ among the 8-bit floats.
// number: N. The slots: N / 2 accumulators, A (4 registers or a descriptor), B's descriptor, scale-d, and constants.
constexpr int A_IN_REGISTERS = 1, TAKES_TRANSPOSITIONS = 2, ELEMENT_SHIFT = 4, B_ELEMENT_SHIFT = 8;

inline void* needed_array_of(const Frame& f, const Slot* slot, int count, const char* what) {
  void* const array = array_of(f, slot, count);
  if (!array) fail(kind::assembly, "wgmma: the registers of the %s are not those of an array in its order", what);
  return array;
}

inline void multiply_warpgroup(const Instruction& i, Frame& f) {
  const bool in_registers = i.flags & A_IN_REGISTERS;
  const Slot* a = i.slots.items + i.number / 2;
  const Slot* b = a + (in_registers ? 4 : 1);
  WgmmaOperation op{};
  op.n = i.number;
  op.element = i.flags >> ELEMENT_SHIFT & 15;
  op.b_element = i.flags >> B_ELEMENT_SHIFT;
  op.a_in_registers = in_registers;
  if (i.flags & TAKES_TRANSPOSITIONS) {
    op.a_transposed = !in_registers && value_of<int>(f, b[4]);
    op.b_transposed = value_of<int>(f, b[in_registers ? 4 : 5]) != 0;
  }
  WgmmaArguments mine{};
  mine.d = static_cast<float*>(needed_array_of(f, i.slots.items, i.number / 2, "accumulator"));
  if (in_registers) mine.a = static_cast<const uint32_t*>(needed_array_of(f, a, 4, "A operand"));
  else mine.a_descriptor = value_of<uint64_t>(f, a[0]);
  mine.b_descriptor = value_of<uint64_t>(f, b[0]);
  mine.accumulate = predicate(f, b[1]);
  collective(i.name, ~0u, mine, [&op](WgmmaArguments** lane) { issue_wgmma(op, lane); });
}

inline void read_wgmma_mma(Parser& p) {
  struct Kind {
    const char* type;
    const char* k;
    Element element;
  };
  static const Kind kinds[] = {{"f16", "k16", Element::f16},
                               {"bf16", "k16", Element::bf16},
                               {"e4m3", "k32", Element::e4m3},
                               {"e5m2", "k32", Element::e5m2}};
  p.need("sync");
  p.need("aligned");
  int n = 0;
  char k[8] = "";
  if (sscanf(p.modifier, ".m64n%3d%3[k0-9]", &n, k) != 2 || n < 8 || n > 256 || n % 8)
    p.refuse("%s: '%s' is not known where the shape stands", p.opcode, p.modifier);
  char shape[24];
  snprintf(shape, sizeof shape, "m64n%d%s", n, k);
  p.need(shape);
  p.need("f32");
  const Kind* kind = nullptr;
  for (const Kind& candidate : kinds)
    if (!kind && !strcmp(candidate.k, k) && p.is(candidate.type)) kind = &candidate;
  if (!kind) p.refuse("%s: '%s' is not known where the type of A stands", p.opcode, p.modifier);
  const Kind* b_kind = nullptr;
  for (const Kind& candidate : kinds)
    if (!b_kind && !strcmp(k, "k32") && !strcmp(candidate.k, k) && p.is(candidate.type)) b_kind = &candidate;
  if (!b_kind) p.need(kind->type), b_kind = kind;
  p.reads_and_writes_list(n / 2, F32, "accumulator");
  const bool in_registers = p.taken < p.argument_count && p.arguments[p.taken].kind == Argument::list;
  int flags = int(kind->element) << ELEMENT_SHIFT | int(b_kind->element) << B_ELEMENT_SHIFT;
  if (in_registers) {
    flags |= A_IN_REGISTERS;
    p.reads_list(4, B32, "A registers");
  } else {
    p.reads(B64, "descriptor of A");
  }
  p.reads(B64, "descriptor of B");
  p.reads(PREDICATE, "scale of D");
  p.number_in(1, 1, "scale of A");
  p.number_in(1, 1, "scale of B");
  if (!strcmp(kind->k, "k16")) {
    flags |= TAKES_TRANSPOSITIONS;
    if (!in_registers) p.number_in(0, 1, "transposition of A");
    p.number_in(0, 1, "transposition of B");
  }
  p.has_effect();
  p.means(multiply_warpgroup, in_registers ? "wgmma (A in registers)" : "wgmma (A in shared memory)", n, flags);
}

inline void wgmma_fenced(const Instruction&, Frame&) { fence_wgmma(); }
inline void wgmma_committed(const Instruction&, Frame&) { commit_wgmma(); }
inline void wgmma_awaited(const Instruction& i, Frame& f) { wait_for_wgmma(value_of<uint32_t>(f, i.slots[0])); }

// wgmma.fence, .commit_group, .wait_group: what orders a wgmma's reads of shared memory, which is why these clobber it
// and the multiplication itself need not.
inline void read_wgmma(Parser& p) {
  if (p.is("mma_async")) return read_wgmma_mma(p);
  const char* const operations[] = {"fence", "commit_group", "wait_group"};
  constexpr Meaning meanings[] = {wgmma_fenced, wgmma_committed, wgmma_awaited};
  const int operation = p.choose(operations);
  p.need("sync");
  p.need("aligned");
  if (operation == 2) p.number_in(0, 7, "number of groups");
  p.touches_memory();
  p.means(meanings[operation], "wgmma.fence, commit or wait");
}

}  // namespace emulation
