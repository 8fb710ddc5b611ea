// Allocation: of the pool in the order of a stream, and plain.

#include "blocks.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace simulator {
namespace {

char *as_pointer(CUdeviceptr at) { return reinterpret_cast<char *>(at); }

CUmemoryPool pool_of(int device) { return reinterpret_cast<CUmemoryPool>(context_of(device)); }

int device_of_pool(CUmemoryPool pool) {
    for (int device = 0; device < num_devices(); device++) {
        if (pool_of(device) == pool) {
            return device;
        }
    }
    return -1;
}

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    // Unlike cuMemAlloc it takes this, as cudarc's users have found (github.com/chelsea0x3b/cudarc/issues/194).
    if (bytes == 0) {
        *at = 0;
        return CUDA_SUCCESS;
    }
    char *start = take_block(stream->device, bytes, true);
    if (!start) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // It begins to exist here: whoever uses it in another stream without waiting loses what it has written.
    submit(stream, [=] { memset(start, POISON, bytes); });
    *at = reinterpret_cast<CUdeviceptr>(start);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr at, CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!at) {
        return CUDA_SUCCESS;
    }
    char *start = as_pointer(at);
    if (!begin_free(start)) {
        die("cuMemFreeAsync: no block at %p, or it is freed already", (void *)start);
    }
    submit(stream, [=] { end_free(start); });
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *at, size_t bytes) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (bytes == 0) {
        warn("cuMemAlloc: no bytes");
        return CUDA_ERROR_INVALID_VALUE;
    }
    char *start = take_block(context->device, bytes, false);
    if (!start) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(start, POISON, bytes);
    *at = reinterpret_cast<CUdeviceptr>(start);
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr at) {
    char *start = as_pointer(at);
    const int device = device_of(start);
    if (!begin_free(start)) {
        die("cuMemFree: no block at %p, or it is freed already", (void *)start);
    }
    wait_for_device(device);
    end_free(start);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    const Usage usage = usage_of(context->device);
    *total = total_memory();
    *free_bytes = *total - std::min<size_t>(*total, usage.reserved + usage.plain);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    if (!context_of(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    *pool = pool_of(device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t kept) {
    const int device = device_of_pool(pool);
    if (device < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    set_usage(device, [=](Usage &usage) { usage.reserved = std::max<uint64_t>(usage.used, std::min(usage.reserved, kept)); });
    return CUDA_SUCCESS;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    const int device = device_of_pool(pool);
    if (device < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Usage usage = usage_of(device);
    auto &number = *static_cast<cuuint64_t *>(value);
    switch (attribute) {
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number = usage.used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number = usage.used_high; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number = usage.reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number = usage.reserved_high; break;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number = usage.release_threshold; break;
    default: warn("cuMemPoolGetAttribute: attribute %d is not simulated", (int)attribute); return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
    const int device = device_of_pool(pool);
    if (device < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const auto number = *static_cast<cuuint64_t *>(value);
    const bool is_peak = attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH;
    if (is_peak && number != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult result = CUDA_SUCCESS;
    set_usage(device, [&](Usage &usage) {
        switch (attribute) {
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH: usage.used_high = usage.used; break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: usage.reserved_high = usage.reserved; break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: usage.release_threshold = number; break;
        default:
            warn("cuMemPoolSetAttribute: attribute %d is not simulated", (int)attribute);
            result = CUDA_ERROR_NOT_SUPPORTED;
        }
    });
    return result;
}

} // extern "C"
