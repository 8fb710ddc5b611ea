// Devices, their primary contexts, and errors.

#include "driver.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simulator {

static void print(const char *format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof text, format, arguments);
    fprintf(stderr, "CUDA simulator: %s\n", text);
}

void warn(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print(format, arguments);
    va_end(arguments);
}

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print(format, arguments);
    abort();
}

uint64_t setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    if (!text || !*text) {
        return otherwise;
    }
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    if (*end) {
        die("%s=%s is not a whole number", name, text);
    }
    return value;
}

int num_devices() {
    static const int count = (int)setting("CUDA_SIMULATOR_DEVICES", 1);
    return count;
}

namespace {
std::atomic<bool> initialized{false};
std::mutex contexts_mutex;
thread_local Context *current = nullptr;

// Blocks are looked at once more when the program ends, for what has been written beside them since.
void at_exit() {
    if (!wait_for_all(10.0)) {
        warn("at the end of the program, work is still not done; memory is not checked");
        return;
    }
    check_memory();
}
} // namespace

Context *context_of(int device) {
    static std::vector<Context> *contexts = [] {
        auto *all = new std::vector<Context>(num_devices());
        for (int i = 0; i < num_devices(); i++) {
            (*all)[i].device = i;
        }
        return all;
    }();
    return device >= 0 && device < num_devices() ? &(*contexts)[device] : nullptr;
}

Context *current_context() {
    if (!current) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(contexts_mutex);
    return current->retained > 0 ? current : nullptr;
}

} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuInit(unsigned int) {
    if (!initialized.exchange(true)) {
        atexit(at_exit);
    }
    return num_devices() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = num_devices();
    return initialized ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    if (!initialized) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    return context_of(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    snprintf(name, (size_t)length, "CUDA simulator, device %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice) {
    *bytes = total_memory();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (!context_of(device)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    switch (attribute) {
    // As the stand-in for nvcc defines __CUDA_ARCH__.
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    // Few, so that grid-stride loops take several turns.
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 2; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: *value = 64; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 0x7fffffff; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = device + 1; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = 0; break;
    default:
        warn("cuDeviceGetAttribute: attribute %d is not simulated", (int)attribute);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!initialized) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    Context *found = context_of(device);
    if (!found) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    std::lock_guard<std::mutex> lock(contexts_mutex);
    found->retained++;
    *context = reinterpret_cast<CUcontext>(found);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    Context *context = context_of(device);
    if (!context) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    std::lock_guard<std::mutex> lock(contexts_mutex);
    if (context->retained == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    // The last one to release it destroys what is in it.
    if (context->retained == 1) {
        wait_for_device(device);
        reset_memory(device);
    }
    context->retained--;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    current = reinterpret_cast<Context *>(context);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    if (!current) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *device = current->device;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
#define NAME(code) \
    case code: *name = #code; return CUDA_SUCCESS;
        NAME(CUDA_SUCCESS)
        NAME(CUDA_ERROR_INVALID_VALUE)
        NAME(CUDA_ERROR_OUT_OF_MEMORY)
        NAME(CUDA_ERROR_NOT_INITIALIZED)
        NAME(CUDA_ERROR_NO_DEVICE)
        NAME(CUDA_ERROR_INVALID_DEVICE)
        NAME(CUDA_ERROR_INVALID_IMAGE)
        NAME(CUDA_ERROR_INVALID_CONTEXT)
        NAME(CUDA_ERROR_INVALID_PTX)
        NAME(CUDA_ERROR_INVALID_HANDLE)
        NAME(CUDA_ERROR_NOT_FOUND)
        NAME(CUDA_ERROR_NOT_READY)
        NAME(CUDA_ERROR_NOT_SUPPORTED)
        NAME(CUDA_ERROR_UNKNOWN)
#undef NAME
    default: *name = "an error that the CUDA simulator does not return"; return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    CUresult known = cuGetErrorName(error, text);
    if (error == CUDA_ERROR_OUT_OF_MEMORY) {
        *text = "out of memory";
    }
    return known;
}

} // extern "C"
