// The ring algorithms of NCCL's collectives. Data goes from each rank to the next one only, in pieces of a slot. The sum of one element
// is made on its way around the ring, so its order depends on its place, and all ranks get the same bits.

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../device_memory.h"
#include "operation.h"

namespace nccl {

namespace {

class Ring {
  public:
    Ring(Communicator &comm, const Operation &operation, uint64_t number)
        : comm_(comm), reduction_{operation.type, operation.op, comm.num_ranks}, size_(size_of(operation.type)),
          call_(operation.call), signature_(operation.signature(number)), next_((comm.rank + 1) % comm.num_ranks),
          previous_((comm.rank + comm.num_ranks - 1) % comm.num_ranks) {}

    // The rank `steps` places before this one.
    int before(int steps) const { return (comm_.rank + comm_.num_ranks - steps % comm_.num_ranks) % comm_.num_ranks; }

    // Sends what `fill(to)` writes.
    template <class Fill>
    bool send(size_t count, Fill fill) {
        Channel &channel = comm_.to(next_);
        Message *message = nullptr;
        if (!comm_.wait([&] { return (message = channel.room()) != nullptr; })) return false;
        message->operation = signature_;
        message->bytes = count * size_;
        fill(message->data);
        channel.send();
        return true;
    }

    // Calls `use(data)` with what the previous rank has sent.
    template <class Use>
    bool receive(size_t count, Use use) {
        Channel &channel = comm_.from(previous_);
        Message *message = nullptr;
        if (!comm_.wait([&] { return (message = channel.arrived()) != nullptr; })) return false;
        if (message->operation != signature_ || message->bytes != count * size_) {
            // NCCL would go on with wrong numbers, or wait for bytes that never come.
            fprintf(stderr, "CUDA simulator: rank %d and rank %d do different things on one communicator: %s of rank %d waits for ever\n",
                    previous_, comm_.rank, call_, comm_.rank);
            comm_.wait_for_end();
            return false;
        }
        bool used = use(message->data);
        channel.release();
        return used;
    }

    bool send_prepared(const char *own, size_t count) {
        return send(count, [&](char *to) { reduction_.prepare(to, own, count); });
    }
    bool send_copy(const char *own, size_t count) {
        return send(count, [&](char *to) { memcpy(to, own, count * size_); });
    }
    // Adds this rank's contribution, and passes it on.
    bool receive_combine_send(const char *own, size_t count) {
        return receive(count, [&](char *data) { return send(count, [&](char *to) { reduction_.combine(to, data, own, count); }); });
    }
    // Adds the last contribution.
    bool receive_combine(char *result, const char *own, size_t count) {
        return receive(count, [&](char *data) {
            reduction_.combine(result, data, own, count);
            reduction_.finish(result, count);
            return true;
        });
    }
    bool receive_copy_send(char *result, size_t count) {
        return receive(count, [&](char *data) {
            memcpy(result, data, count * size_);
            return send_copy(data, count);
        });
    }
    bool receive_copy(char *result, size_t count) {
        return receive(count, [&](char *data) {
            memcpy(result, data, count * size_);
            return true;
        });
    }

    size_t slot() const { return SLOT_BYTES / size_; }
    size_t size() const { return size_; }
    const Reduction &reduction() const { return reduction_; }

