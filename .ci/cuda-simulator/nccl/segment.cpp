#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace nccl {

namespace {

// In front of the ranks' states.
struct Head {
    std::atomic<int> num_ranks;
};

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t channels_at(int num_ranks) { return aligned(aligned(sizeof(Head)) + num_ranks * sizeof(RankState)); }

} // namespace

std::unique_ptr<Segment> Segment::open(const std::string &name, int num_ranks) {
    // Pages that nobody touches take no memory, and those are most: a ring uses few of the channels.
    size_t bytes = channels_at(num_ranks) + 2 * sizeof(Channel) * num_ranks * num_ranks;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file < 0) return nullptr;
    void *memory = MAP_FAILED;
    // New pages are zeros, and zeros are what all of it begins with.
    if (ftruncate(file, bytes) == 0) memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return nullptr;
    std::unique_ptr<Segment> segment(new Segment(name, num_ranks, memory, bytes));
    int nobody = 0;
    auto &counted = static_cast<Head*>(memory)->num_ranks;
    if (!counted.compare_exchange_strong(nobody, num_ranks) && nobody != num_ranks) return nullptr;
    return segment;
}

Segment::Segment(std::string name, int num_ranks, void *memory, size_t bytes)
    : name_(std::move(name)), num_ranks_(num_ranks), memory_(memory), bytes_(bytes) {
    char *start = static_cast<char*>(memory);
    ranks_ = reinterpret_cast<RankState*>(start + aligned(sizeof(Head)));
    channels_ = reinterpret_cast<Channel*>(start + channels_at(num_ranks));
}

Segment::~Segment() { munmap(memory_, bytes_); }

void Segment::remove(const std::string &name) { shm_unlink(name.c_str()); }

} // namespace nccl
