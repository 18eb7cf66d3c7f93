// Runs the text of a .cu file on the CPU, with the GPU's launch shapes; knows no kernel.
//
// Included before the file itself. Every thread of a block is a fiber. A fiber runs until it waits
// at a barrier or for its warp, or ends; then any other that can run is drawn. Blocks are drawn in
// random order too, one after the other, and shared memory is filled with NaN before each. So the
// threads' order between barriers is another one at every launch, and what depends on it shows.
//
// Reported as an error, and the launch given up: a barrier or a shuffle that not all threads reach,
// or not in the same line; an assertion that is not true; a misaligned or null access (the compiler's alignment sanitizer tells of
// every one, through the handler below); an atomic that no __threadfence() makes safe to publish
// with. Not seen: out of bounds accesses (tests put NaN around each tensor), and races between
// threads of one warp that a shuffle happens to order.

#pragma once

// Few headers of the library: each source is compiled with them.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("cuda_shared")))
#define __builtin_assume(condition) static_cast<void>(0)

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

constexpr unsigned WARP = 32;
constexpr std::size_t STACK = 1 << 16;

// Made once, and given one thread after another to run.
struct Fiber {
    enum State { RUNNABLE, AT_BARRIER, AT_SHUFFLE, ENDED };
    jmp_buf context;
    char* stack = nullptr;
    State state = RUNNABLE;
    int line = 0;         // where it waits
    bool fenced = false;  // whether a fence came after the last barrier
    bool parity = false;  // which slot its next shuffle uses: two, for lanes that run ahead
    alignas(16) unsigned char slots[2][16];
};

struct Random {
    std::uint64_t state;

    unsigned below(std::size_t limit) {  // xorshift64*, by Vigna
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return static_cast<unsigned>((state * 0x2545F4914F6CDD1DULL >> 33) % limit);
    }
};

struct Block {
    std::vector<Fiber> fibers;
    void (*body)(void** arguments);
    void** arguments;
    jmp_buf scheduler;
    unsigned current = 0;
    char error[256] = "";
};
static Block block;

// The section of all __shared__ variables; it is missing where there are none.
extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

inline Fiber& current() { return block.fibers[block.current]; }

// As swapcontext, but without its calls into the system for the mask of signals.
inline void switch_to(jmp_buf& other, jmp_buf& own) {
    if (_setjmp(own) == 0) _longjmp(other, 1);
}

inline void wait_as(Fiber::State state, int line) {
    current().state = state;
    current().line = line;
    switch_to(block.scheduler, current().context);
}

// Keep the first error that is told.
__attribute__((format(printf, 1, 2))) inline void tell(const char* format, ...) {
    if (*block.error != '\0') return;
    va_list values;
    va_start(values, format);
    std::vsnprintf(block.error, sizeof block.error, format, values);
    va_end(values);
}

inline void give_up() { wait_as(Fiber::ENDED, 0); }

inline void barrier(int line) {
    wait_as(Fiber::AT_BARRIER, line);
    current().fenced = false;
}

template <typename Type>
Type shuffle(unsigned mask, Type value, unsigned lane, int line) {
    static_assert(sizeof(Type) <= 8, "a GPU shuffles 4 or 8 bytes");
    if (mask != 0xffffffffu) {
        tell("a shuffle of a part of a warp is not emulated");
        give_up();
    }
    const bool slot = current().parity;
    std::memcpy(current().slots[slot], &value, sizeof(Type));
    current().parity = !slot;
    wait_as(Fiber::AT_SHUFFLE, line);
    std::memcpy(&value, block.fibers[block.current / WARP * WARP + lane].slots[slot], sizeof(Type));
    return value;
}

inline void require_fence(int line) {
    if (current().fenced) return;
    tell("line %d: an atomic without __threadfence() before it", line);
    give_up();
}

inline void refuse(const char* condition, int line) {
    tell("line %d: the assertion %s is not true", line, condition);
    give_up();
}

inline void run_threads() {
    for (;;) {
        switch_to(block.scheduler, current().context);
        block.body(block.arguments);
        current().state = Fiber::ENDED;
    }
}

inline void make_fibers(unsigned size) {
    for (Fiber& fiber : block.fibers) delete[] fiber.stack;
    block.fibers.assign(size, Fiber());
    for (block.current = 0; block.current < size; ++block.current) {
        ucontext_t start;
        getcontext(&start);
        start.uc_stack.ss_sp = current().stack = new char[STACK];
        start.uc_stack.ss_size = STACK;
        start.uc_link = nullptr;
        makecontext(&start, run_threads, 0);
        if (_setjmp(block.scheduler) == 0) setcontext(&start);
    }
}

// Let all of `size` fibers from `first` on go on, if they wait for each other in the same line.
inline bool release(unsigned first, unsigned size, Fiber::State state) {
    const int line = block.fibers[first].line;
    for (unsigned i = first; i < first + size; ++i) {
        if (block.fibers[i].state != state || block.fibers[i].line != line) return false;
    }
    for (unsigned i = first; i < first + size; ++i) block.fibers[i].state = Fiber::RUNNABLE;
    return true;
}

inline bool release_waiting() {
    const unsigned size = static_cast<unsigned>(block.fibers.size());
    bool released = release(0, size, Fiber::AT_BARRIER);
    for (unsigned warp = 0; warp < size; warp += WARP) {
        released |= release(warp, WARP, Fiber::AT_SHUFFLE);
    }
    return released;
}

