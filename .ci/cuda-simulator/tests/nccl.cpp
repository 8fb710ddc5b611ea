// NCCL's promises, with ranks as threads and as processes. Sums are of small integers, so they are exact in any order.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "../half.h"
#include "../nccl/types.h"
#include "expect.h"

using namespace nccl;
using Clock = std::chrono::steady_clock;

extern "C" {
Result ncclGetUniqueId(UniqueId *);
Result ncclCommInitRankConfig(void **, int, UniqueId, int, const Config *);
Result ncclCommInitAll(void **, int, const int *);
Result ncclCommGetAsyncError(void *, Result *);
Result ncclCommAbort(void *);
Result ncclCommDestroy(void *);
Result ncclGroupStart();
Result ncclGroupEnd();
Result ncclAllReduce(const void *, void *, size_t, int, int, void *, CUstream);
Result ncclReduceScatter(const void *, void *, size_t, int, int, void *, CUstream);
Result ncclAllGather(const void *, void *, size_t, int, void *, CUstream);
Result ncclBroadcast(const void *, void *, size_t, int, int, void *, CUstream);
Result ncclReduce(const void *, void *, size_t, int, int, int, void *, CUstream);
Result ncclSend(const void *, size_t, int, int, void *, CUstream);
Result ncclRecv(void *, size_t, int, int, void *, CUstream);
const char *ncclGetLastError(void *);
}

// A communicator that does not block, on the device with the rank's number unless another is named.
struct Rank {
    int rank, n;
    void *comm = nullptr;
    CUstream stream;

    Rank(int rank, int n, const UniqueId &id, int device) : rank(rank), n(n) {
        use_device(device);
        stream = new_stream();
        Config config{sizeof config, CONFIG_MAGIC, 21400, 0};
        EXPECT(ncclCommInitRankConfig(&comm, n, id, rank, &config) == IN_PROGRESS);
        EXPECT(comm != nullptr);
    }
    Rank(int rank, int n, const UniqueId &id) : Rank(rank, n, id, rank) {}

    Result progress() {
        Result progress;
        EXPECT(ncclCommGetAsyncError(comm, &progress) == SUCCESS);
        return progress;
    }
    // What it comes to; IN_PROGRESS after a second.
    Result settle() {
        auto end = Clock::now() + std::chrono::seconds(1);
        while (progress() == IN_PROGRESS && Clock::now() < end) usleep(100);
        return progress();
    }
    // Waits for a call to be in the stream, and for the stream.
    void finish(Result called) {
        EXPECT(called == IN_PROGRESS || called == SUCCESS);
        EXPECT(settle() == SUCCESS);
        EXPECT(cuStreamSynchronize(stream) == CUDA_SUCCESS);
    }
    bool is_idle() { return cuStreamQuery(stream) == CUDA_SUCCESS; }
};

void threads(int n, const std::function<void(int, const UniqueId &)> &body) {
    UniqueId id;
    EXPECT(ncclGetUniqueId(&id) == SUCCESS);
    std::vector<std::thread> all;
    for (int rank = 0; rank < n; rank++) all.emplace_back([&, rank] { body(rank, id); });
    for (std::thread &thread : all) thread.join();
}

// Forks; must be called before anything of CUDA. Returns the processes.
std::vector<pid_t> processes(int n, const std::function<void(int, const UniqueId &)> &body) {
    UniqueId id;
    EXPECT(ncclGetUniqueId(&id) == SUCCESS);
    std::vector<pid_t> children;
    for (int rank = 0; rank < n; rank++) {
        pid_t child = fork();
        EXPECT(child >= 0);
        if (child == 0) {
            body(rank, id);
            exit(0);
        }
        children.push_back(child);
    }
    return children;
}

