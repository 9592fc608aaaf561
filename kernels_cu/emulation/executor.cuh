// What all modules share: built once, and linked to each kernel's own unit. It runs grids and executes asm statements.
#pragma once

#include "emulation/alignment.cuh"
#include "emulation/assembly/execute.cuh"
#include "emulation/deviation.cuh"
#include "emulation/grid.cuh"
#include "emulation/switch.cuh"
