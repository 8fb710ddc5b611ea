// Events: marks in streams. Whoever waits for an event waits for the mark that was its last when the wait was called.

#include "driver.h"

#include <unordered_map>

namespace simulator {
namespace {

using Clock = std::chrono::steady_clock;

struct Mark {
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
    // Written by the stream, before the mark counts as reached.
    Clock::time_point reached;
};

struct Event {
    int device;
    bool timing;
    std::mutex mutex;
    std::shared_ptr<Mark> last; // null until it is recorded
};

struct Events {
    std::mutex mutex;
    std::unordered_map<CUevent, std::shared_ptr<Event>> by_handle;
};

Events &events() {
    static Events *all = new Events;
    return *all;
}

std::shared_ptr<Event> find(CUevent handle) {
    std::lock_guard<std::mutex> lock(events().mutex);
    auto found = events().by_handle.find(handle);
    return found == events().by_handle.end() ? nullptr : found->second;
}

std::shared_ptr<Mark> last_of(Event &event) {
    std::lock_guard<std::mutex> lock(event.mutex);
    return event.last;
}

} // namespace
} // namespace simulator

using namespace simulator;

extern "C" {

CUresult cuEventCreate(CUevent *handle, unsigned int flags) {
    Context *context = current_context();
    if (!context) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    auto event = std::make_shared<Event>();
    event->device = context->device;
    event->timing = !(flags & CU_EVENT_DISABLE_TIMING);
    *handle = reinterpret_cast<CUevent>(event.get());
    std::lock_guard<std::mutex> lock(events().mutex);
    events().by_handle.emplace(*handle, event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent handle) {
    std::lock_guard<std::mutex> lock(events().mutex);
    if (events().by_handle.erase(handle) == 0) {
        warn("cuEventDestroy: no event %p", (void *)handle);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    auto event = find(handle);
    auto stream = find_stream(stream_handle);
    if (!event || !stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->device != stream->device) {
        warn("cuEventRecord: an event of device %d on a stream of device %d", event->device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    auto mark = std::make_shared<Mark>();
    mark->stream = stream;
    std::lock_guard<std::mutex> lock(event->mutex);
    // The work does not hold the stream, which would then hold itself.
    mark->number = submit(stream, [weak = std::weak_ptr<Mark>(mark)] {
        if (auto mark = weak.lock()) {
            mark->reached = Clock::now();
        }
    });
    event->last = mark;
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent handle) {
    auto event = find(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    auto mark = last_of(*event);
    return !mark || mark->stream->has_completed(mark->number) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
    auto event = find(handle);
    if (!event) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (auto mark = last_of(*event)) {
        mark->stream->wait_for(mark->number);
        trim_pool(event->device);
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int) {
    auto event = find(handle);
    auto stream = find_stream(stream_handle);
    if (!event || !stream) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (auto mark = last_of(*event)) {
        submit(stream, [mark] { mark->stream->wait_for(mark->number); });
    }
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    auto first = find(from), second = find(to);
    if (!first || !second || !first->timing || !second->timing) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    auto begin = last_of(*first), end = last_of(*second);
    if (!begin || !end) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!begin->stream->has_completed(begin->number) || !end->stream->has_completed(end->number)) {
        return CUDA_ERROR_NOT_READY;
    }
    *milliseconds = std::chrono::duration<float, std::milli>(end->reached - begin->reached).count();
    return CUDA_SUCCESS;
}

} // extern "C"
