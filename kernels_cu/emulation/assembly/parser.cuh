// Reads an asm template: scopes, register declarations, labels, guards, opcodes and operands, by the grammar of the PTX
// ISA (chapters 4, 6 and 8.7). The instructions' own readers know what an opcode means and which operands it takes.
// Anything else is refused by name.
#pragma once

#include "emulation/assembly/program.cuh"

namespace emulation {

constexpr int MAX_OPERANDS = 160;  // of a statement: 128 accumulators and what goes with them
constexpr int MAX_ARGUMENTS = 8;   // of an instruction
constexpr int MAX_LABELS = 4;

// An operand as written. inner: the registers of a list, or the coordinates that follow an address.
struct Argument {
  enum Kind { value, list, address, label, pair } kind;
  Slot slot;
  bool negated;
  int64_t offset;
  List<Slot> inner;
  char name[32];
};

// What a compiler may and may not assume of a statement: filled while its instructions are read, used by checks.cuh.
struct Usage {
  int first_write[MAX_OPERANDS], last_write[MAX_OPERANDS];  // instruction, -1: none
  int first_read[MAX_OPERANDS], last_read[MAX_OPERANDS];
  bool touches_memory, has_effect, jumps_back;
};

struct Local {
  char name[32];
  Type type;
};
// A label, or a branch to one; at: the instruction that follows it, or that is it.
struct Label {
  char name[32];
  int at;
};

struct Parser {
  const Statement* statement;
  const char* at;
  Program* program;
  Usage usage;
  char constraint[MAX_OPERANDS][4];
  int operands;
  Local locals[MAX_LOCALS];
  bool local_written[MAX_LOCALS];
  int local_count;
  Label labels[MAX_LABELS], branches[MAX_LABELS];
  int label_count, branch_count;
  // the instruction being read
  char opcode[128];
  const char* modifier;  // the rest of the opcode
  Argument arguments[MAX_ARGUMENTS];
  int argument_count, taken;
  Instruction* instruction;
  int number;
  // where a refusal goes
  jmp_buf refused;
  char* error;
  size_t room;

  [[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error, room, format, list);
    va_end(list);
    longjmp(refused, 1);
  }

