// One call of a collective, ncclSend or ncclRecv, and what a stream does with it.

#pragma once

#include <string>
#include <vector>

#include "communicator.h"
#include "reduction.h"

namespace nccl {

enum class Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, SEND, RECEIVE };

// Lengths are in elements. `count` is that of NCCL's call: of a rank's part for reduce-scatter and all-gather.
struct Operation {
    Kind kind;
    const char *call;
    const void *from;
    void *to;
    size_t count;
    int type;
    int op;   // of reductions
    int root; // of broadcast and reduce; the peer of a send or receive
    CUstream stream;

    bool is_point_to_point() const { return kind == Kind::SEND || kind == Kind::RECEIVE; }
    // Like NCCL, which takes trees for short all-reduces. Here they differ in when ranks connect.
    Algorithm algorithm(int num_ranks) const;
    // Aborts the process unless all memory is the device's.
    void check_memory(const Communicator &comm) const;
    // Equal for calls that fit together.
    uint64_t signature(uint64_t number) const;
};

// Runs a collective on a ring, as NCCL does: rank 0, 1, ... n - 1, and 0 again. Returns false if it was ended before.
bool run_on_ring(Communicator &comm, const Operation &operation, uint64_t number);

// Runs sends and receives at the same time. Returns false if they were ended before.
bool run_point_to_point(Communicator &comm, const std::vector<Operation> &operations);

} // namespace nccl
