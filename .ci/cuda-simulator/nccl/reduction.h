// What NCCL does with two elements, and with one before it is sent.
//
// ncclAvg of floating-point numbers multiplies each contribution by 1/n, rounded to the type, before the sum; of integers it divides the
// sum. 16-bit sums are rounded at each rank.

#pragma once


#include "types.h"

namespace nccl {

struct Reduction {
    int type;
    int op;
    int num_ranks;

    // The contribution of this rank, as it goes into the sum.
    void prepare(void *to, const void *from, size_t count) const;
    // to = from + own, or whatever the operation is; `own` is a contribution that is not prepared.
    void combine(void *to, const void *from, const void *own, size_t count) const;
    // The last step, when all contributions are in.
    void finish(void *values, size_t count) const;
};

} // namespace nccl
