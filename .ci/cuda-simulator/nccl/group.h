// ncclGroupStart and ncclGroupEnd, and what happens when the outermost group ends: communicators are made and operations put into their
// streams, by the calling thread or, if they do not block, by threads of the communicators'. Each call outside of a group is a group.

#pragma once

#include "operation.h"

namespace nccl {

void start_group();
Result end_group();

// Joins the thread's group, which must be open.
void add_connect(std::shared_ptr<Communicator> comm);
void add_operation(std::shared_ptr<Communicator> comm, const Operation &operation);
// The group fails when it ends, and does nothing.
void add_failure(Result failure);

} // namespace nccl
