// The switch of fibers that fiber.cuh declares, once a module.
#pragma once

#include "emulation/fiber.cuh"

#ifndef GPU_ACTORS_UCONTEXT
__asm__(R"(
.text
.p2align 4
.hidden gpu_actors_switch_context
.globl gpu_actors_switch_context
.type gpu_actors_switch_context,@function
gpu_actors_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpu_actors_switch_context, .-gpu_actors_switch_context
)");
#endif
