// ncclSend and ncclRecv of one group: all go on together, so that two ranks may send to each other.

#include <algorithm>
#include <cstring>
#include <set>

#include "operation.h"

namespace nccl {

namespace {

// One send or receive, and how many bytes of it have gone.
struct Transfer {
    const Operation *operation;
    size_t done = 0;

    size_t bytes() const { return operation->count * size_of(operation->type); }
    bool is_done() const { return done == bytes(); }

    // Moves one message, if there is room or it has come.
    bool advance(Communicator &comm) {
        size_t length = std::min(SLOT_BYTES, bytes() - done);
        if (operation->kind == Kind::SEND) {
            Channel &channel = comm.to(operation->root, true);
            Message *message = channel.room();
            if (!message) return false;
            message->bytes = length;
            memcpy(message->data, static_cast<const char *>(operation->from) + done, length);
            channel.send();
        } else {
            Channel &channel = comm.from(operation->root, true);
            Message *message = channel.arrived();
            // Of another length than was sent: it waits for ever, as NCCL's.
            if (!message || message->bytes != length) return false;
            memcpy(static_cast<char *>(operation->to) + done, message->data, length);
            channel.release();
        }
        done += length;
        return true;
    }
};

} // namespace

bool run_point_to_point(Communicator &comm, const std::vector<Operation> &operations) {
    std::vector<Transfer> transfers;
    for (const Operation &operation : operations) transfers.push_back({&operation});
    return comm.wait([&] {
        bool all = true;
        // In one direction, what was called first goes first.
        std::set<std::pair<Kind, int>> busy;
        for (Transfer &transfer : transfers) {
            if (transfer.is_done() || !busy.insert({transfer.operation->kind, transfer.operation->root}).second) continue;
            while (!transfer.is_done() && transfer.advance(comm)) {
            }
            all = all && transfer.is_done();
        }
        return all && std::all_of(transfers.begin(), transfers.end(), [](const Transfer &t) { return t.is_done(); });
    });
}

} // namespace nccl
