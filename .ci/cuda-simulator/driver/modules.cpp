// Modules and launches. What the simulator's compilers write in place of PTX is a header line and a shared library in base64.

#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace simulator {
namespace {

constexpr char HEADER[] = "// CUDA simulator: a shared library in base64\n";
constexpr char LEFT_OUT[] = "// CUDA simulator: left out\n";

// Written by the compiler for each kernel: copies the arguments of a launch, and gives back what a thread does with them.
using Bind = void (*)(void **arguments, std::function<void()> *thread);

struct Function {
    int device;
    std::string name;
    Bind bind;
};

struct Module {
    int device;
    void *library; // null if its kernels are left out
    std::mutex mutex;
    std::map<std::string, Function> functions;
};

std::string decode_base64(const char *text) {
    std::string bytes;
    unsigned buffer = 0, bits = 0;
    for (; *text && *text != '='; text++) {
        const char c = *text;
        const int value = c >= 'A' && c <= 'Z'   ? c - 'A'
                          : c >= 'a' && c <= 'z' ? c - 'a' + 26
                          : c >= '0' && c <= '9' ? c - '0' + 52
                          : c == '+'             ? 62
                          : c == '/'             ? 63
                                                 : -1;
        if (value < 0) {
            continue; // the ends of lines
        }
        buffer = buffer << 6 | (unsigned)value;
        bits += 6;
        if (bits >= 8) {
            bits -= 8;
            bytes += (char)(buffer >> bits & 0xff);
        }
    }
    return bytes;
}

// A library is loaded once, however many modules are made of it: one has no state but shared memory.
void *load(const std::string &text) {
    static std::mutex mutex;
    static auto *known = new std::map<std::string, void *>;
    std::lock_guard<std::mutex> lock(mutex);
    auto found = known->find(text);
    if (found != known->end()) {
        return found->second;
    }
    const std::string bytes = decode_base64(text.c_str());
    const int file = memfd_create("kernels", MFD_CLOEXEC);
    if (file < 0 || write(file, bytes.data(), bytes.size()) != (ssize_t)bytes.size()) {
        warn("cuModuleLoadData: no memory for a file of %zu bytes", bytes.size());
        return nullptr;
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        warn("cuModuleLoadData: %s", dlerror());
    }
    // The file stays open: the next library would get the same path, by which the loader knows libraries.
    return (*known)[text] = library;
}

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuModuleLoadData(CUmodule *handle, const void *image) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    auto text = static_cast<const char *>(image);
    auto module = std::make_unique<Module>();
    module->device = context->device;
    module->library = nullptr;
    if (strncmp(text, HEADER, strlen(HEADER)) == 0) {
        module->library = load(text + strlen(HEADER));
        if (!module->library) {
            return CUDA_ERROR_INVALID_IMAGE;
        }
    } else if (strncmp(text, LEFT_OUT, strlen(LEFT_OUT)) != 0) {
        warn("cuModuleLoadData: not from the simulator's compilers; build with its nvcc");
        return CUDA_ERROR_INVALID_PTX;
    }
    *handle = reinterpret_cast<CUmodule>(module.release());
    return CUDA_SUCCESS;
}

// Functions stay valid: their code may be on its way in a stream.
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *handle, CUmodule module_handle, const char *name) {
    auto *module = reinterpret_cast<Module *>(module_handle);
    if (!module->library) {
        warn("cuModuleGetFunction: %s is left out of the simulator", name);
        return CUDA_ERROR_NOT_FOUND;
    }
    const std::string symbol = std::string("simulator_bind_") + name;
    auto bind = reinterpret_cast<Bind>(dlsym(module->library, symbol.c_str()));
    if (!bind) {
        return CUDA_ERROR_NOT_FOUND;
    }
    std::lock_guard<std::mutex> lock(module->mutex);
    auto [function, is_new] = module->functions.emplace(name, Function{module->device, name, bind});
    *handle = reinterpret_cast<CUfunction>(&function->second);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream_handle,
                        void **arguments, void **extra) {
    auto *function = reinterpret_cast<Function *>(handle);
    auto stream = find_stream(stream_handle);
    if (!function || !stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const char *name = function->name.c_str();
    if (function->device != stream->device) {
        warn("cuLaunchKernel: %s of device %d on a stream of device %d", name, function->device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const uint64_t threads = (uint64_t)block_x * block_y * block_z;
    const bool is_valid = (uint64_t)grid_x * grid_y * grid_z > 0 && grid_x <= 0x7fffffff && grid_y <= 65535 &&
                          grid_z <= 65535 && threads > 0 && threads <= 1024 && block_z <= 64 && shared_bytes <= 48 << 10;
    if (!is_valid || extra) {
        warn("cuLaunchKernel: %s with a grid of %u x %u x %u blocks of %u x %u x %u threads and %u bytes of shared memory", name,
             grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
        return CUDA_ERROR_INVALID_VALUE;
    }
    Launch launch{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, nullptr, function->name};
    function->bind(arguments, &launch.thread);
    submit(stream, [launch = std::move(launch)] { run_grid(launch); });
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
        warn("cuFuncGetAttribute: attribute %d is not simulated", (int)attribute);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    *value = 1024;
    return CUDA_SUCCESS;
}

// As many as the threads of a multiprocessor allow.
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction, int block_size, size_t, unsigned) {
    if (block_size <= 0 || block_size > 1024) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *blocks = 2048 / block_size;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size, size_t shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared, 0);
}

} // extern "C"
