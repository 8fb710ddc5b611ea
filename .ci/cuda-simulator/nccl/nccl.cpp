// libnccl.so.2: the functions of NCCL 2.28 that this project calls, and those that belong to them. The others are stubs, see stubs.py.
//
// Ranks may be threads and processes of one machine. Results are those of NCCL's ring algorithms. As in NCCL: of a communicator that
// does not block, calls return at once, and what they began is in the stream only when ncclCommGetAsyncError says ncclSuccess; ranks
// connect when an algorithm is first used; calls that do not fit together wait for ever; ncclCommAbort ends all waits. Other machines,
// CUDA graphs and user buffers are not simulated.

#include <cstdio>
#include <cstring>
#include <random>

#include "group.h"

using namespace nccl;

// What a ncclComm_t points to.
struct ncclComm {
    std::shared_ptr<Communicator> it;
};

namespace {

Result check(const ncclComm *comm, const char *call) {
    if (comm) return SUCCESS;
    warn("%s : comm argument is NULL", call);
    return INVALID_ARGUMENT;
}

Result init_rank(ncclComm **comm, int num_ranks, const UniqueId &id, int rank, bool blocking) {
    if (!comm) {
        warn("CommInitRank : newcomm argument is NULL");
        return INVALID_ARGUMENT;
    }
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
        warn("Invalid rank requested : %d/%d", rank, num_ranks);
        return INVALID_ARGUMENT;
    }
    auto made = Communicator::make(rank, num_ranks, id, blocking);
    if (!made) {
        warn("Cuda failure 'invalid device context'");
        return UNHANDLED_CUDA_ERROR;
    }
    // At once: the caller asks it how far it has come.
    *comm = new ncclComm{made};
    start_group();
    add_connect(made);
    return end_group();
}

Result enqueue(ncclComm *comm, const Operation &operation) {
    Result checked = check(comm, operation.call);
    if (checked != SUCCESS) return checked;
    Result progress = comm->it->progress();
    if (progress == IN_PROGRESS) {
        warn("Attempt to use communicator before the previous operation returned ncclSuccess");
        return INVALID_ARGUMENT;
    }
    if (progress != SUCCESS) return progress;
    int n = comm->it->num_ranks;
    if (operation.root < 0 || operation.root >= n) {
        warn("%s : invalid root %d (root should be in the 0..%d range)", operation.call, operation.root, n - 1);
        return INVALID_ARGUMENT;
    }
    if (operation.type < 0 || operation.type >= NUM_DATA_TYPES) {
        warn("%s : invalid type %d", operation.call, operation.type);
        return INVALID_ARGUMENT;
    }
    if (operation.op < 0 || operation.op >= NUM_REDUCE_OPS) {
        warn("%s : invalid reduction operation %d", operation.call, operation.op);
        return INVALID_ARGUMENT;
    }
    if (operation.count == 0) return SUCCESS;
    start_group();
    add_operation(comm->it, operation);
    Result ended = end_group();
    return ended == SUCCESS && !comm->it->blocking ? comm->it->progress() : ended;
}

} // namespace

