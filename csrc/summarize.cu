// summarize: makes totals per tensor and in all of what a pass found in its chunks, in one launch.
//
//   summarize  <<<number of tensors, THREADS>>>(ranges, chunks, tensors, total, found_inf, keep,
//                                               ticket)
//
//   ranges     const Range*       per tensor, int32 begin and end of its entries in `chunks`; empty
//                                 for a tensor without elements. It depends on the sizes only.
//   chunks     const Statistics*  what unscale and accumulate found, as in statistics.cuh, however
//                                 many launches wrote it
//   tensors    Statistics*        written, one per tensor
//   total      Statistics*        written, one
//   found_inf  float*             1 where any value is inf or NaN, else 0; 0 (null): not written
//   keep       int                not 0: a found_inf that is up already stays up
//   ticket     unsigned*          0 before the first launch, and left at 0; launches that may run
//                                 at the same time need one each
//
// There must be at least one tensor. The same bits come out on every run.
//
//   clip_coefficient  <<<1, 32>>>(squares, max_norm, eps, norm, coefficient)
//
//   squares      const double*  the sum of squares of the unscaled gradients: that of a Statistics,
//                               which begins with it, or of several
//   max_norm     float
//   eps          float
//   norm         float*         written: their norm
//   coefficient  float*         written: min(1, max_norm / (norm + eps)), torch's bits

#include "statistics.cuh"

struct Range {
    int begin;
    int end;
};

static_assert(sizeof(Range) == 8, "the host packs a range into 8 bytes");

// Tell whether all other blocks have written what they had to; one block of a launch gets true.
__device__ bool is_last_block(unsigned* ticket) {
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    summarize(const Range* ranges, const Statistics* chunks, Statistics* tensors, Statistics* total,
              float* found_inf, int keep, unsigned* ticket) {
    const Range range = ranges[blockIdx.x];
    const Statistics tensor = block_total(thread_sum(chunks, range.begin, range.end));
    if (threadIdx.x == 0) tensors[blockIdx.x] = tensor;
    if (!is_last_block(ticket)) return;
    const Statistics all = block_total(thread_sum(tensors, 0, static_cast<int>(gridDim.x)));
    if (threadIdx.x != 0) return;
    *total = all;
    if (found_inf == nullptr) return;
    if (all.flags != 0) {
        *found_inf = 1.0f;
    } else if (keep == 0) {
        *found_inf = 0.0f;
    }
}

extern "C" __global__ void clip_coefficient(const double* squares, float max_norm, float eps,
                                            float* norm, float* coefficient) {
    if (threadIdx.x != 0) return;
    const float rounded = static_cast<float>(sqrt(*squares));
    // The division's two roundings and the NaN that stays one are torch's.
    const float factor = 1.0f / (rounded + eps) * max_norm;
    *norm = rounded;
    *coefficient = factor > 1.0f ? 1.0f : factor;
}