template <class T> constexpr int TYPE = -1;
template <> constexpr int TYPE<float> = FLOAT32;
template <> constexpr int TYPE<double> = FLOAT64;
template <> constexpr int TYPE<simulator::Half> = FLOAT16;
template <> constexpr int TYPE<simulator::Bfloat16> = BFLOAT16;
template <> constexpr int TYPE<uint8_t> = UINT8;
template <> constexpr int TYPE<uint32_t> = UINT32;
template <> constexpr int TYPE<int64_t> = INT64;

int value(int rank, size_t i) { return int(i % 5) + 2 * rank; }

double reduced(int op, int n, size_t i) {
    double sum = 0, product = 1;
    for (int rank = 0; rank < n; rank++) {
        sum += value(rank, i);
        product *= value(rank, i);
    }
    switch (op) {
    case SUM: return sum;
    case PROD: return product;
    case MAX: return value(n - 1, i);
    case MIN: return value(0, i);
    default: return sum / n;
    }
}

template <class T>
void collectives(Rank &r) {
    int n = r.n;
    for (size_t part : {size_t(1), size_t(1000), size_t(70001)}) {
        size_t len = part * n;
        std::vector<T> mine;
        for (size_t i = 0; i < len; i++) mine.push_back(T(value(r.rank, i)));
        Array<T> buffer(mine);
        T *own = buffer.data() + r.rank * part;
        for (int op : {SUM, PROD, MAX, MIN, AVG}) {
            // 1/3 is rounded; the others' results are numbers of every type.
            double tolerance = op == AVG && n == 3 ? 0.02 : 0;
            auto equal = [&](T got, size_t i) {
                double expected = reduced(op, n, i);
                if (tolerance == 0 && (op != PROD || expected < 256)) EXPECT(double(got) == expected);
                if (tolerance != 0) EXPECT(std::fabs(double(got) - expected) <= tolerance * (1 + expected));
            };
            buffer.write(mine);
            r.finish(ncclAllReduce(buffer.data(), buffer.data(), len, TYPE<T>, op, r.comm, r.stream));
            auto all = buffer.read();
            for (size_t i = 0; i < len; i++) equal(all[i], i);

            buffer.write(mine);
            r.finish(ncclReduceScatter(buffer.data(), own, part, TYPE<T>, op, r.comm, r.stream));
            all = buffer.read();
            for (size_t i = r.rank * part; i < (r.rank + 1) * part; i++) equal(all[i], i);

            buffer.write(mine);
            r.finish(ncclReduce(buffer.data(), buffer.data(), len, TYPE<T>, op, n - 1, r.comm, r.stream));
            all = buffer.read();
            for (size_t i = 0; i < len; i++) {
                if (r.rank == n - 1) equal(all[i], i);
            }
        }
        buffer.write(mine);
        r.finish(ncclAllGather(own, buffer.data(), part, TYPE<T>, r.comm, r.stream));
        auto all = buffer.read();
        for (size_t i = 0; i < len; i++) EXPECT(double(all[i]) == value(i / part, i));

        buffer.write(mine);
        r.finish(ncclBroadcast(buffer.data(), buffer.data(), len, TYPE<T>, n / 2, r.comm, r.stream));
        all = buffer.read();
        for (size_t i = 0; i < len; i++) EXPECT(double(all[i]) == value(n / 2, i));
    }
}

// To the next rank and from the previous one, more than the channels hold.
void exchange(Rank &r) {
    constexpr size_t COUNT = 1 << 20;
    int next = (r.rank + 1) % r.n, previous = (r.rank + r.n - 1) % r.n;
    Array<float> from(std::vector<float>(COUNT, r.rank)), to(COUNT);
    EXPECT(ncclGroupStart() == SUCCESS);
    EXPECT(ncclSend(from.data(), COUNT, FLOAT32, next, r.comm, r.stream) == SUCCESS);
    EXPECT(ncclRecv(to.data(), COUNT, FLOAT32, previous, r.comm, r.stream) == SUCCESS);
    r.finish(ncclGroupEnd());
    EXPECT(to.read() == std::vector<float>(COUNT, previous));
}