extern "C" {

Result ncclGetVersion(int *version) {
    if (!version) return INVALID_ARGUMENT;
    *version = VERSION;
    return SUCCESS;
}

Result ncclGetUniqueId(UniqueId *id) {
    if (!id) return INVALID_ARGUMENT;
    std::random_device random;
    memset(id->internal, 0, sizeof id->internal);
    // The name of the shared memory.
    snprintf(id->internal, sizeof id->internal, "/cuda-simulator-nccl-%08x%08x", random(), random());
    return SUCCESS;
}

const char *ncclGetErrorString(Result code) {
    switch (code) {
    case SUCCESS:
        return "no error";
    case UNHANDLED_CUDA_ERROR:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case SYSTEM_ERROR:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case INTERNAL_ERROR:
        return "internal error - please report this issue to the NCCL developers";
    case INVALID_ARGUMENT:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case INVALID_USAGE:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case REMOTE_ERROR:
        return "remote process exited or there was a network error";
    case IN_PROGRESS:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

const char *ncclGetLastError(ncclComm *) {
    thread_local std::string text;
    text = last_warning();
    return text.c_str();
}

Result ncclCommInitRankConfig(ncclComm **comm, int num_ranks, UniqueId id, int rank, const Config *config) {
    bool blocking = true;
    if (config) {
        if (config->magic != CONFIG_MAGIC) {
            warn("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
            return INVALID_ARGUMENT;
        }
        if (config->blocking != UNDEFINED && config->blocking != 0 && config->blocking != 1) {
            warn("Invalid config blocking attribute value %d", config->blocking);
            return INVALID_ARGUMENT;
        }
        blocking = config->blocking != 0;
    }
    return init_rank(comm, num_ranks, id, rank, blocking);
}

Result ncclCommInitRank(ncclComm **comm, int num_ranks, UniqueId id, int rank) { return init_rank(comm, num_ranks, id, rank, true); }

Result ncclCommInitAll(ncclComm **comms, int num_devices, const int *devices) {
    UniqueId id;
    ncclGetUniqueId(&id);
    CUcontext before = nullptr;
    cuCtxGetCurrent(&before);
    start_group();
    for (int rank = 0; rank < num_devices; rank++) {
        CUcontext context;
        if (cuDevicePrimaryCtxRetain(&context, devices ? devices[rank] : rank) != CUDA_SUCCESS) {
            add_failure(UNHANDLED_CUDA_ERROR);
            break;
        }
        cuCtxSetCurrent(context);
        init_rank(&comms[rank], num_devices, id, rank, true);
    }
    cuCtxSetCurrent(before);
    return end_group();
}

Result ncclCommGetAsyncError(ncclComm *comm, Result *error) {
    Result checked = check(comm, "ncclGetAsyncError");
    if (checked != SUCCESS || !error) return INVALID_ARGUMENT;
    *error = comm->it->progress();
    return SUCCESS;
}

Result ncclCommFinalize(ncclComm *comm) {
    Result checked = check(comm, "ncclCommFinalize");
    if (checked != SUCCESS) return checked;
    auto it = comm->it;
    if (it->progress() == IN_PROGRESS) return INVALID_ARGUMENT;
    if (it->blocking) {
        it->finalize();
        return it->progress();
    }
    it->begin_progress();
    it->launch([it] {
        it->wait_for_streams();
        it->set_progress(SUCCESS);
    });
    return it->progress();
}

Result ncclCommDestroy(ncclComm *comm) {
    if (!comm) return SUCCESS;
    comm->it->destroy();
    delete comm;
    return SUCCESS;
}

Result ncclCommAbort(ncclComm *comm) {
    if (!comm) return SUCCESS;
    comm->it->abort();
    delete comm;
    return SUCCESS;
}

Result ncclCommCount(const ncclComm *comm, int *count) {
    if (!comm || !count) return INVALID_ARGUMENT;
    *count = comm->it->num_ranks;
    return SUCCESS;
}

Result ncclCommUserRank(const ncclComm *comm, int *rank) {
    if (!comm || !rank) return INVALID_ARGUMENT;
    *rank = comm->it->rank;
    return SUCCESS;
}

Result ncclCommCuDevice(const ncclComm *comm, int *device) {
    if (!comm || !device) return INVALID_ARGUMENT;
    *device = comm->it->device;
    return SUCCESS;
}

Result ncclGroupStart() {
    start_group();
    return SUCCESS;
}

Result ncclGroupEnd() { return end_group(); }

Result ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::ALL_REDUCE, "ncclAllReduce", from, to, count, type, op, 0, stream});
}

Result ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::REDUCE_SCATTER, "ncclReduceScatter", from, to, count, type, op, 0, stream});
}

Result ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::ALL_GATHER, "ncclAllGather", from, to, count, type, SUM, 0, stream});
}

Result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::BROADCAST, "ncclBroadcast", from, to, count, type, SUM, root, stream});
}

Result ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::REDUCE, "ncclReduce", from, to, count, type, op, root, stream});
}

Result ncclSend(const void *from, size_t count, int type, int peer, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::SEND, "ncclSend", from, nullptr, count, type, SUM, peer, stream});
}

Result ncclRecv(void *to, size_t count, int type, int peer, ncclComm *comm, CUstream stream) {
    return enqueue(comm, {Kind::RECEIVE, "ncclRecv", nullptr, to, count, type, SUM, peer, stream});
}

} // extern "C"
