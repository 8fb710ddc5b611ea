// A communicator of one rank: who its peers are, how far it has come, and how what it waits for ends.
//
// States of `progress`: IN_PROGRESS while the communicator is made or a group is launched, then SUCCESS; an error stays. Only the
// thread that makes or launches moves it forward, any thread may set an error.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <cuda.h>

#include "segment.h"
#include "types.h"

namespace nccl {

// What ncclGetLastError says: the last warning of any communicator. Also a line on stderr if NCCL_DEBUG is set.
void warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string last_warning();

// An error that CUDA_SIMULATOR_NCCL_FAIL asks for: `RANK:OPERATION`, where the operation is `init`, `abort`, or the number of a
// collective on its communicator, counted from 1. `init` and a number become an error that comes up while the rank is at it, as of a
// broken connection; an `abort` never ends.
bool must_fail(int rank, const std::string &operation);

class Communicator : public std::enable_shared_from_this<Communicator> {
  public:
    // For the device and context of the calling thread. Null without one.
    static std::shared_ptr<Communicator> make(int rank, int num_ranks, const UniqueId &id, bool blocking);

    const int rank;
    const int num_ranks;
    const bool blocking;
    const int device;
    const CUcontext context;

    // Meets the other ranks.
    Result connect();
    // The first use of an algorithm: all ranks must come. False if there is no hope.
    bool connect(Algorithm algorithm);

    Result progress() const { return progress_.load(); }
    // An error that is already there stays.
    void set_progress(Result progress);
    void begin_progress();

    // Runs `job` on a thread of the communicator's; `abort` and the destructor wait for it.
    void launch(std::function<void()> job);
    void join();

    // Numbers an operation and promises that its work will run.
    uint64_t begin_operation();
    // Waits until it is this operation's turn, whichever streams they are in. False if there is no hope.
    bool wait_for_turn(uint64_t operation);
    void end_operation();

    // Waits until `done`; false if the communicator is aborted, or the process ends.
    template <class Done>
    bool wait(Done done) {
        for (int looks = 0; !done(); looks++) {
            if (has_ended()) return false;
            pause(looks);
        }
        return true;
    }
    // Waits for the abort, as does whoever has met an error.
    void wait_for_end() {
        wait([] { return false; });
    }

    Channel &to(int peer, bool point_to_point = false) { return segment_->channel(point_to_point, rank, peer); }
    Channel &from(int peer, bool point_to_point = false) { return segment_->channel(point_to_point, peer, rank); }

    // Ends all waits, and returns when nobody works for it any more.
    void abort();
    // Waits for its work, and for all ranks to come to this point.
    void destroy();
    // Waits for its work.
    void finalize();
    // For what is in streams; `launch`ed jobs may call it.
    void wait_for_streams();

  private:
    Communicator(int rank, int num_ranks, std::string name, bool blocking, int device, CUcontext context);

    bool has_ended() const;
    static void pause(int looks);

    const std::string name_;
    std::unique_ptr<Segment> segment_;
    std::atomic<Result> progress_{IN_PROGRESS};
    std::atomic<bool> is_aborted_{false};
    std::atomic<uint64_t> begun_{0};
    std::atomic<uint64_t> ended_{0};
    std::mutex launching_;
    std::thread launched_;
};

} // namespace nccl
