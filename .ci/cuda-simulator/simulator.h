// The CUDA simulator: what libcuda.so.1 offers to the libraries that are built on it (cuBLAS, cuRAND, NCCL).
//
// Device memory is memory of the host, so `work` reads and writes device pointers as they are.

#pragma once

#include <functional>

#include <cuda.h>

namespace simulator {

// Puts `work` behind all that is in `stream`, and returns at once. Null is the legacy default stream of the current context's
// device. Aborts, with a message, if there is no such stream.
void enqueue(CUstream stream, std::function<void()> work);

// The number of the device whose memory `pointer` points into; -1 if it is not device memory.
int device_of(const void *pointer);

} // namespace simulator
