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
