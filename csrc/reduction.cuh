// reduction.cuh: the sum over a block's threads of whatever can be added; knows nothing of it.
//
// Sums are formed along a fixed tree: the same values at the same alignments give the same bits, in
// whatever order threads and blocks run.

#pragma once

#include "tensor_table.cuh"

constexpr int WARPS = THREADS / 32;

template <typename Value>
__device__ __forceinline__ Value from_lane(Value value, int lanes) {
    return __shfl_xor_sync(0xffffffffu, value, lanes);
}

// Add up a thread's share of the values from begin to end, of which there may be thousands for one
// block: eight are on their way at once, for one block that waits for each cannot use the memory.
template <typename Sum>
__device__ __forceinline__ Sum thread_sum(const Sum* values, int begin, int end) {
    constexpr int AHEAD = 8;
    Sum mine{};
#pragma unroll 1
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += AHEAD * THREADS) {
        Sum read[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (i + k * THREADS < end) read[k] = values[i + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (i + k * THREADS < end) mine.add(read[k]);
        }
    }
    return mine;
}

// Add up what each thread holds; the result is in thread 0. All threads must call it, and meet at a
// barrier before they call it with the same `warps`, which lies in shared memory. A Sum has
//   add(other)         adds to it
//   from_lane(lanes)   returns that of the thread whose lane differs in the bit `lanes`
template <typename Sum>
__device__ __forceinline__ Sum block_sum(Sum mine, Sum* warps) {
    for (int lanes = 16; lanes > 0; lanes /= 2) mine.add(mine.from_lane(lanes));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < WARPS; ++warp) mine.add(warps[warp]);
    }
    return mine;
}
