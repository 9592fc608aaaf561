#include "finding.h"

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <mutex>
#include <set>

namespace softgpu {
namespace {

struct Findings {
  std::mutex lock;
  std::set<std::string> seen;
  std::deque<std::string> waiting;
};

// Never destroyed: threads of streams outlive main.
Findings& all() {
  static auto* findings = new Findings;
  return *findings;
}

}  // namespace

void report(const std::string& finding) {
  Findings& findings = all();
  std::lock_guard held(findings.lock);
  if (!findings.seen.insert(finding).second) return;
  findings.waiting.push_back(finding);
  std::fprintf(stderr, "softgpu: %s\n", finding.c_str());
}

std::string take_finding() {
  Findings& findings = all();
  std::lock_guard held(findings.lock);
  if (findings.waiting.empty()) return {};
  std::string first = findings.waiting.front();
  findings.waiting.pop_front();
  findings.seen.erase(first);
  return first;
}

std::string format(const char* text, ...) {
  char room[4096];
  std::va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(room, sizeof room, text, arguments);
  va_end(arguments);
  return room;
}

}  // namespace softgpu