inline void explain_deadlock() {
    for (const Fiber& fiber : block.fibers) {
        if (fiber.state == Fiber::ENDED) continue;
        const char* what = fiber.state == Fiber::AT_BARRIER ? "barrier" : "shuffle";
        tell("the %s in line %d is not reached by all threads", what, fiber.line);
        return;
    }
}

inline void run_fibers(Random& random) {
    std::vector<unsigned> runnable;
    while (*block.error == '\0') {
        for (unsigned i = 0; i < block.fibers.size(); ++i) {
            if (block.fibers[i].state == Fiber::RUNNABLE) runnable.push_back(i);
        }
        while (!runnable.empty() && *block.error == '\0') {
            std::swap(runnable[random.below(runnable.size())], runnable.back());
            block.current = runnable.back();
            runnable.pop_back();
            threadIdx.x = block.current;
            switch_to(current().context, block.scheduler);
        }
        if (!release_waiting()) break;
    }
    explain_deadlock();
}

inline void run_block(unsigned index, Random& random) {
    blockIdx.x = index;
    if (__start_cuda_shared) {
        std::memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
    }
    for (Fiber& fiber : block.fibers) {
        fiber.state = Fiber::RUNNABLE;
        fiber.fenced = fiber.parity = false;
    }
    run_fibers(random);
}

// Returns what went wrong, "" if nothing did.
inline const char* run_grid(unsigned grid, unsigned threads, std::uint64_t seed) {
    if (threads % WARP != 0) return "whole warps only are emulated";
    // after an error threads may still wait in the midst of the kernel
    if (block.fibers.size() != threads || *block.error != '\0') make_fibers(threads);
    *block.error = '\0';
    gridDim.x = grid;
    blockDim.x = threads;
    Random random{seed * 2 + 1};
    std::vector<unsigned> order(grid);
    for (unsigned i = 0; i < grid; ++i) order[i] = i;
    for (unsigned i = grid; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    for (unsigned index : order) {
        run_block(index, random);
        if (*block.error != '\0') break;
    }
    return block.error;
}

template <typename... Parameters, std::size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::decay_t<Parameters>*>(arguments[I])...);
}

// As cuLaunchKernel: an address per argument.
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

template <typename Type>
constexpr char letter_of() {
    if (std::is_pointer_v<Type>) return 'P';
    if (std::is_same_v<Type, double>) return 'd';
    if (std::is_same_v<Type, float>) return 'f';
    if (std::is_same_v<Type, long long>) return 'q';
    static_assert(std::is_pointer_v<Type> || std::is_arithmetic_v<Type>, "scalars and pointers");
    return 'i';
}

// The kernel's parameters, a letter each, as Python's struct module names them.
template <typename... Parameters>
const char* parameters(void (*)(Parameters...)) {
    static const char letters[] = {letter_of<Parameters>()..., '\0'};
    return letters;
}

}  // namespace cuda_on_cpu

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define EMULATE(kernel)                                                                       \
    EXPORTED const char* launch_##kernel(unsigned grid, unsigned threads, std::uint64_t seed, \
                                         void** arguments) {                                  \
        cuda_on_cpu::block.body = [](void** a) { cuda_on_cpu::call(kernel, a); };             \
        cuda_on_cpu::block.arguments = arguments;                                             \
        return cuda_on_cpu::run_grid(grid, threads, seed);                                    \
    }                                                                                         \
    EXPORTED const char* parameters_##kernel() { return cuda_on_cpu::parameters(kernel); }

// What the kernels use of CUDA.

template <typename Type>
constexpr Type min(Type one, Type other) {
    return other < one ? other : one;
}

template <typename Type>
constexpr Type max(Type one, Type other) {
    return one < other ? other : one;
}

#define __syncthreads() cuda_on_cpu::barrier(__LINE__)
#define __shfl_xor_sync(mask, value, lanes) \
    cuda_on_cpu::shuffle(mask, value, threadIdx.x % 32 ^ (lanes), __LINE__)
#define assert(condition) ((condition) ? void() : cuda_on_cpu::refuse(#condition, __LINE__))
#define atomicInc(address, limit) cuda_on_cpu::increment(address, limit, __LINE__)

inline void __threadfence() { cuda_on_cpu::current().fenced = true; }

inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline bool __isGlobal(const void*) { return true; }

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

namespace cuda_on_cpu {

inline unsigned increment(unsigned* address, unsigned limit, int line) {
    require_fence(line);
    const unsigned old = *address;
    *address = old >= limit ? 0 : old + 1;
    return old;
}

// Layouts of the compiler's sanitizer (compiler-rt, ubsan_handlers.h), of which no library is used.
struct SourceLocation {
    const char* file;
    std::uint32_t line, column;
};

struct TypeMismatch {
    SourceLocation location;
    const void* type;
    unsigned char log_alignment, kind;
};

inline void report_access(const TypeMismatch& access, std::uintptr_t address) {
    const char* slash = std::strrchr(access.location.file, '/');
    const char* file = slash == nullptr ? access.location.file : slash + 1;
    if (address == 0) {
        tell("%s, line %u: an access to address 0", file, access.location.line);
    } else {
        tell("%s, line %u: an access to an address not aligned to %d bytes", file,
             access.location.line, 1 << access.log_alignment);
    }
    give_up();
}

}  // namespace cuda_on_cpu

extern "C" void __ubsan_handle_type_mismatch_v1(cuda_on_cpu::TypeMismatch* access,
                                                std::uintptr_t address) {
    cuda_on_cpu::report_access(*access, address);
}