void all_collectives(int rank, int n, const UniqueId &id) {
    Rank r(rank, n, id);
    EXPECT(r.settle() == SUCCESS);
    collectives<float>(r);
    collectives<double>(r);
    collectives<simulator::Half>(r);
    collectives<simulator::Bfloat16>(r);
    collectives<uint8_t>(r);
    collectives<uint32_t>(r);
    collectives<int64_t>(r);
    exchange(r);
    EXPECT(ncclCommDestroy(r.comm) == SUCCESS);
}

void in_processes() {
    auto children = processes(3, [](int rank, const UniqueId &id) { all_collectives(rank, 3, id); });
    for (pid_t child : children) {
        int status;
        EXPECT(waitpid(child, &status, 0) == child && status == 0);
    }
}

// The others wait until they abort: NCCL does not say that a process on the same machine is gone.
void a_killed_process() {
    auto children = processes(3, [](int rank, const UniqueId &id) {
        Rank r(rank, 3, id);
        EXPECT(r.settle() == SUCCESS);
        Array<float> numbers(std::vector<float>(1000, 1));
        r.finish(ncclAllReduce(numbers.data(), numbers.data(), 1000, FLOAT32, SUM, r.comm, r.stream));
        if (rank == 1) raise(SIGKILL);
        EXPECT(ncclAllReduce(numbers.data(), numbers.data(), 1000, FLOAT32, SUM, r.comm, r.stream) != INVALID_ARGUMENT);
        r.settle();
        usleep(200000);
        EXPECT(!r.is_idle());
        EXPECT(r.progress() == SUCCESS);
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
        EXPECT(cuStreamSynchronize(r.stream) == CUDA_SUCCESS);
    });
    for (int rank = 0; rank < 3; rank++) {
        int status;
        EXPECT(waitpid(children[rank], &status, 0) == children[rank]);
        EXPECT(rank == 1 ? WIFSIGNALED(status) : status == 0);
    }
}

void a_rank_that_does_not_come() {
    threads(1, [](int, const UniqueId &id) {
        Rank r(0, 2, id);
        Array<float> number(1);
        EXPECT(r.settle() == IN_PROGRESS);
        EXPECT(ncclAllReduce(number.data(), number.data(), 1, FLOAT32, SUM, r.comm, r.stream) == INVALID_ARGUMENT);
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
    });
}

void two_ranks_on_one_device() {
    threads(2, [](int rank, const UniqueId &id) {
        Rank r(rank, 2, id, 3);
        EXPECT(r.settle() == INVALID_USAGE);
        EXPECT(std::string(ncclGetLastError(r.comm)).find("Duplicate GPU detected") == 0);
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
    });
}

// A rank that comes late, lengths that differ, and an operation that only one rank calls: all of it waits until the abort.
void calls_that_do_not_fit() {
    threads(2, [](int rank, const UniqueId &id) {
        Rank r(rank, 2, id);
        EXPECT(r.settle() == SUCCESS);
        Array<float> numbers(std::vector<float>(100, 1));
        auto all_reduce = [&](size_t count) {
            return ncclAllReduce(numbers.data(), numbers.data(), count, FLOAT32, SUM, r.comm, r.stream);
        };
        if (rank == 1) usleep(300000);
        EXPECT(all_reduce(100) == IN_PROGRESS);
        // Connecting waits for the other rank, and so does whoever calls again.
        if (rank == 0) EXPECT(all_reduce(100) == INVALID_ARGUMENT);
        r.finish(SUCCESS);
        EXPECT(numbers.read() == std::vector<float>(100, 2));
        all_reduce(rank == 0 ? 100 : 90);
        EXPECT(r.settle() == SUCCESS);
        usleep(100000);
        EXPECT(!r.is_idle());
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
        EXPECT(cuStreamSynchronize(r.stream) == CUDA_SUCCESS);
    });
}

