// Findings: what a program did that CUDA leaves undefined, in a sentence, as a sanitizer reports it.
#pragma once

#include <string>

namespace softgpu {

// Keeps it for softgpu_take_finding and writes it to the standard error, once until it has been taken.
void report(const std::string& finding);

// The oldest that has not been taken, empty where there is none.
std::string take_finding();

__attribute__((format(printf, 1, 2))) std::string format(const char* text, ...);

}  // namespace softgpu
