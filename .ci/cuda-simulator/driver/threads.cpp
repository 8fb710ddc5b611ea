// The threads of a block, one after the other on one thread of the host. Each is a fiber as soon as it waits for others: its stack
// stays, and the next one begins on another. A kernel whose threads never wait takes one fiber.
//
// The order is turned round from one phase to the next, so what should have been behind __syncthreads, but is not, shows.

#include "threads.h"

#include "driver.h"

#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>

__thread SimulatorPosition simulator_position;

namespace simulator {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr unsigned WARP = 32;

enum class State : uint8_t { New, Running, AtBlock, AtWarp, Ready, Finished };

struct Fiber {
    ucontext_t context;
    jmp_buf here;
    bool is_started = false;
};

struct Thread {
    State state = State::New;
    unsigned mask = 0; // of the lanes it waits for
    uint64_t given = 0;
    Fiber *fiber = nullptr;
};

class Block {
  public:
    ~Block();
    void run(const Launch &of, unsigned x, unsigned y, unsigned z);
    void wait(State state, unsigned mask);

    std::vector<Thread> threads;
    unsigned current = 0;
    std::vector<char> shared;

  private:
    static void fiber_main();
    void begin_threads();
    void set_position(unsigned thread);
    void resume(Fiber *fiber);
    bool run_warp(unsigned first, unsigned end);
    bool pass_barrier();
    bool release_warp(unsigned first, unsigned end);
    bool run_ready(unsigned first, unsigned end);
    [[noreturn]] void report_deadlock();

    const Launch *launch = nullptr;
    jmp_buf scheduler;
    Fiber *running = nullptr;
    std::vector<Fiber *> idle;
    unsigned num_begun = 0, num_finished = 0;
    bool backwards = false;
};

// Of the stream's thread, from its first launch on. Its stacks stay for the next one.
__thread Block *block = nullptr;

Fiber *new_fiber() {
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) {
        die("no memory for the stack of a thread");
    }
    // The lowest page: who needs more stack than this hits it.
    mprotect(stack, 4096, PROT_NONE);
    auto *fiber = new Fiber;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = nullptr;
    return fiber;
}

// All are idle when the stream's thread ends.
Block::~Block() {
    for (Fiber *fiber : idle) {
        munmap(fiber->context.uc_stack.ss_sp, STACK);
        delete fiber;
    }
}

void Block::set_position(unsigned thread) {
    auto &position = simulator_position;
    const unsigned x = position.block_size.x, y = position.block_size.y;
    position.thread_index = {thread % x, thread / x % y, thread / (x * y)};
    current = thread;
}

// The body of every fiber: it takes threads that have not begun until none is left, and is idle until it is resumed.
void Block::fiber_main() {
    for (;;) {
        block->begin_threads();
        Fiber *self = block->running;
        block->idle.push_back(self);
        if (_setjmp(self->here) == 0) {
            _longjmp(block->scheduler, 1);
        }
    }
}

void Block::begin_threads() {
    const unsigned count = threads.size();
    while (num_begun < count) {
        const unsigned thread = backwards ? count - 1 - num_begun : num_begun;
        num_begun++;
        threads[thread].state = State::Running;
        threads[thread].fiber = running;
        set_position(thread);
        // While it waits, other fibers begin the others.
        launch->thread();
        threads[thread].state = State::Finished;
        num_finished++;
    }
}

// Returns when the fiber waits, or is idle.
void Block::resume(Fiber *fiber) {
    running = fiber;
    if (_setjmp(scheduler) != 0) {
        return;
    }
    if (fiber->is_started) {
        _longjmp(fiber->here, 1);
    }
    fiber->is_started = true;
    makecontext(&fiber->context, fiber_main, 0);
    setcontext(&fiber->context);
}

void Block::wait(State state, unsigned mask) {
    threads[current].state = state;
    threads[current].mask = mask;
    Fiber *self = running;
    if (_setjmp(self->here) == 0) {
        _longjmp(scheduler, 1);
    }
}

// Lanes [first, end) of a warp: those that wait for each other go on once all of them are there. One that has finished is not
// waited for.
bool Block::release_warp(unsigned first, unsigned end) {
    bool released = false;
    for (unsigned lane = first; lane < end; lane++) {
        if (threads[lane].state != State::AtWarp) {
            continue;
        }
        const unsigned mask = threads[lane].mask;
        auto is_member = [&](unsigned other) { return mask >> (other - first) & 1; };
        bool complete = true;
        for (unsigned other = first; other < end; other++) {
            const Thread &thread = threads[other];
            const bool is_there = thread.state == State::AtWarp && thread.mask == mask;
            complete = complete && (!is_member(other) || is_there || thread.state == State::Finished);
        }
        for (unsigned other = first; complete && other < end; other++) {
            if (is_member(other) && threads[other].state == State::AtWarp) {
                threads[other].state = State::Ready;
                released = true;
            }
        }
    }
    return released;
}