  // ---- characters
  void skip_space() {
    while (*at == ' ' || *at == '\n' || *at == '\t') at++;
  }
  bool accept(char c) {
    skip_space();
    if (*at != c) return false;
    at++;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) refuse("'%c' is expected where the template goes on with '%.20s'", c, at);
  }
  static bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
  }
  // A name; "%=" in it is the number that makes it unlike those of other statements.
  void read_name(char (&name)[32]) {
    skip_space();
    int n = 0;
    while (is_name(*at) || (at[0] == '%' && at[1] == '=')) {
      if (n >= 28) refuse("a name of the template is too long: '%.40s'", name);
      name[n++] = *at == '%' ? '0' : *at;
      at += *at == '%' ? 2 : 1;
    }
    name[n] = 0;
    if (!n) refuse("a name is expected where the template goes on with '%.20s'", at);
  }
  int64_t read_number() {
    skip_space();
    char* end;
    const int64_t value = static_cast<int64_t>(strtoll(at, &end, 0));
    if (end == at) refuse("a number is expected where the template goes on with '%.20s'", at);
    at = end;
    return value;
  }
  int read_operand_number() {
    if (*at < '0' || *at > '9') refuse("'%%%.10s' is no operand and no register that is known here", at);
    int n = 0;
    while (*at >= '0' && *at <= '9' && n < 10000) n = 10 * n + (*at++ - '0');
    if (n >= operands) refuse("%%%d is named, and the statement has %d operands", n, operands);
    return n;
  }

  // ---- operands
  int find_local(const char* name) {
    for (int i = 0; i < local_count; i++)
      if (!strcmp(locals[i].name, name)) return i;
    return -1;
  }
  // A register or a number; false if a name is neither, which is then in `name`.
  bool read_slot(Slot& slot, char (&name)[32]) {
    skip_space();
    slot = Slot{Slot::nothing, 0, 0};
    if (*at == '%' && at[1] != '=') {
      at++;
      slot = Slot{Slot::operand, static_cast<uint16_t>(read_operand_number()), 0};
      return true;
    }
    if ((*at >= '0' && *at <= '9') || *at == '-') {
      slot = Slot{Slot::constant, 0, read_number()};
      return true;
    }
    read_name(name);
    if (!strcmp(name, "_")) return true;
    const int local = find_local(name);
    if (local < 0) return false;
    slot = Slot{Slot::local, static_cast<uint16_t>(local), 0};
    return true;
  }
  Slot read_register() {
    Slot slot;
    char name[32] = "";
    if (!read_slot(slot, name)) refuse("'%s' is no register that the template declares", name);
    return slot;
  }
  void read_list(List<Slot>& slots) {
    do slots.push(read_register());
    while (accept(','));
    expect('}');
  }
  void read_argument() {
    if (argument_count == MAX_ARGUMENTS) refuse("%s: more than %d operands", opcode, MAX_ARGUMENTS);
    Argument& a = arguments[argument_count++];
    a = Argument{};
    if (accept('{')) {
      a.kind = Argument::list;
      read_list(a.inner);
    } else if (accept('[')) {
      a.kind = Argument::address;
      a.slot = read_register();
      if (accept('+')) a.offset = read_number();
      if (accept(',')) {
        expect('{');
        read_list(a.inner);
      }
      expect(']');
    } else {
      a.negated = accept('!');
      a.kind = read_slot(a.slot, a.name) ? Argument::value : Argument::label;
      if (accept('|')) {  // d|p: two results
        a.kind = Argument::pair;
        a.inner.push(a.slot);
        a.inner.push(read_register());
      }
    }
  }

  // ---- types
  static bool is_type(const char* text, size_t length, Type& type) {
    const char kind = text[0];
    if (length == 4 && !strncmp(text, "pred", 4)) return type = PREDICATE, true;
    if (!strchr("busf", kind) || length < 2 || length > 3) return false;
    const int bits = length == 2 ? text[1] - '0' : 10 * (text[1] - '0') + text[2] - '0';
    if (bits != 8 && bits != 16 && bits != 32 && bits != 64) return false;
    return type = Type{kind, bits}, true;
  }
  Type type_of(const Slot& slot, const char* role) {
    if (slot.kind == Slot::local) return locals[slot.index].type;
    const char* c = constraint[slot.index];
    switch (c[strlen(c) - 1]) {
      case 'h': return B16;
      case 'r': return Type{'i', 32};
      case 'l': return Type{'i', 64};
      case 'f': return F32;
      case 'd': return Type{'f', 64};
    }
    refuse("%s: %%%d has the constraint \"%s\", which is no register, and is the %s", opcode, slot.index, c, role);
  }
  static bool is_immediate(const char* c) { return !strcmp(c, "n"); }
  // Registers are as wide as the instruction's type; bits fit every kind of their size (PTX ISA 5.2.2, 9.4).
  void check_type(const Slot& slot, Type wanted, const char* role) {
    const Type got = type_of(slot, role);
    const bool whole = got.kind != 'f' && got.kind != 'p' && wanted.kind != 'f' && wanted.kind != 'p';
    const bool bits = (got.kind == 'b' && wanted.kind != 'p') || (wanted.kind == 'b' && got.kind != 'p');
    if (got.bits != wanted.bits || !(got.kind == wanted.kind || whole || bits))
      refuse("%s: the %s takes .%c%d, and its register holds .%c%d", opcode, role, wanted.kind, wanted.bits, got.kind,
             got.bits);
  }
  void note(int (&first)[MAX_OPERANDS], int (&last)[MAX_OPERANDS], const Slot& slot) {
    if (slot.kind != Slot::operand) return;
    if (first[slot.index] < 0) first[slot.index] = number;
    last[slot.index] = number;
  }
  void add(const Slot& slot) { instruction->slots.push(slot); }
  Argument& take(const char* role) {
    if (taken == argument_count) refuse("%s: the %s is missing", opcode, role);
    return arguments[taken++];
  }
  Argument& take_value(const char* role) {
    Argument& a = take(role);
    if (a.kind != Argument::value || (a.negated)) refuse("%s: the %s is no plain register or number", opcode, role);
    return a;
  }
  void use(const Slot& slot, Type type, const char* role) {
    if (slot.kind == Slot::nothing) refuse("%s: the %s cannot be '_'", opcode, role);
    const bool immediate = slot.kind == Slot::operand && is_immediate(constraint[slot.index]);
    if (slot.kind != Slot::constant && !immediate) check_type(slot, type, role);
    if (slot.kind == Slot::local && !local_written[slot.index])
      refuse("%s: register '%s' is read before it is written", opcode, locals[slot.index].name);
    note(usage.first_read, usage.last_read, slot);
    add(slot);
  }
  void define(const Slot& slot, Type type, const char* role, bool may_sink = false) {
    const bool old_may_stay = instruction->guard.kind != Slot::nothing;
    if (old_may_stay) note(usage.first_read, usage.last_read, slot);
    if (slot.kind == Slot::constant || (slot.kind == Slot::nothing && !may_sink))
      refuse("%s: the %s is no register", opcode, role);
    if (slot.kind != Slot::nothing) check_type(slot, type, role);
    note(usage.first_write, usage.last_write, slot);
    if (slot.kind == Slot::local) local_written[slot.index] = true;
    add(slot);
  }

  // ---- for the readers of instructions: the opcode's modifiers, in the order of the ISA
  // Takes the next modifier if it is this one.
  bool is(const char* word) {
    const size_t n = strlen(word);
    if (modifier[0] != '.' || strncmp(modifier + 1, word, n)) return false;
    if (modifier[n + 1] && modifier[n + 1] != '.') return false;
    modifier += n + 1;
    return true;
  }
  void need(const char* word) {
    if (!is(word)) refuse("%s: '%s' is not known where .%s stands", opcode, modifier, word);
  }
  template <class... Words>
  void needs(Words... words) {
    (need(words), ...);
  }
  // The next modifier, which is one of these; its place among them.
  template <int N>
  int choose(const char* const (&words)[N]) {
    for (int i = 0; i < N; i++)
      if (is(words[i])) return i;
    refuse("%s: '%s' is not known where .%s stands", opcode, modifier, words[0]);
  }
  Type need_type(const char* allowed) {
    const char* start = modifier + (*modifier == '.');
    const size_t length = strcspn(start, ".");
    char padded[24] = "";
    snprintf(padded, sizeof padded, " %.*s ", static_cast<int>(length), start);
    Type type{};
    if (!length || length > 8 || !strstr(allowed, padded) || !is_type(start, length, type))
      refuse("%s: '%s' is not known where one of the types%s stands", opcode, modifier, allowed);
    modifier = start + length;
    return type;
  }
  void no_more_modifiers() {
    if (*modifier) refuse("%s: '%s' is not known here", opcode, modifier);
  }

  // ---- and its operands, in the order of the ISA
  void reads(Type type, const char* role) { use(take_value(role).slot, type, role); }
  void writes(Type type, const char* role, bool may_sink = false) {
    define(take_value(role).slot, type, role, may_sink);
  }
  Argument& take_list(int count, const char* role) {
    Argument& a = take(role);
    if (a.kind != Argument::list || static_cast<int>(a.inner.size) != count)
      refuse("%s: the %s is no list of %d registers", opcode, role, count);
    return a;
  }
  void reads_list(int count, Type type, const char* role) {
    for (const Slot& slot : take_list(count, role).inner) use(slot, type, role);
  }
  void writes_list(int count, Type type, const char* role) {
    for (const Slot& slot : take_list(count, role).inner) define(slot, type, role);
  }
  void reads_and_writes_list(int count, Type type, const char* role) {
    for (const Slot& slot : take_list(count, role).inner) {
      note(usage.first_read, usage.last_read, slot);
      define(slot, type, role);
    }
  }
  // A vector of count registers, or one register if count is 1.
  void reads_vector(int count, Type type, const char* role) {
    if (count == 1) reads(type, role);
    else reads_list(count, type, role);
  }
  void writes_vector(int count, Type type, const char* role) {
    if (count == 1) writes(type, role);
    else writes_list(count, type, role);
  }
  // An address in a register, of 32 bits in shared memory and of 64 elsewhere. coordinates: that follow it.
  void address(int bits, const char* role, int coordinates = 0) {
    Argument& a = take(role);
    if (a.kind != Argument::address) refuse("%s: the %s is no address in brackets", opcode, role);
    if (a.slot.kind == Slot::constant) refuse("%s: the %s is a number", opcode, role);
    if (a.offset) refuse("%s: the %s has an offset, which is not known here", opcode, role);
    if (static_cast<int>(a.inner.size) != coordinates)
      refuse("%s: %u coordinates, %d are expected", opcode, a.inner.size, coordinates);
    use(a.slot, bits == 32 ? U32 : U64, role);
    for (const Slot& slot : a.inner) use(slot, S32, "coordinate");
  }
  // A number in the template or of an "n" operand.
  void number_in(int64_t lowest, int64_t highest, const char* role) {
    Argument& a = take_value(role);
    const bool by_operand = a.slot.kind == Slot::operand && is_immediate(constraint[a.slot.index]);
    if (a.slot.kind != Slot::constant && !by_operand) refuse("%s: the %s is no constant", opcode, role);
    if (a.slot.kind == Slot::constant && (a.slot.value < lowest || a.slot.value > highest))
      refuse("%s: the %s is %lld, known are %lld to %lld", opcode, role, static_cast<long long>(a.slot.value),
             static_cast<long long>(lowest), static_cast<long long>(highest));
    use(a.slot, B32, role);
  }
  void branches_to() {
    Argument& a = take("label");
    if (a.kind != Argument::label) refuse("%s: its operand is no label", opcode);
    if (branch_count == MAX_LABELS) refuse("more than %d branches", MAX_LABELS);
    Label& branch = branches[branch_count++];
    memcpy(branch.name, a.name, sizeof branch.name);
    branch.at = number;
  }
  bool has_more() const { return taken < argument_count; }
  void means(Meaning meaning, const char* name, int number_ = 0, int flags = 0) {
    no_more_modifiers();
    if (taken < argument_count) refuse("%s: %d operands more than it takes", opcode, argument_count - taken);
    instruction->meaning = meaning;
    instruction->name = name;
    instruction->number = number_;
    instruction->flags = flags;
  }
  void touches_memory() { usage.touches_memory = usage.has_effect = true; }
  void has_effect() { usage.has_effect = true; }
};

