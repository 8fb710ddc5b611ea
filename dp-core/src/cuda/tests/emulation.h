// CUDA's words for a C++ compiler, so that the kernels run on the host, from the same sources.
//
// The threads of a block are threads. Blocks follow one another, so `__shared__` memory may be static.

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim3 {
    unsigned int x;
};
static Dim3 blockDim, gridDim;
static thread_local Dim3 blockIdx, threadIdx;

template <class To, class From> static To bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From), "one size");
    To to;
    std::memcpy(&to, &x, sizeof to);
    return to;
}
static unsigned int __float_as_uint(float x) { return bits_of<unsigned int>(x); }
static float __uint_as_float(unsigned int x) { return bits_of<float>(x); }
static long long __double_as_longlong(double x) { return bits_of<long long>(x); }

static std::mutex atomics;
static unsigned int atomicMax(unsigned int *at, unsigned int x) {
    std::lock_guard<std::mutex> lock(atomics);
    unsigned int before = *at;
    *at = x > before ? x : before;
    return before;
}
static unsigned long long atomicAdd(unsigned long long *at, unsigned long long x) {
    std::lock_guard<std::mutex> lock(atomics);
    unsigned long long before = *at;
    *at = before + x;
    return before;
}

// Where the threads of a block meet. One that has left is no longer waited for.
class Barrier {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned int members = 0, waiting = 0, round = 0;

    void open() {
        waiting = 0;
        round++;
        changed.notify_all();
    }

  public:
    void reset(unsigned int count) { members = count; }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        if (++waiting == members) {
            open();
            return;
        }
        unsigned int now = round;
        changed.wait(lock, [&] { return round != now; });
    }
    void leave() {
        std::lock_guard<std::mutex> lock(mutex);
        if (--members == waiting && waiting > 0) {
            open();
        }
    }
};
static Barrier barrier;
static void __syncthreads() { barrier.wait(); }

template <class Args>
static void emulate(void (*kernel)(Args), unsigned int blocks, unsigned int threads, const void *args) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (unsigned int block = 0; block < blocks; block++) {
        barrier.reset(threads);
        std::vector<std::thread> team;
        for (unsigned int thread = 0; thread < threads; thread++) {
            team.emplace_back([=] {
                blockIdx.x = block;
                threadIdx.x = thread;
                kernel(*static_cast<const Args *>(args));
                barrier.leave();
            });
        }
        for (std::thread &thread : team) {
            thread.join();
        }
    }
}

template <class Args> static size_t size_of_args(void (*)(Args)) { return sizeof(Args); }
