// statistics.cuh: what a pass finds out about the values that it writes, and how blocks add it up.
//
// Knows nothing of tables. Nothing here depends on the order in which threads or blocks run: sums
// are formed along fixed trees, so that the same values give the same bits.

#pragma once

#include "dtypes.cuh"
#include "sweep.cuh"
#include "tensor_table.cuh"

enum Flag { HAS_INF = 1, HAS_NAN = 2 };

// 16 bytes, in this order in device memory.
struct Statistics {
    double sum_of_squares;
    float largest;  // magnitude; inf where there is one, NaN left out, 0 where there is nothing
    int flags;      // of Flag

    __device__ void add(const Statistics& other) {
        sum_of_squares += other.sum_of_squares;
        largest = fmaxf(largest, other.largest);
        flags |= other.flags;
    }
};

static_assert(sizeof(Statistics) == 16, "the host reads statistics of 16 bytes");

// Squares are added up in float32 within a pack, and in float64 from there on: a conversion per
// pack costs little also where float64 is slow. A square overflows above 1.8e19 in magnitude, and
// the sum is inf then.
template <typename Type, int WIDTH>
__device__ __forceinline__ void examine(const Pack<Type, WIDTH>& pack, Statistics& found) {
    constexpr unsigned INF_BITS = 0x7f800000u;
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const float value = to_float(pack.element[k]);
        const unsigned magnitude = __float_as_uint(value) & 0x7fffffffu;
        squares += value * value;
        if (magnitude >= INF_BITS) found.flags |= magnitude == INF_BITS ? HAS_INF : HAS_NAN;
        found.largest = fmaxf(found.largest, fabsf(value));
    }
    found.sum_of_squares += squares;
}

// Add up what the threads of a block found; the result is in thread 0. All threads must call it,
// and meet at a barrier before they call it again.
__device__ Statistics block_total(Statistics mine) {
    constexpr unsigned WARP = 0xffffffffu;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        mine.add({__shfl_xor_sync(WARP, mine.sum_of_squares, lanes),
                  __shfl_xor_sync(WARP, mine.largest, lanes),
                  __shfl_xor_sync(WARP, mine.flags, lanes)});
    }
    __shared__ Statistics warps[THREADS / 32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < THREADS / 32; ++warp) mine.add(warps[warp]);
    }
    return mine;
}
