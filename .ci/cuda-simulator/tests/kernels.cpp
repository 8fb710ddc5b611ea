// Kernels, from the source to a launch: where threads are, where they meet, and the ones that never do.

#include <string>

#include <nvrtc.h>

#include <vector_types.h>

#include "deaths.h"

static const char *SOURCE = R"(
extern "C" __global__ void places(int *out) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = block * threads + thread;
}

// Each block turns its numbers round, through shared memory of both kinds.
extern "C" __global__ void reverse(const int *in, int *out) {
    extern __shared__ int dynamic[];
    __shared__ int fixed[256];
    unsigned first = blockIdx.x * blockDim.x, i = threadIdx.x;
    dynamic[i] = in[first + i];
    __syncthreads();
    fixed[i] = dynamic[blockDim.x - 1 - i];
    __syncthreads();
    // Of another thread, so that it must have been there.
    unsigned other = (i + 1) % blockDim.x;
    out[first + other] = fixed[other];
}

// Without what orders them.
extern "C" __global__ void reverse_unordered(const int *in, int *out) {
    __shared__ int fixed[256];
    fixed[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = fixed[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void sum(const float *in, float *out, float scale) {
    float x = in[threadIdx.x] * scale;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(out, x);
    }
}

extern "C" __global__ void votes(unsigned *out) {
    unsigned vote = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
    if (threadIdx.x == 0) {
        *out = vote;
    }
}

// Half of a warp waits for the other half.
extern "C" __global__ void divergent() {
    if (threadIdx.x < 16) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void past_the_end(int *out) { out[threadIdx.x] = 0; }
)";

static CUmodule compile() {
    nvrtcProgram program;
    EXPECT(nvrtcCreateProgram(&program, SOURCE, "test.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS);
    const nvrtcResult compiled = nvrtcCompileProgram(program, 0, nullptr);
    size_t size;
    EXPECT(nvrtcGetProgramLogSize(program, &size) == NVRTC_SUCCESS);
    std::string log(size, ' ');
    EXPECT(nvrtcGetProgramLog(program, log.data()) == NVRTC_SUCCESS);
    fputs(log.c_str(), stderr);
    EXPECT(compiled == NVRTC_SUCCESS);
    EXPECT(nvrtcGetPTXSize(program, &size) == NVRTC_SUCCESS);
    std::string ptx(size, ' ');
    EXPECT(nvrtcGetPTX(program, ptx.data()) == NVRTC_SUCCESS);
    EXPECT(nvrtcDestroyProgram(&program) == NVRTC_SUCCESS);
    CUmodule module;
    EXPECT(cuModuleLoadData(&module, ptx.data()) == CUDA_SUCCESS);
    return module;
}

template <class... A> static CUresult launch(CUmodule module, const char *name, dim3 grid, dim3 block, unsigned shared, A... arguments) {
    CUfunction function;
    EXPECT(cuModuleGetFunction(&function, module, name) == CUDA_SUCCESS);
    // The last one is there for launches without arguments.
    void *pointers[] = {&arguments..., nullptr};
    return cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, nullptr, pointers, nullptr);
}

static std::vector<int> count_up(size_t count) {
    std::vector<int> values(count);
    for (size_t i = 0; i < count; i++) {
        values[i] = (int)i;
    }
    return values;
}

static void refused() {
    nvrtcProgram program;
    EXPECT(nvrtcCreateProgram(&program, "this is no C", "test.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS);
    EXPECT(nvrtcCompileProgram(program, 0, nullptr) == NVRTC_ERROR_COMPILATION);
    const char *option = "--use_fast_math";
    EXPECT(nvrtcCompileProgram(program, 1, &option) == NVRTC_ERROR_INVALID_OPTION);
    CUmodule module;
    EXPECT(cuModuleLoadData(&module, ".version 8.0") == CUDA_ERROR_INVALID_PTX);
}

int main() {
    expect_death("divergent: threads of a block wait for each other for ever: 16 in __syncthreads, 16 for lanes", [] {
        use_device(0);
        launch(compile(), "divergent", 1, 32, 0);
        cuStreamSynchronize(nullptr);
    });
    expect_death("0 bytes past the end of a block of 12 bytes", [] {
        use_device(0);
        Array<int> out(3);
        launch(compile(), "past_the_end", 1, 4, 0, out.data());
    });

    use_device(0);
    CUmodule module = compile();
    {
        Array<int> out(2 * 3 * 2 * 4 * 2 * 3);
        EXPECT(launch(module, "places", dim3(2, 3, 2), dim3(4, 2, 3), 0, out.data()) == CUDA_SUCCESS);
        EXPECT(out.read() == count_up(out.count));
    }
    {
        auto numbers = count_up(512), expected = numbers;
        Array<int> in(numbers), out(512);
        EXPECT(launch(module, "reverse", 2, 256, 256 * sizeof(int), in.data(), out.data()) == CUDA_SUCCESS);
        for (int i = 0; i < 512; i++) {
            expected[i] = i / 256 * 256 + 255 - i % 256;
        }
        EXPECT(out.read() == expected);
        EXPECT(launch(module, "reverse_unordered", 1, 256, 0, in.data(), out.data()) == CUDA_SUCCESS);
        expected.resize(256);
        auto unordered = out.read();
        unordered.resize(256);
        EXPECT(unordered != expected);
    }
    {
        Array<float> in(std::vector<float>(96, 1.5f)), out(std::vector<float>{1.0f});
        EXPECT(launch(module, "sum", 1, 96, 0, in.data(), out.data(), 2.0f) == CUDA_SUCCESS);
        EXPECT(out.read()[0] == 1.0f + 96 * 3.0f);
    }
    {
        Array<unsigned> out(1);
        EXPECT(launch(module, "votes", 1, 32, 0, out.data()) == CUDA_SUCCESS);
        EXPECT(out.read()[0] == 0x49249249u);
    }
    EXPECT(launch(module, "divergent", 0, 32, 0) == CUDA_ERROR_INVALID_VALUE);
    EXPECT(launch(module, "divergent", 1, 1025, 0) == CUDA_ERROR_INVALID_VALUE);
    CUfunction none;
    EXPECT(cuModuleGetFunction(&none, module, "no_such_kernel") == CUDA_ERROR_NOT_FOUND);
    refused();
    puts("kernels: ok");
}