// Finds the reader of the opcode's instruction and calls it (instructions.cuh).
void read_instruction(Parser& p);

inline void read_constraints(Parser& p) {
  const char* c = p.statement->constraints;
  while (*c) {
    const size_t length = strcspn(c, ",");
    if (p.operands == MAX_OPERANDS || length > 3) p.refuse("more than %d operands, or a long constraint", MAX_OPERANDS);
    memcpy(p.constraint[p.operands], c, length);
    p.constraint[p.operands++][length] = 0;
    c += length + (c[length] == ',');
  }
}

inline void declare_registers(Parser& p) {
  Type type{};
  p.skip_space();
  const char* start = p.at + 1;
  const size_t length = *p.at == '.' ? strcspn(start, " \n\t") : 0;
  if (!length || !Parser::is_type(start, length, type)) p.refuse(".reg: '%.12s' is no type that is known", p.at);
  p.at = start + length;
  do {
    if (p.local_count == MAX_LOCALS) p.refuse("more than %d declared registers", MAX_LOCALS);
    Local& local = p.locals[p.local_count];
    char name[32];
    p.read_name(name);
    if (p.find_local(name) >= 0) p.refuse("register '%s' is declared twice", name);
    memcpy(local.name, name, sizeof name);
    local.type = type;
    p.local_count++;
  } while (p.accept(','));
  p.expect(';');
}