// Two streams of one communicator: in the order of the calls, however the streams run.
void two_streams() {
    threads(2, [](int rank, const UniqueId &id) {
        Rank r(rank, 2, id);
        EXPECT(r.settle() == SUCCESS);
        CUstream second = new_stream();
        Array<float> numbers(std::vector<float>(5000, 1));
        for (int i = 0; i < 20; i++) {
            CUstream stream = i % 2 == 0 ? r.stream : second;
            ncclAllReduce(numbers.data(), numbers.data(), 5000, FLOAT32, i < 10 ? SUM : AVG, r.comm, stream);
            EXPECT(r.settle() == SUCCESS);
        }
        EXPECT(cuStreamSynchronize(second) == CUDA_SUCCESS);
        EXPECT(numbers.read() == std::vector<float>(5000, 1024));
        EXPECT(ncclCommDestroy(r.comm) == SUCCESS);
    });
}

void injected_failures() {
    setenv("CUDA_SIMULATOR_NCCL_FAIL", "1:2", 1);
    threads(2, [](int rank, const UniqueId &id) {
        Rank r(rank, 2, id);
        EXPECT(r.settle() == SUCCESS);
        Array<float> numbers(std::vector<float>(100, 1));
        for (int i = 0; i < 2; i++) {
            ncclAllReduce(numbers.data(), numbers.data(), 100, FLOAT32, SUM, r.comm, r.stream);
            r.settle();
        }
        usleep(100000);
        EXPECT(r.progress() == (rank == 1 ? REMOTE_ERROR : SUCCESS));
        EXPECT(!r.is_idle());
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
    });
    setenv("CUDA_SIMULATOR_NCCL_FAIL", "0:init", 1);
    threads(1, [](int rank, const UniqueId &id) {
        Rank r(rank, 1, id);
        EXPECT(r.settle() == REMOTE_ERROR);
        EXPECT(ncclCommAbort(r.comm) == SUCCESS);
    });
    unsetenv("CUDA_SIMULATOR_NCCL_FAIL");
}

// One thread for all ranks, which only a group makes possible.
void one_thread_with_communicators_that_block() {
    constexpr int N = 4;
    void *comms[N];
    EXPECT(ncclCommInitAll(comms, N, nullptr) == SUCCESS);
    std::vector<CUcontext> contexts;
    std::vector<CUstream> streams;
    std::vector<std::unique_ptr<Array<double>>> arrays;
    for (int rank = 0; rank < N; rank++) {
        contexts.push_back(use_device(rank));
        streams.push_back(new_stream());
        arrays.push_back(std::make_unique<Array<double>>(std::vector<double>(1000, rank)));
    }
    EXPECT(ncclGroupStart() == SUCCESS);
    for (int rank = 0; rank < N; rank++) {
        double *data = arrays[rank]->data();
        EXPECT(ncclAllReduce(data, data, 1000, FLOAT64, SUM, comms[rank], streams[rank]) == SUCCESS);
    }
    EXPECT(ncclGroupEnd() == SUCCESS);
    for (int rank = 0; rank < N; rank++) {
        EXPECT(cuCtxSetCurrent(contexts[rank]) == CUDA_SUCCESS);
        EXPECT(cuStreamSynchronize(streams[rank]) == CUDA_SUCCESS);
        EXPECT(arrays[rank]->read() == std::vector<double>(1000, 6));
        EXPECT(ncclCommAbort(comms[rank]) == SUCCESS);
    }
}

int main() {
    in_processes();
    a_killed_process();
    for (int n = 1; n <= 4; n++) {
        threads(n, [n](int rank, const UniqueId &id) { all_collectives(rank, n, id); });
    }
    a_rank_that_does_not_come();
    two_ranks_on_one_device();
    calls_that_do_not_fit();
    two_streams();
    injected_failures();
    one_thread_with_communicators_that_block();
    puts("nccl: passed");
}
