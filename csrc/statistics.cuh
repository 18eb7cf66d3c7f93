// statistics.cuh: what a pass finds out about the values that it writes, and how blocks add it up.
//
// Knows nothing of tables. The same values at the same alignments give the same bits on every run.

#pragma once

#include "dtypes.cuh"
#include "reduction.cuh"
#include "sweep.cuh"

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

    __device__ Statistics from_lane(int lanes) const {
        return {::from_lane(sum_of_squares, lanes), ::from_lane(largest, lanes),
                ::from_lane(flags, lanes)};
    }
};

static_assert(sizeof(Statistics) == 16, "the host reads statistics of 16 bytes");

// Squares are added up in float32 within a pack, and in float64 from there on: a conversion per
// pack costs little also where float64 is slow. A square overflows above 1.8e19 in magnitude, and
// the sum is inf then. The flags are left to `flagged`: a look at each element's bits would cost
// more integer operations than a GPU has time for while the next elements come from memory.
template <typename Type, int WIDTH>
__device__ __forceinline__ void examine(const Pack<Type, WIDTH>& pack, Statistics& found) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        const float value = to_float(pack.element[k]);
        squares += value * value;
        found.largest = fmaxf(found.largest, fabsf(value));
    }
    found.sum_of_squares += squares;
}

// Return what was examined with its flags. Nothing finite is as large as inf, and a sum of squares
// is NaN only where a value is: no square is negative, so that infinities add up to inf.
__device__ __forceinline__ Statistics flagged(Statistics found) {
    if (__float_as_uint(found.largest) == 0x7f800000u) found.flags |= HAS_INF;
    if (found.sum_of_squares != found.sum_of_squares) found.flags |= HAS_NAN;
    return found;
}

// Add up what the threads of a block found; the result is in thread 0. All threads must call it,
// and meet at a barrier before they call it again.
__device__ Statistics block_total(const Statistics& mine) {
    __shared__ Statistics warps[WARPS];
    return block_sum(mine, warps);
}
