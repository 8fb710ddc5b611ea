// Streams, events and memory: what is ordered is in order, and each kind of mistake that the simulator is there for shows.

#include <chrono>
#include <thread>

#include "../simulator.h"
#include "deaths.h"

using simulator::enqueue;

static void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

static CUdeviceptr allocate(size_t bytes, CUstream stream) {
    CUdeviceptr at;
    EXPECT(cuMemAllocAsync(&at, bytes, stream) == CUDA_SUCCESS);
    return at;
}

static int *ints(CUdeviceptr at) { return reinterpret_cast<int *>(at); }

// One stream writes late; another copies. Returns what arrives.
static int handed_over(bool with_event) {
    CUstream writer = new_stream(), reader = new_stream();
    CUdeviceptr from = allocate(sizeof(int), writer), to = allocate(sizeof(int), reader);
    EXPECT(cuStreamSynchronize(writer) == CUDA_SUCCESS);
    CUevent written;
    EXPECT(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    enqueue(writer, [] { sleep_ms(30); });
    EXPECT(cuMemsetD32Async(from, 7, 1, writer) == CUDA_SUCCESS);
    EXPECT(cuEventRecord(written, writer) == CUDA_SUCCESS);
    EXPECT(cuEventQuery(written) == CUDA_ERROR_NOT_READY);
    if (with_event) {
        EXPECT(cuStreamWaitEvent(reader, written, 0) == CUDA_SUCCESS);
    }
    // Of an event, the mark counts that was there when the wait was called.
    EXPECT(cuEventRecord(written, writer) == CUDA_SUCCESS);
    EXPECT(cuMemcpyDtoDAsync(to, from, sizeof(int), reader) == CUDA_SUCCESS);
    int got = 0;
    EXPECT(cuMemcpyDtoHAsync(&got, to, sizeof got, reader) == CUDA_SUCCESS);
    EXPECT(cuEventSynchronize(written) == CUDA_SUCCESS);
    EXPECT(cuEventQuery(written) == CUDA_SUCCESS);
    EXPECT(cuEventDestroy(written) == CUDA_SUCCESS);
    EXPECT(cuMemFreeAsync(from, writer) == CUDA_SUCCESS);
    EXPECT(cuMemFreeAsync(to, reader) == CUDA_SUCCESS);
    EXPECT(cuStreamDestroy(writer) == CUDA_SUCCESS && cuStreamDestroy(reader) == CUDA_SUCCESS);
    return got;
}

// Whether `second` waits for work of `first`.
static bool waits(CUstream first, CUstream second) {
    bool done = false, was_done = false;
    enqueue(first, [&] { sleep_ms(20), done = true; });
    enqueue(second, [&] { was_done = done; });
    EXPECT(cuCtxSynchronize() == CUDA_SUCCESS);
    return was_done;
}

static void default_streams() {
    CUstream blocking, free_stream = new_stream();
    EXPECT(cuStreamCreate(&blocking, CU_STREAM_DEFAULT) == CUDA_SUCCESS);
    EXPECT(waits(blocking, nullptr) && waits(nullptr, blocking));
    EXPECT(waits(CU_STREAM_PER_THREAD, nullptr) && waits(nullptr, CU_STREAM_PER_THREAD));
    EXPECT(!waits(free_stream, nullptr) && !waits(nullptr, free_stream));
    EXPECT(!waits(blocking, CU_STREAM_PER_THREAD) && !waits(blocking, free_stream));
}

static cuuint64_t attribute(CUmemPool_attribute which) {
    CUmemoryPool pool;
    EXPECT(cuDeviceGetMemPool(&pool, 0) == CUDA_SUCCESS);
    cuuint64_t value;
    EXPECT(cuMemPoolGetAttribute(pool, which, &value) == CUDA_SUCCESS);
    return value;
}

static void statistics() {
    CUstream stream = new_stream();
    const auto before = attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    CUdeviceptr a = allocate(1000, stream), b = allocate(1, stream);
    EXPECT(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == before + 1024 + 512);
    enqueue(stream, [] { sleep_ms(20); });
    EXPECT(cuMemFreeAsync(a, stream) == CUDA_SUCCESS);
    // It counts until the stream has come there.
    EXPECT(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == before + 1024 + 512);
    EXPECT(cuStreamSynchronize(stream) == CUDA_SUCCESS);
    EXPECT(attribute(CU_MEMPOOL_ATTR_USED_MEM_CURRENT) == before + 512);
    EXPECT(attribute(CU_MEMPOOL_ATTR_USED_MEM_HIGH) >= before + 1024 + 512);
    EXPECT(cuMemFreeAsync(b, stream) == CUDA_SUCCESS);
    CUdeviceptr huge;
    EXPECT(cuMemAllocAsync(&huge, size_t(1) << 45, stream) == CUDA_ERROR_OUT_OF_MEMORY);
    size_t free_bytes, total;
    EXPECT(cuMemGetInfo(&free_bytes, &total) == CUDA_SUCCESS && free_bytes <= total);
}

static void fresh_and_freed_memory() {
    CUstream stream = new_stream();
    CUdeviceptr at = allocate(4, stream);
    EXPECT(cuStreamSynchronize(stream) == CUDA_SUCCESS && *ints(at) == -1);
    *ints(at) = 5;
    EXPECT(simulator::device_of(ints(at)) == 0);
    EXPECT(cuMemFreeAsync(at, stream) == CUDA_SUCCESS && cuStreamSynchronize(stream) == CUDA_SUCCESS);
    EXPECT(*ints(at) == -1 && simulator::device_of(ints(at)) == -1);
    // A copy from or to where there is no block is refused.
    EXPECT(cuMemsetD8Async(at, 0, 1, stream) == CUDA_ERROR_INVALID_VALUE);
}

int main() {
    expect_death("1 bytes past the end of a block of 6 bytes", [] {
        use_device(0);
        CUdeviceptr at = allocate(6, nullptr);
        enqueue(nullptr, [=] { reinterpret_cast<char *>(at)[7] = 0; });
        cuMemFreeAsync(at, nullptr);
        cuStreamSynchronize(nullptr);
    });
    expect_death("4 bytes before a block", [] {
        use_device(0);
        CUdeviceptr at = allocate(6, nullptr);
        enqueue(nullptr, [=] { ints(at)[-1] = 0; }); // found at the end: it is not freed
    });
    expect_death("after it was freed", [] {
        use_device(0);
        CUdeviceptr at = allocate(4, nullptr);
        cuMemFreeAsync(at, nullptr);
        enqueue(nullptr, [=] { *ints(at) = 1; });
    });
    expect_death("freed already", [] {
        use_device(0);
        CUdeviceptr at = allocate(4, nullptr);
        cuMemFreeAsync(at, nullptr);
        cuMemFreeAsync(at, nullptr);
    });
    setenv("CUDA_SIMULATOR_DEADLINE_S", "1", 1);
    expect_death("is not done after 1 s", [] {
        use_device(0);
        enqueue(nullptr, [] { sleep_ms(5000); });
        cuStreamSynchronize(nullptr);
    });
    unsetenv("CUDA_SIMULATOR_DEADLINE_S");

    use_device(0);
    EXPECT(handed_over(true) == 7);
    EXPECT(handed_over(false) == -1);
    default_streams();
    statistics();
    fresh_and_freed_memory();
    CUstream stream = new_stream();
    EXPECT(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_ERROR_NOT_SUPPORTED);
    puts("driver: ok");
}
