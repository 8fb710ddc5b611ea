// Streams: a thread each, which does what it is given in order. Streams know nothing of each other but through events and the
// rules of the legacy default stream, so a missing event can show: CUDA_SIMULATOR_DELAY_US makes each piece of work begin late.

#include "driver.h"

#include <atomic>
#include <map>
#include <thread>
#include <unordered_map>
#include <unordered_set>

namespace simulator {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t deadline_seconds() {
    static const uint64_t seconds = setting("CUDA_SIMULATOR_DEADLINE_S", 600);
    return seconds;
}

// All that are not closed. Never destroyed: threads of streams outlive `main`.
struct Streams {
    std::mutex mutex;
    std::unordered_map<CUstream, std::shared_ptr<Stream>> by_handle;
    // Per device.
    std::map<int, std::shared_ptr<Stream>> legacy;
    // All with work left, closed ones too.
    std::unordered_set<std::shared_ptr<Stream>> running;
};

Streams &streams() {
    static Streams *all = new Streams;
    return *all;
}

// The streams of a host thread (CU_STREAM_PER_THREAD), by device.
struct PerThread {
    std::map<int, std::shared_ptr<Stream>> by_device;
    ~PerThread() {
        for (auto &[device, stream] : by_device) {
            stream->close();
        }
    }
};
thread_local PerThread per_thread;

} // namespace

std::shared_ptr<Stream> Stream::start(int device, bool blocking) {
    static std::atomic<uint64_t> count{0};
    std::shared_ptr<Stream> stream(new Stream(device, blocking));
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        streams().running.insert(stream);
    }
    std::thread([stream, number = ++count] { stream->run(number); }).detach();
    return stream;
}

void Stream::run(uint64_t number_of_stream) {
    const uint64_t longest_delay = setting("CUDA_SIMULATOR_DELAY_US", 0);
    uint64_t random = number_of_stream * 0x9e3779b97f4a7c15u;
    for (;;) {
        std::function<void()> work;
        {
            std::unique_lock<std::mutex> lock(mutex);
            has_work.wait(lock, [&] { return !queue.empty() || closing; });
            if (queue.empty()) {
                break;
            }
            work = std::move(queue.front());
            queue.pop_front();
        }
        if (longest_delay > 0) {
            // xorshift64: the same delays in every run.
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            std::this_thread::sleep_for(std::chrono::microseconds(random % (longest_delay + 1)));
        }
        work();
        work = nullptr; // what it holds is released before the work counts as done
        std::lock_guard<std::mutex> lock(mutex);
        num_completed++;
        has_completed_some.notify_all();
    }
    release_stacks();
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().running.erase(shared_from_this());
}

uint64_t Stream::push(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    has_work.notify_one();
    return ++num_submitted;
}

void Stream::wait_for(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto deadline = std::chrono::seconds(deadline_seconds());
    if (!has_completed_some.wait_for(lock, deadline, [&] { return num_completed >= number; })) {
        die("work %llu of a stream of device %d is not done after %llu s; %llu are done, %llu submitted", //
            (unsigned long long)number, device, (unsigned long long)deadline_seconds(),
            (unsigned long long)num_completed, (unsigned long long)num_submitted);
    }
}

bool Stream::has_completed(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex);
    return num_completed >= number;
}

uint64_t Stream::submitted() {
    std::lock_guard<std::mutex> lock(mutex);
    return num_submitted;
}

void Stream::close() {
    std::lock_guard<std::mutex> lock(mutex);
    closing = true;
    has_work.notify_one();
}

std::shared_ptr<Stream> find_stream(CUstream handle) {
    Context *context = current_context();
    if (handle == CU_STREAM_PER_THREAD) {
        if (!context) {
            return nullptr;
        }
        auto &own = per_thread.by_device[context->device];
        if (!own) {
            own = Stream::start(context->device, true);
        }
        return own;
    }
    if (!handle || handle == CU_STREAM_LEGACY) {
        if (!context) {
            return nullptr;
        }
        {
            std::lock_guard<std::mutex> lock(streams().mutex);
            auto found = streams().legacy.find(context->device);
            if (found != streams().legacy.end()) {
                return found->second;
            }
        }
        auto stream = Stream::start(context->device, true);
        std::lock_guard<std::mutex> lock(streams().mutex);
        // Another thread may have been first; then this one has no work and ends.
        auto [place, is_new] = streams().legacy.emplace(context->device, stream);
        if (!is_new) {
            stream->close();
        }
        return place->second;
    }
    std::lock_guard<std::mutex> lock(streams().mutex);
    auto found = streams().by_handle.find(handle);
    return found == streams().by_handle.end() ? nullptr : found->second;
}

uint64_t submit(const std::shared_ptr<Stream> &stream, std::function<void()> work) {
    if (!stream->blocking) {
        return stream->push(std::move(work));
    }
    // The legacy default stream waits for all blocking streams, and they wait for it. Only work that is submitted already is waited
    // for, so no two wait for each other.
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> before;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        auto legacy = streams().legacy.find(stream->device);
        if (legacy != streams().legacy.end() && legacy->second == stream) {
            for (const auto &other : streams().running) {
                if (other != stream && other->blocking && other->device == stream->device) {
                    before.emplace_back(other, other->submitted());
                }
            }
        } else if (legacy != streams().legacy.end()) {
            before.emplace_back(legacy->second, legacy->second->submitted());
        }
    }
    return stream->push([before = std::move(before), work = std::move(work)] {
        for (const auto &[other, number] : before) {
            other->wait_for(number);
        }
        work();
    });
}

void enqueue(CUstream handle, std::function<void()> work) {
    auto stream = find_stream(handle);
    if (!stream) {
        die("enqueue: no stream %p, or no current context", (void *)handle);
    }
    submit(stream, std::move(work));
}

namespace {
std::vector<std::shared_ptr<Stream>> running_streams() {
    std::lock_guard<std::mutex> lock(streams().mutex);
    return {streams().running.begin(), streams().running.end()};
}
} // namespace

void wait_for_device(int device) {
    for (const auto &stream : running_streams()) {
        if (stream->device == device) {
            stream->wait_for(stream->submitted());
        }
    }
}

bool wait_for_all(double seconds) {
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    for (const auto &stream : running_streams()) {
        while (!stream->has_completed(stream->submitted())) {
            if (Clock::now() > deadline) {
                return false;
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    return true;
}

} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto stream = Stream::start(context->device, !(flags & CU_STREAM_NON_BLOCKING));
    *handle = reinterpret_cast<CUstream>(stream.get());
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().by_handle.emplace(*handle, stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *handle, unsigned int flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

CUresult cuStreamDestroy(CUstream handle) {
    std::shared_ptr<Stream> stream;
    {
        std::lock_guard<std::mutex> lock(streams().mutex);
        auto found = streams().by_handle.find(handle);
        if (found == streams().by_handle.end()) {
            warn("cuStreamDestroy: no stream %p", (void *)handle);
            return CUDA_ERROR_INVALID_HANDLE;
        }
        stream = found->second;
        streams().by_handle.erase(found);
    }
    stream->close();
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    // By way of `submit`: the legacy default stream is done when those before it are.
    stream->wait_for(submit(stream, [] {}));
    trim_pool(stream->device);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream handle) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return stream->has_completed(stream->submitted()) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data) {
    auto stream = find_stream(handle);
    if (!stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    submit(stream, [=] { function(data); });
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    wait_for_device(context->device);
    trim_pool(context->device);
    return CUDA_SUCCESS;
}

} // extern "C"