  private:
    Communicator &comm_;
    const Reduction reduction_;
    const size_t size_;
    const char *const call_;
    const uint64_t signature_;
    const int next_, previous_;
};

// Each piece of n slots is cut into n parts. Part p is summed on its way from rank p + 1 to rank p, and then goes around once more.
bool all_reduce(Ring &ring, const Operation &operation, int n) {
    auto from = static_cast<const char *>(operation.from);
    auto to = static_cast<char *>(operation.to);
    for (size_t done = 0; done < operation.count;) {
        size_t left = operation.count - done;
        size_t part = std::min(ring.slot(), (left + n - 1) / n), piece = std::min(part * n, left);
        auto start = [&](int p) { return (done + std::min(p * part, piece)) * ring.size(); };
        auto length = [&](int p) { return std::min((p + 1) * part, piece) - std::min(p * part, piece); };
        int p = ring.before(1);
        if (!ring.send_prepared(from + start(p), length(p))) return false;
        for (int step = 2; step < n; step++) {
            p = ring.before(step);
            if (!ring.receive_combine_send(from + start(p), length(p))) return false;
        }
        p = ring.before(n);
        if (!ring.receive_combine(to + start(p), from + start(p), length(p))) return false;
        if (!ring.send_copy(to + start(p), length(p))) return false;
        for (int step = 1; step < n - 1; step++) {
            p = ring.before(step);
            if (!ring.receive_copy_send(to + start(p), length(p))) return false;
        }
        p = ring.before(n - 1);
        if (!ring.receive_copy(to + start(p), length(p))) return false;
        done += piece;
    }
    return true;
}

bool reduce_scatter(Ring &ring, const Operation &operation, int n) {
    auto from = static_cast<const char *>(operation.from);
    auto to = static_cast<char *>(operation.to);
    for (size_t done = 0; done < operation.count; done += ring.slot()) {
        size_t count = std::min(ring.slot(), operation.count - done);
        auto own = [&](int p) { return from + (p * operation.count + done) * ring.size(); };
        if (!ring.send_prepared(own(ring.before(1)), count)) return false;
        for (int step = 2; step < n; step++) {
            if (!ring.receive_combine_send(own(ring.before(step)), count)) return false;
        }
        if (!ring.receive_combine(to + done * ring.size(), own(ring.before(n)), count)) return false;
    }
    return true;
}

bool all_gather(Ring &ring, const Operation &operation, int n) {
    auto from = static_cast<const char *>(operation.from);
    auto to = static_cast<char *>(operation.to);
    for (size_t done = 0; done < operation.count; done += ring.slot()) {
        size_t count = std::min(ring.slot(), operation.count - done);
        auto part = [&](int p) { return to + (p * operation.count + done) * ring.size(); };
        const char *own = from + done * ring.size();
        if (part(ring.before(n)) != own) memcpy(part(ring.before(n)), own, count * ring.size());
        if (!ring.send_copy(own, count)) return false;
        for (int step = 1; step < n - 1; step++) {
            if (!ring.receive_copy_send(part(ring.before(step)), count)) return false;
        }
        if (!ring.receive_copy(part(ring.before(n - 1)), count)) return false;
    }
    return true;
}

bool broadcast(Ring &ring, const Operation &operation, int n) {
    auto from = static_cast<const char *>(operation.from);
    auto to = static_cast<char *>(operation.to);
    for (size_t done = 0; done < operation.count; done += ring.slot()) {
        size_t count = std::min(ring.slot(), operation.count - done), at = done * ring.size();
        bool passed;
        if (ring.before(n) == operation.root) {
            if (from != to) memcpy(to + at, from + at, count * ring.size());
            passed = ring.send_copy(from + at, count);
        } else if (ring.before(n - 1) == operation.root) {
            passed = ring.receive_copy(to + at, count);
        } else {
            passed = ring.receive_copy_send(to + at, count);
        }
        if (!passed) return false;
    }
    return true;
}

bool reduce(Ring &ring, const Operation &operation, int n) {
    auto from = static_cast<const char *>(operation.from);
    auto to = static_cast<char *>(operation.to);
    for (size_t done = 0; done < operation.count; done += ring.slot()) {
        size_t count = std::min(ring.slot(), operation.count - done), at = done * ring.size();
        bool passed;
        if (ring.before(1) == operation.root) {
            passed = ring.send_prepared(from + at, count);
        } else if (ring.before(n) == operation.root) {
            passed = ring.receive_combine(to + at, from + at, count);
        } else {
            passed = ring.receive_combine_send(from + at, count);
        }
        if (!passed) return false;
    }
    return true;
}

// Of one rank: a copy.
void alone(Ring &ring, const Operation &operation) {
    size_t bytes = operation.count * ring.size();
    if (operation.kind == Kind::ALL_REDUCE || operation.kind == Kind::REDUCE_SCATTER || operation.kind == Kind::REDUCE) {
        ring.reduction().prepare(operation.to, operation.from, operation.count);
        ring.reduction().finish(operation.to, operation.count);
    } else if (operation.to != operation.from) {
        memcpy(operation.to, operation.from, bytes);
    }
}

} // namespace

bool run_on_ring(Communicator &comm, const Operation &operation, uint64_t number) {
    int n = comm.num_ranks;
    Ring ring(comm, operation, number);
    if (n == 1) {
        alone(ring, operation);
        return true;
    }
    switch (operation.kind) {
    case Kind::ALL_REDUCE:
        return all_reduce(ring, operation, n);
    case Kind::REDUCE_SCATTER:
        return reduce_scatter(ring, operation, n);
    case Kind::ALL_GATHER:
        return all_gather(ring, operation, n);
    case Kind::BROADCAST:
        return broadcast(ring, operation, n);
    default:
        return reduce(ring, operation, n);
    }
}

Algorithm Operation::algorithm(int num_ranks) const {
    constexpr size_t LONGEST_TREE = 64 << 10; // bytes
    if (is_point_to_point()) return POINT_TO_POINT;
    bool is_short = count * size_of(type) <= LONGEST_TREE;
    return kind == Kind::ALL_REDUCE && num_ranks > 2 && is_short ? TREE : RING;
}

void Operation::check_memory(const Communicator &comm) const {
    size_t n = comm.num_ranks, bytes = count * size_of(type);
    bool reads = kind != Kind::RECEIVE && !(kind == Kind::BROADCAST && comm.rank != root);
    bool writes = kind != Kind::SEND && !(kind == Kind::REDUCE && comm.rank != root);
    if (reads) {
        size_t all = kind == Kind::REDUCE_SCATTER ? n * bytes : bytes;
        simulator::require_device_memory(from, all, comm.device, call, "sendbuff");
    }
    if (writes) {
        size_t all = kind == Kind::ALL_GATHER ? n * bytes : bytes;
        simulator::require_device_memory(to, all, comm.device, call, "recvbuff");
    }
}

uint64_t Operation::signature(uint64_t number) const {
    uint64_t hash = number;
    for (uint64_t word : {uint64_t(kind), uint64_t(count), uint64_t(type), uint64_t(op), uint64_t(root)}) {
        hash = (hash ^ word) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 32;
    }
    return hash;
}

} // namespace nccl
