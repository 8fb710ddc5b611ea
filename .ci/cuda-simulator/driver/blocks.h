// Blocks of device memory, with guards around them. Shared by memory.cpp (allocation) and copies.cpp (what reads and writes them).

#pragma once

#include "driver.h"

namespace simulator {

// Takes a block of `bytes` from a device. Null if there is not as much left. Not filled yet.
char *take_block(int device, size_t bytes, bool of_pool);
// The start of the block that holds [at, at + bytes), if there is one and it is not freed.
bool is_inside(const void *at, size_t bytes);
// Says that the block will be freed, by work that is not done yet. False if there is no such block, or it is freed.
bool begin_free(const void *start);
// Looks at the guards, fills the block with what no program expects, and keeps it for a while before it is used again.
void end_free(const void *start);

Usage usage_of(int device);
void set_usage(int device, const std::function<void(Usage &)> &change);

// What fresh and freed memory and guards hold: a NaN in every float format, and a large index.
constexpr unsigned char POISON = 0xff;

} // namespace simulator
