// Blocks of device memory. Around each lies a guard, and a freed one is kept for a while: who writes past the end of a block, or into
// one that is freed, changes bytes that nobody may change, and is found when the block is freed or thrown away, or at the end.

#include "blocks.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace simulator {
namespace {

constexpr size_t GUARD = 512;
// As the driver's pools: sizes are rounded up, and pools grow in larger steps.
constexpr size_t GRANULARITY = 512;
constexpr uint64_t POOL_STEP = 2 << 20;
// Bytes of freed blocks that are kept, per device.
constexpr size_t KEPT = 64 << 20;

struct Block {
    int device;
    size_t bytes, rounded;
    bool of_pool;
    bool being_freed = false;
};

struct Freed {
    char *start;
    size_t rounded;
};

struct Device {
    Usage usage;
    std::deque<Freed> freed;
    size_t freed_bytes = 0;
};

struct Memory {
    std::mutex mutex;
    std::map<const char *, Block> blocks; // by their first bytes
    std::vector<Device> devices = std::vector<Device>(num_devices());
};

// Never destroyed: streams use it until the process is gone.
Memory &memory() {
    static Memory *all = new Memory;
    return *all;
}

uint64_t round_up(uint64_t value, uint64_t step) { return (value + step - 1) / step * step; }

// The first byte of [from, to) that is not POISON; null if there is none.
const char *first_written(const char *from, const char *to) {
    for (const char *at = from; at != to; at++) {
        if ((unsigned char)*at != POISON) {
            return at;
        }
    }
    return nullptr;
}

void check_guards(const char *start, const Block &block) {
    if (const char *at = first_written(start - GUARD, start)) {
        die("device %d: a write %td bytes before a block of %zu bytes", block.device, start - at, block.bytes);
    }
    if (const char *at = first_written(start + block.bytes, start + block.rounded + GUARD)) {
        die("device %d: a write %td bytes past the end of a block of %zu bytes", block.device,
            at - (start + block.bytes), block.bytes);
    }
}

void check_freed(int device, const Freed &freed) {
    if (const char *at = first_written(freed.start - GUARD, freed.start + freed.rounded + GUARD)) {
        die("device %d: a write at byte %td of a block of at most %zu bytes, after it was freed", device, at - freed.start,
            freed.rounded);
    }
}

void throw_away(int device, Device &of, size_t kept) {
    while (of.freed_bytes > kept) {
        Freed oldest = of.freed.front();
        of.freed.pop_front();
        of.freed_bytes -= oldest.rounded;
        check_freed(device, oldest);
        free(oldest.start - GUARD);
    }
}

// With the lock held.
void finish_free(std::map<const char *, Block>::iterator found) {
    auto [start, block] = *found;
    check_guards(start, block);
    memory().blocks.erase(found);
    char *bytes = const_cast<char *>(start);
    memset(bytes, POISON, block.rounded);
    Device &device = memory().devices[block.device];
    (block.of_pool ? device.usage.used : device.usage.plain) -= block.rounded;
    device.freed.push_back({bytes, block.rounded});
    device.freed_bytes += block.rounded;
    throw_away(block.device, device, KEPT);
}

// The block that `at` points into, with the lock held.
std::map<const char *, Block>::iterator find(const void *at) {
    auto &blocks = memory().blocks;
    auto next = blocks.upper_bound(static_cast<const char *>(at));
    if (next == blocks.begin()) {
        return blocks.end();
    }
    auto found = std::prev(next);
    return at < found->first + found->second.rounded ? found : blocks.end();
}

} // namespace

uint64_t total_memory() {
    static const uint64_t bytes = setting("CUDA_SIMULATOR_MEMORY_MIB", 8192) << 20;
    return bytes;
}

char *take_block(int device, size_t bytes, bool of_pool) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    const size_t rounded = round_up(bytes, GRANULARITY);
    Usage &usage = memory().devices[device].usage;
    if (rounded < bytes || usage.used + usage.plain + rounded > total_memory()) {
        return nullptr;
    }
    char *all = static_cast<char *>(aligned_alloc(GRANULARITY, rounded + 2 * GUARD));
    if (!all) {
        return nullptr;
    }
    char *start = all + GUARD;
    memset(all, POISON, GUARD);
    memset(start + bytes, POISON, rounded - bytes + GUARD);
    memory().blocks.emplace(start, Block{device, bytes, rounded, of_pool});
    if (of_pool) {
        usage.used += rounded;
        usage.used_high = std::max(usage.used_high, usage.used);
        usage.reserved = std::max(usage.reserved, round_up(usage.used, POOL_STEP));
        usage.reserved_high = std::max(usage.reserved_high, usage.reserved);
    } else {
        usage.plain += rounded;
    }
    return start;
}

bool is_inside(const void *at, size_t bytes) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = find(at);
    return found != memory().blocks.end() && !found->second.being_freed &&
           static_cast<const char *>(at) + bytes <= found->first + found->second.bytes;
}

bool begin_free(const void *start) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().blocks.find(static_cast<const char *>(start));
    if (found == memory().blocks.end() || found->second.being_freed) {
        return false;
    }
    found->second.being_freed = true;
    return true;
}

void end_free(const void *start) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = memory().blocks.find(static_cast<const char *>(start));
    // Gone if the context was released meanwhile.
    if (found != memory().blocks.end()) {
        finish_free(found);
    }
}

int device_of(const void *pointer) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto found = find(pointer);
    return found == memory().blocks.end() ? -1 : found->second.device;
}

Usage usage_of(int device) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    return memory().devices[device].usage;
}

void set_usage(int device, const std::function<void(Usage &)> &change) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    change(memory().devices[device].usage);
}

void trim_pool(int device) {
    set_usage(device, [](Usage &usage) {
        usage.reserved = std::max(round_up(usage.used, POOL_STEP), std::min(usage.reserved, usage.release_threshold));
    });
}

void reset_memory(int device) {
    std::lock_guard<std::mutex> lock(memory().mutex);
    auto &blocks = memory().blocks;
    for (auto block = blocks.begin(); block != blocks.end();) {
        auto here = block++;
        if (here->second.device == device) {
            finish_free(here);
        }
    }
    Device &of = memory().devices[device];
    throw_away(device, of, 0);
    of.usage = Usage();
}

void check_memory() {
    std::lock_guard<std::mutex> lock(memory().mutex);
    for (const auto &[start, block] : memory().blocks) {
        check_guards(start, block);
    }
    for (int device = 0; device < num_devices(); device++) {
        for (const Freed &freed : memory().devices[device].freed) {
            check_freed(device, freed);
        }
    }
}

} // namespace simulator
