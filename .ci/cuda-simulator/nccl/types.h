// NCCL's enumerations, with the values of its documentation (version 2.28).

#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl {

enum Result {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INTERNAL_ERROR = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
};

enum DataType { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, NUM_DATA_TYPES };

enum ReduceOp { SUM, PROD, MAX, MIN, AVG, NUM_REDUCE_OPS };

constexpr int VERSION = 22809;

struct UniqueId {
    char internal[128];
};

// The beginning of ncclConfig_t: what came after `blocking` is not looked at.
struct Config {
    size_t size;
    uint32_t magic;
    uint32_t version;
    int blocking;
};
constexpr uint32_t CONFIG_MAGIC = 0xcafebeef;
constexpr int UNDEFINED = INT32_MIN;

inline size_t size_of(int type) {
    switch (type) {
        case INT8:
        case UINT8:
            return 1;
        case FLOAT16:
        case BFLOAT16:
            return 2;
        case INT32:
        case UINT32:
        case FLOAT32:
            return 4;
        default:
            return 8;
    }
}

} // namespace nccl