inline void read_one(Parser& p) {
  Instruction i{};
  i.guard.kind = Slot::nothing;
  p.number = static_cast<int>(p.program->instructions.size);
  if (p.accept('@')) {
    i.guard_negated = p.accept('!');
    i.guard = p.read_register();
    if (i.guard.kind != Slot::local || p.locals[i.guard.index].type.kind != 'p') p.refuse("a guard is no predicate");
    if (!p.local_written[i.guard.index])
      p.refuse("guard '%s' is read before it is written", p.locals[i.guard.index].name);
  }
  p.skip_space();
  size_t n = 0;
  while (Parser::is_name(*p.at) || *p.at == '.' || *p.at == ':') {
    if (n + 1 >= sizeof p.opcode) p.refuse("an opcode is too long: '%.60s'", p.opcode);
    p.opcode[n++] = *p.at++;
  }
  p.opcode[n] = 0;
  if (!n) p.refuse("an opcode is expected where the template goes on with '%.20s'", p.at);
  p.argument_count = p.taken = 0;
  if (!p.accept(';')) {
    do p.read_argument();
    while (p.accept(','));
    p.expect(';');
  }
  p.modifier = p.opcode + strcspn(p.opcode, ".");
  p.instruction = &i;
  read_instruction(p);
  p.program->instructions.push(i);
  for (int a = 0; a < p.argument_count; a++) p.arguments[a].inner.release();
}

// NAME: of a label, unlike an opcode, whose colons are double.
inline bool is_label(const Parser& p) {
  const char* c = p.at;
  while (Parser::is_name(*c) || (c[0] == '%' && c[1] == '=')) c += *c == '%' ? 2 : 1;
  return c != p.at && c[0] == ':' && c[1] != ':';
}

inline void read_template(Parser& p) {
  int depth = 0;
  for (p.skip_space(); *p.at; p.skip_space()) {
    if (p.accept('{')) {
      depth++;
    } else if (p.accept('}')) {
      if (!depth--) p.refuse("a '}' closes nothing");
    } else if (!strncmp(p.at, ".reg", 4)) {
      p.at += 4;
      declare_registers(p);
    } else if (is_label(p)) {
      if (p.label_count == MAX_LABELS) p.refuse("more than %d labels", MAX_LABELS);
      Label& label = p.labels[p.label_count++];
      p.read_name(label.name);
      label.at = static_cast<int>(p.program->instructions.size);
      p.expect(':');
    } else {
      read_one(p);
    }
  }
  if (depth) p.refuse("a '{' is not closed");
}

inline void resolve_branches(Parser& p) {
  for (int b = 0; b < p.branch_count; b++) {
    const Label* found = nullptr;
    for (int l = 0; l < p.label_count; l++) {
      if (strcmp(p.labels[l].name, p.branches[b].name)) continue;
      if (found) p.refuse("label '%s' stands twice", found->name);
      found = &p.labels[l];
    }
    if (!found) p.refuse("there is no label '%s'", p.branches[b].name);
    p.program->instructions[p.branches[b].at].number = found->at;
    p.usage.jumps_back |= found->at <= p.branches[b].at;
  }
}

}  // namespace emulation
