#include "group.h"

#include <algorithm>

#include "../simulator.h"

namespace nccl {

namespace {

// What one communicator has to do in a group.
struct Share {
    std::shared_ptr<Communicator> comm;
    bool is_new = false;
    std::vector<Operation> operations;
};

struct Group {
    int depth = 0;
    Result failure = SUCCESS;
    std::vector<Share> shares;
};
thread_local Group group;

Share &share_of(const std::shared_ptr<Communicator> &comm) {
    for (Share &share : group.shares) {
        if (share.comm == comm) return share;
    }
    group.shares.emplace_back();
    group.shares.back().comm = comm;
    return group.shares.back();
}

// The collective of an injected failure never ends, as on a connection that broke.
bool fails(Communicator &comm, uint64_t number) {
    if (!must_fail(comm.rank, std::to_string(number + 1))) return false;
    warn("NET/Socket : peer has closed the connection (CUDA_SIMULATOR_NCCL_FAIL)");
    comm.set_progress(REMOTE_ERROR);
    comm.wait_for_end();
    return true;
}

void enqueue_collective(const std::shared_ptr<Communicator> &comm, const Operation &operation) {
    uint64_t number = comm->begin_operation();
    simulator::enqueue(operation.stream, [comm, operation, number] {
        if (comm->wait_for_turn(number) && !fails(*comm, number)) {
            operation.check_memory(*comm);
            run_on_ring(*comm, operation, number);
        }
        comm->end_operation();
    });
}

void enqueue_point_to_point(const std::shared_ptr<Communicator> &comm, const std::vector<Operation> &operations) {
    uint64_t number = comm->begin_operation();
    simulator::enqueue(operations.front().stream, [comm, operations, number] {
        if (comm->wait_for_turn(number) && !fails(*comm, number)) {
            for (const Operation &operation : operations) operation.check_memory(*comm);
            run_point_to_point(*comm, operations);
        }
        comm->end_operation();
    });
}

// All of a share that may wait for other ranks: afterwards its operations only have to be put into streams.
Result connect(const Share &share) {
    Communicator &comm = *share.comm;
    if (share.is_new) {
        Result made = comm.connect();
        if (made != SUCCESS) return made;
    }
    for (const Operation &operation : share.operations) {
        // Peers of a send or receive alone connect, and those need not be all.
        if (operation.is_point_to_point()) continue;
        if (!comm.connect(operation.algorithm(comm.num_ranks))) return INTERNAL_ERROR;
    }
    return SUCCESS;
}

void enqueue(const Share &share) {
    std::vector<Operation> point_to_point;
    for (const Operation &operation : share.operations) {
        if (operation.is_point_to_point()) {
            point_to_point.push_back(operation);
        } else {
            enqueue_collective(share.comm, operation);
        }
    }
    if (!point_to_point.empty()) enqueue_point_to_point(share.comm, point_to_point);
}

void run(const Share &share) {
    Result result = connect(share);
    if (result == SUCCESS) enqueue(share);
    share.comm->set_progress(result);
}

} // namespace

void start_group() { group.depth++; }

void add_connect(std::shared_ptr<Communicator> comm) { share_of(comm).is_new = true; }

void add_operation(std::shared_ptr<Communicator> comm, const Operation &operation) { share_of(comm).operations.push_back(operation); }

void add_failure(Result failure) {
    if (group.failure == SUCCESS) group.failure = failure;
}

Result end_group() {
    if (group.depth == 0) {
        warn("ncclGroupEnd: not in a group call.");
        return INVALID_USAGE;
    }
    if (--group.depth > 0) return SUCCESS;
    std::vector<Share> shares = std::move(group.shares);
    Result failure = group.failure;
    group = Group();
    if (failure != SUCCESS || shares.empty()) return failure;
    bool blocking = shares.front().comm->blocking;
    for (const Share &share : shares) {
        if (share.comm->blocking != blocking) {
            warn("Blocking and nonblocking communicators are not allowed in the same group.");
            return INVALID_ARGUMENT;
        }
    }
    for (const Share &share : shares) share.comm->begin_progress();
    // A thread for each, since one may wait for another.
    for (const Share &share : shares) share.comm->launch([share] { run(share); });
    if (!blocking) return IN_PROGRESS;
    Result result = SUCCESS;
    for (const Share &share : shares) {
        share.comm->join();
        if (result == SUCCESS) result = share.comm->progress();
    }
    return result;
}

} // namespace nccl
