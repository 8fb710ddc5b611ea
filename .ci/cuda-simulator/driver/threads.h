// What compiled kernels ask of libcuda.so.1: where a thread is, and where threads meet. kernels.h declares it in the same words.

#pragma once

#include <cstddef>
#include <cstdint>

struct SimulatorPosition {
    struct {
        unsigned x, y, z;
    } thread_index, block_index, block_size, grid_size;
};

extern "C" {
// Of the CUDA thread that runs.
extern __thread SimulatorPosition simulator_position;
// __syncthreads
void simulator_sync_threads();
// __syncwarp
void simulator_sync_warp(unsigned mask);
// Gives `value` to the lanes of the warp in `mask`; what lane `from` of it gave comes back.
uint64_t simulator_shuffle(unsigned mask, uint64_t value, unsigned from);
// Bit k of the result: `predicate` of lane k.
unsigned simulator_ballot(unsigned mask, bool predicate);
// The dynamic shared memory of the block.
void *simulator_dynamic_shared();
[[noreturn]] void simulator_trap(const char *what);
}
