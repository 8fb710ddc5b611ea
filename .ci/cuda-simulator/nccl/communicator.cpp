#include "communicator.h"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

namespace nccl {

namespace {

// Set when the process is to exit: then no wait goes on.
std::atomic<bool> is_exiting{false};

struct Warning {
    std::mutex mutex;
    std::string text;
};
Warning &warning() {
    static Warning *warning = new Warning;
    return *warning;
}

// Names of segments that not all ranks have opened: nobody else removes them if this process ends now.
struct Names {
    std::mutex mutex;
    std::set<std::string> names;
};
Names &names() {
    static Names *names = new Names;
    return *names;
}

void at_exit() {
    is_exiting = true;
    std::lock_guard<std::mutex> lock(names().mutex);
    for (const std::string &name : names().names) Segment::remove(name);
}

} // namespace

void warn(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (getenv("NCCL_DEBUG")) fprintf(stderr, "CUDA simulator: NCCL WARN %s\n", text);
    std::lock_guard<std::mutex> lock(warning().mutex);
    warning().text = text;
}

std::string last_warning() {
    std::lock_guard<std::mutex> lock(warning().mutex);
    return warning().text;
}

bool must_fail(int rank, const std::string &operation) {
    const char *wanted = getenv("CUDA_SIMULATOR_NCCL_FAIL");
    return wanted && std::to_string(rank) + ":" + operation == wanted;
}

std::shared_ptr<Communicator> Communicator::make(int rank, int num_ranks, const UniqueId &id, bool blocking) {
    // Here and not at the start of the library, so that it runs before libcuda's, which waits for streams.
    static std::once_flag once;
    std::call_once(once, [] { atexit(at_exit); });
    CUcontext context;
    int device;
    if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context || cuCtxGetDevice(&device) != CUDA_SUCCESS) return nullptr;
    std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
    return std::shared_ptr<Communicator>(new Communicator(rank, num_ranks, name, blocking, device, context));
}

Communicator::Communicator(int rank, int num_ranks, std::string name, bool blocking, int device, CUcontext context)
    : rank(rank), num_ranks(num_ranks), blocking(blocking), device(device), context(context), name_(std::move(name)) {}

Result Communicator::connect() {
    {
        std::lock_guard<std::mutex> lock(names().mutex);
        names().names.insert(name_);
    }
    segment_ = Segment::open(name_, num_ranks);
    if (!segment_) {
        warn("rank %d of %d cannot open the shared memory %s, or others count other ranks", rank, num_ranks, name_.c_str());
        return SYSTEM_ERROR;
    }
    CUuuid uuid;
    if (cuDeviceGetUuid_v2(&uuid, device) != CUDA_SUCCESS) return UNHANDLED_CUDA_ERROR;
    RankState &own = segment_->rank(rank);
    if (own.is_here) {
        warn("rank %d has come twice", rank);
        return INVALID_USAGE;
    }
    memcpy(own.device.data(), uuid.bytes, own.device.size());
    own.is_here = true;
    if (must_fail(rank, "init")) {
        warn("socketProgress: Connection closed by remote peer (CUDA_SIMULATOR_NCCL_FAIL)");
        return REMOTE_ERROR;
    }
    bool all = wait([this] {
        for (int peer = 0; peer < num_ranks; peer++) {
            if (!segment_->rank(peer).is_here) return false;
        }
        return true;
    });
    segment_->remove_name();
    {
        std::lock_guard<std::mutex> lock(names().mutex);
        names().names.erase(name_);
    }
    if (!all) return INTERNAL_ERROR;
    for (int left = 0; left < num_ranks; left++) {
        for (int right = left + 1; right < num_ranks; right++) {
            if (segment_->rank(left).device == segment_->rank(right).device) {
                warn("Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", left, right, device);
                return INVALID_USAGE;
            }
        }
    }
    return SUCCESS;
}

bool Communicator::connect(Algorithm algorithm) {
    segment_->rank(rank).is_connected[algorithm] = true;
    return wait([&] {
        for (int peer = 0; peer < num_ranks; peer++) {
            if (!segment_->rank(peer).is_connected[algorithm]) return false;
        }
        return true;
    });
}

void Communicator::set_progress(Result progress) {
    Result before = progress_.load();
    while (before == SUCCESS || before == IN_PROGRESS) {
        if (progress_.compare_exchange_weak(before, progress)) return;
    }
}

void Communicator::begin_progress() {
    Result before = SUCCESS;
    progress_.compare_exchange_strong(before, IN_PROGRESS);
}

void Communicator::launch(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(launching_);
    if (launched_.joinable()) launched_.join();
    launched_ = std::thread([self = shared_from_this(), job = std::move(job)] {
        // Jobs begin late, too, so that whoever does not wait for them is found out.
        if (const char *delay = getenv("CUDA_SIMULATOR_DELAY_US")) {
            std::this_thread::sleep_for(std::chrono::microseconds(atol(delay)));
        }
        cuCtxSetCurrent(self->context);
        job();
    });
}

uint64_t Communicator::begin_operation() { return begun_++; }

bool Communicator::wait_for_turn(uint64_t operation) {
    return wait([&] { return ended_.load() == operation; });
}

void Communicator::end_operation() { ended_++; }

bool Communicator::has_ended() const { return is_aborted_ || is_exiting; }

void Communicator::pause(int looks) {
    // Few looks, since the peers may need this processor.
    if (looks < 100) {
        std::this_thread::yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void Communicator::join() {
    std::lock_guard<std::mutex> lock(launching_);
    if (launched_.joinable()) launched_.join();
}

void Communicator::wait_for_streams() {
    // What is in streams ends early once the communicator is aborted, but only when the streams come to it.
    for (int looks = 0; begun_.load() != ended_.load() && !is_exiting; looks++) pause(looks);
}

void Communicator::abort() {
    is_aborted_ = true;
    if (must_fail(rank, "abort")) {
        while (!is_exiting) pause(100);
    }
    join();
    wait_for_streams();
    Segment::remove(name_);
}

void Communicator::finalize() {
    join();
    wait_for_streams();
}

void Communicator::destroy() {
    join();
    wait_for_streams();
    if (!segment_ || progress() != SUCCESS) return;
    segment_->rank(rank).has_left = true;
    wait([this] {
        for (int peer = 0; peer < num_ranks; peer++) {
            if (!segment_->rank(peer).has_left) return false;
        }
        return true;
    });
}

} // namespace nccl