// False if none is ready.
bool Block::run_ready(unsigned first, unsigned end) {
    bool has_run = false;
    for (unsigned i = first; i < end; i++) {
        const unsigned thread = backwards ? first + end - 1 - i : i;
        if (threads[thread].state == State::Ready) {
            threads[thread].state = State::Running;
            set_position(thread);
            resume(threads[thread].fiber);
            has_run = true;
        }
    }
    return has_run;
}

// Lanes [first, end) of a warp, until each is at the block's barrier, has finished, or waits for a lane that is not coming. False if
// none of them could go on.
bool Block::run_warp(unsigned first, unsigned end) {
    bool has_run = false;
    while (release_warp(first, end)) {
        backwards = !backwards;
        has_run = run_ready(first, end);
    }
    return has_run;
}

// False if not all threads that have not finished are there.
bool Block::pass_barrier() {
    for (const Thread &thread : threads) {
        if (thread.state != State::AtBlock && thread.state != State::Finished) {
            return false;
        }
    }
    for (Thread &thread : threads) {
        if (thread.state == State::AtBlock) {
            thread.state = State::Ready;
        }
    }
    backwards = !backwards;
    return run_ready(0, threads.size());
}

void Block::report_deadlock() {
    unsigned at_block = 0, at_warp = 0;
    for (const Thread &thread : threads) {
        at_block += thread.state == State::AtBlock;
        at_warp += thread.state == State::AtWarp;
    }
    die("%s: threads of a block wait for each other for ever: %u in __syncthreads, %u for lanes of their warp, %u have finished",
        launch->kernel.c_str(), at_block, at_warp, num_finished);
}

void Block::run(const Launch &of, unsigned x, unsigned y, unsigned z) {
    launch = &of;
    simulator_position.block_index = {x, y, z};
    threads.assign(of.block[0] * of.block[1] * of.block[2], Thread());
    shared.assign(of.shared_bytes, (char)0xff);
    num_begun = num_finished = 0;
    const unsigned count = threads.size();
    while (num_begun < count) {
        if (idle.empty()) {
            idle.push_back(new_fiber());
        }
        Fiber *fiber = idle.back();
        idle.pop_back();
        resume(fiber);
    }
    while (num_finished < count) {
        bool has_run = false;
        for (unsigned first = 0; first < count; first += WARP) {
            has_run = run_warp(first, std::min(count, first + WARP)) || has_run;
        }
        if (!pass_barrier() && !has_run) {
            report_deadlock();
        }
    }
    backwards = !backwards;
}

} // namespace

void run_grid(const Launch &launch) {
    if (!block) {
        block = new Block;
    }
    const auto &grid = launch.grid, &size = launch.block;
    simulator_position.grid_size = {grid[0], grid[1], grid[2]};
    simulator_position.block_size = {size[0], size[1], size[2]};
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                block->run(launch, x, y, z);
            }
        }
    }
}

void release_stacks() {
    delete block;
    block = nullptr;
}

} // namespace simulator

using namespace simulator;

extern "C" {

void simulator_sync_threads() { block->wait(State::AtBlock, 0); }
void simulator_sync_warp(unsigned mask) { block->wait(State::AtWarp, mask); }

uint64_t simulator_shuffle(unsigned mask, uint64_t value, unsigned from) {
    const unsigned self = block->current, first = self / WARP * WARP;
    block->threads[self].given = value;
    block->wait(State::AtWarp, mask);
    // What a lane that does not take part has given is undefined.
    const bool is_there = first + from < block->threads.size() && mask >> from & 1;
    const uint64_t taken = is_there ? block->threads[first + from].given : ~uint64_t(0);
    // Nobody gives anew before all have taken.
    block->wait(State::AtWarp, mask);
    return taken;
}

unsigned simulator_ballot(unsigned mask, bool predicate) {
    const unsigned self = block->current, first = self / WARP * WARP;
    block->threads[self].given = predicate;
    block->wait(State::AtWarp, mask);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < WARP && first + lane < block->threads.size(); lane++) {
        const bool counts = mask >> lane & 1 && block->threads[first + lane].state != State::Finished;
        votes |= (counts && block->threads[first + lane].given ? 1u : 0u) << lane;
    }
    block->wait(State::AtWarp, mask);
    return votes;
}

void *simulator_dynamic_shared() { return block->shared.data(); }

void simulator_trap(const char *what) { die("a kernel has ended the program: %s", what); }

} // extern "C"
