// What the ranks of one communicator share: a segment of POSIX shared memory, whose name is in the unique id. So ranks may be threads,
// processes, or both.
//
// Between each pair of ranks there are two one-way channels, one for collectives and one for ncclSend. A channel is a ring of slots, each
// with one message: the sender fills the slot `written`, the receiver empties the slot `read`.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "types.h"

namespace nccl {

constexpr size_t SLOT_BYTES = 64 << 10;
constexpr int NUM_SLOTS = 4;

// Algorithms whose connections are made when they are first used.
enum Algorithm { RING, TREE, POINT_TO_POINT, NUM_ALGORITHMS };

struct Message {
    // What the sender is doing: of two ranks that do different things, neither goes on.
    uint64_t operation;
    uint32_t bytes;
    alignas(64) char data[SLOT_BYTES];
};

struct Channel {
    alignas(64) std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    Message slots[NUM_SLOTS];

    // Room for the next message, or null.
    Message *room() {
        uint64_t next = written.load(std::memory_order_relaxed);
        return next - read.load(std::memory_order_acquire) < NUM_SLOTS ? &slots[next % NUM_SLOTS] : nullptr;
    }
    void send() { written.fetch_add(1, std::memory_order_release); }

    // The next message, or null.
    Message *arrived() {
        uint64_t next = read.load(std::memory_order_relaxed);
        return next < written.load(std::memory_order_acquire) ? &slots[next % NUM_SLOTS] : nullptr;
    }
    void release() { read.fetch_add(1, std::memory_order_release); }
};

struct RankState {
    std::atomic<bool> is_here;
    std::atomic<bool> has_left;
    std::array<char, 16> device; // its UUID; valid once it is here
    std::atomic<bool> is_connected[NUM_ALGORITHMS];
};

class Segment {
  public:
    // Opens the segment of that name, or makes it. Null if the system refuses, or others count other ranks.
    static std::unique_ptr<Segment> open(const std::string &name, int num_ranks);
    ~Segment();

    RankState &rank(int rank) { return ranks_[rank]; }
    Channel &channel(bool point_to_point, int from, int to) {
        return channels_[((point_to_point ? num_ranks_ : 0) + from) * num_ranks_ + to];
    }
    // When all are there, or there is no hope: the memory stays as long as somebody has it.
    void remove_name() { remove(name_); }
    static void remove(const std::string &name);

  private:
    Segment(std::string name, int num_ranks, void *memory, size_t bytes);

    std::string name_;
    int num_ranks_;
    void *memory_;
    size_t bytes_;
    RankState *ranks_;
    Channel *channels_;
};

} // namespace nccl
