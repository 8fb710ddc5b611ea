// The parts of libcuda.so.1: devices and contexts, streams and events, memory, modules and launches.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../simulator.h"

namespace simulator {

// Says what is wrong with the program under test, and ends it: with these errors a device would go on with wrong numbers.
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
// A line on stderr, for what returns an error.
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The value of an environment variable that holds a whole number.
uint64_t setting(const char *name, uint64_t otherwise);

// --- Devices ------------------------------------------------------------------------------------------------------------------

// The primary context of a device; there is no other kind. Valid while it is retained.
struct Context {
    int device;
    unsigned retained = 0;
};

int num_devices();
// Null if the calling thread has none, or one that has been released.
Context *current_context();
Context *context_of(int device);

// --- Streams ------------------------------------------------------------------------------------------------------------------

// Work of one device, done one piece after the other by a thread of its own.
class Stream : public std::enable_shared_from_this<Stream> {
  public:
    // `blocking`: it and the legacy default stream wait for each other.
    static std::shared_ptr<Stream> start(int device, bool blocking);

    // Puts work at the end. Returns its number: it is done once `completed` has reached that.
    uint64_t push(std::function<void()> work);
    // Waits on the host. Aborts after the deadline (CUDA_SIMULATOR_DEADLINE_S).
    void wait_for(uint64_t number);
    bool has_completed(uint64_t number);
    uint64_t submitted();
    // Ends the thread once all work is done.
    void close();

    const int device;
    const bool blocking;

  private:
    Stream(int device, bool blocking) : device(device), blocking(blocking) {}
    void run(uint64_t number_of_stream);

    std::mutex mutex;
    std::condition_variable has_work, has_completed_some;
    std::deque<std::function<void()>> queue;
    uint64_t num_submitted = 0, num_completed = 0;
    bool closing = false;
};

// A handle as a stream of the current context; null if there is none.
std::shared_ptr<Stream> find_stream(CUstream handle);
// Puts work on it, in order with the legacy default stream.
uint64_t submit(const std::shared_ptr<Stream> &stream, std::function<void()> work);
// Waits for all work of a device.
void wait_for_device(int device);
// Waits up to `seconds` for all work of all devices; false if that was too short.
bool wait_for_all(double seconds);

// --- Memory -------------------------------------------------------------------------------------------------------------------

// How much of a device's memory is in use, in bytes.
struct Usage {
    uint64_t used = 0, used_high = 0;         // of the pool
    uint64_t reserved = 0, reserved_high = 0; // of the pool
    uint64_t plain = 0;                       // cuMemAlloc
    uint64_t release_threshold = 0;
};

uint64_t total_memory();
// Somebody has waited for the device: the pool gives back what it holds beyond its threshold.
void trim_pool(int device);
// Frees all memory of a device, after all of its work.
void reset_memory(int device);
// Looks at the surroundings of every block, and at freed ones. Aborts if somebody has written there.
void check_memory();

// --- Launches -----------------------------------------------------------------------------------------------------------------

struct Launch {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    // What one thread does.
    std::function<void()> thread;
    std::string kernel;
};

// Runs the blocks of a launch one after the other, on the calling thread.
void run_grid(const Launch &launch);
// What the calling thread keeps for its next launch.
void release_stacks();

} // namespace simulator
