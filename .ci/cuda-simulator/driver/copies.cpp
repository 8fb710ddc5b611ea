// Copies and fills, and page-locked memory of the host: the only one whose copies do not wait for the host, or the host for them.

#include "blocks.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace simulator {
namespace {

// Page-locked blocks, by their first bytes.
struct PageLocked {
    std::mutex mutex;
    std::map<const char *, size_t> blocks;
};

PageLocked &page_locked() {
    static PageLocked *all = new PageLocked;
    return *all;
}

bool is_page_locked(const void *pointer) {
    auto at = static_cast<const char *>(pointer);
    std::lock_guard<std::mutex> lock(page_locked().mutex);
    auto next = page_locked().blocks.upper_bound(at);
    return next != page_locked().blocks.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

char *as_pointer(CUdeviceptr at) { return reinterpret_cast<char *>(at); }

// Says where a range is not what it should be.
bool check(const char *function, CUdeviceptr at, size_t bytes) {
    if (bytes == 0 || is_inside(as_pointer(at), bytes)) {
        return true;
    }
    warn("%s: %zu bytes at %p are not inside a block of device memory", function, bytes, (void *)as_pointer(at));
    return false;
}

CUresult copy(CUstream handle, char *to, const char *from, size_t bytes) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    submit(stream, [=] { memmove(to, from, bytes); });
    return CUDA_SUCCESS;
}

CUresult synchronized(CUresult started) { return started == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : started; }

template <class T> CUresult fill(CUdeviceptr at, T value, size_t count, CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!check("cuMemset", at, count * sizeof(T))) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    submit(stream, [=] { std::fill_n(reinterpret_cast<T *>(at), count, value); });
    return CUDA_SUCCESS;
}

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int) {
    if (!current_context()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *pointer = malloc(bytes);
    if (!*pointer) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(*pointer, POISON, bytes);
    std::lock_guard<std::mutex> lock(page_locked().mutex);
    page_locked().blocks.emplace(static_cast<const char *>(*pointer), bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *pointer) {
    std::lock_guard<std::mutex> lock(page_locked().mutex);
    if (page_locked().blocks.erase(static_cast<const char *>(pointer)) == 0) {
        die("cuMemFreeHost: no page-locked block at %p", pointer);
    }
    free(pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream handle) {
    if (!check("cuMemcpyHtoDAsync", to, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto source = static_cast<const char *>(from);
    if (is_page_locked(from)) {
        return copy(handle, as_pointer(to), source, bytes);
    }
    // The driver copies it away before it returns.
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    submit(stream, [to, staged = std::vector<char>(source, source + bytes)] {
        memcpy(as_pointer(to), staged.data(), staged.size());
    });
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream handle) {
    if (!check("cuMemcpyDtoHAsync", from, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult started = copy(handle, static_cast<char *>(to), as_pointer(from), bytes);
    if (started != CUDA_SUCCESS || is_page_locked(to)) {
        return started;
    }
    // To pageable memory the driver returns when all is there.
    auto stream = find_stream(handle);
    stream->wait_for(stream->submitted());
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    if (!check("cuMemcpyDtoDAsync", to, bytes) || !check("cuMemcpyDtoDAsync", from, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return copy(handle, as_pointer(to), as_pointer(from), bytes);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream handle) {
    return cuMemcpyDtoDAsync(to, from, bytes, handle);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    return synchronized(cuMemcpyHtoDAsync(to, from, bytes, nullptr));
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    return synchronized(cuMemcpyDtoHAsync(to, from, bytes, nullptr));
}

// Between two places of the device it does not wait.
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) { return cuMemcpyDtoDAsync(to, from, bytes, nullptr); }

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count, CUstream stream) {
    return fill(at, value, count, stream);
}
CUresult cuMemsetD16Async(CUdeviceptr at, unsigned short value, size_t count, CUstream stream) {
    return fill(at, value, count, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr at, unsigned int value, size_t count, CUstream stream) {
    return fill(at, value, count, stream);
}
CUresult cuMemsetD8(CUdeviceptr at, unsigned char value, size_t count) { return fill(at, value, count, (CUstream) nullptr); }

} // extern "C"
