// What the libraries ask of the memory that they are given. A GPU would fault or, worse, not: the simulator ends the process.

#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "simulator.h"

namespace simulator {

// The device of the calling thread's context; -1 if it has none.
inline int current_device() {
    CUdevice device;
    return cuCtxGetDevice(&device) == CUDA_SUCCESS ? device : -1;
}

// Ends the process unless the bytes are memory of that device.
inline void require_device_memory(const void *pointer, size_t bytes, int device, const char *call, const char *what) {
    if (bytes == 0) return;
    const char *last = static_cast<const char*>(pointer) + (bytes - 1);
    int first_on = device_of(pointer), last_on = device_of(last);
    if (first_on == device && last_on == device) return;
    std::fprintf(stderr,
                 "CUDA simulator: %s on device %d: %s is %zu bytes at %p, and they are not memory of that device "
                 "(the first is of device %d, the last of %d; -1 is none: it was never allocated, or is freed)\n",
                 call, device, what, bytes, pointer, first_on, last_on);
    std::abort();
}

} // namespace simulator
