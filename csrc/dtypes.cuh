// dtypes.cuh: the three dtypes, what converts between them, and which mixes there are.
//
// Knows nothing of tables and launches. Everything is computed in float32 and rounded once, to
// nearest even, as torch's Tensor.to rounds: infinities and NaN stay what they are, and what is
// too large for a half becomes an infinity.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Named as in torch, so that a kernel's name is made of its dtypes.
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using float32 = float;

__device__ __forceinline__ float to_float(float16 value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(float32 value) { return value; }

__device__ __forceinline__ void round_to(float16& out, float value) {
    out = __float2half_rn(value);
}
__device__ __forceinline__ void round_to(bfloat16& out, float value) {
    out = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void round_to(float32& out, float value) { out = value; }

// Elements of a pack: 8 where all are halves, else 4, so that the largest dtype moves 16 bytes.
// Beside float32 a half then moves 8 bytes at once, and a warp's accesses stay contiguous in both;
// 8 elements of each would leave gaps of 16 bytes between the lanes in every float32 access.
template <typename... Types>
constexpr int vector_width = ((sizeof(Types) == 2) && ...) ? 8 : 4;

// MAKE(A, B) for each of the 9 mixes of two dtypes.
#define AMP_FOR_EACH_DTYPE_AFTER(MAKE, A) MAKE(A, float16) MAKE(A, bfloat16) MAKE(A, float32)
#define AMP_FOR_EACH_PAIR(MAKE)              \
    AMP_FOR_EACH_DTYPE_AFTER(MAKE, float16)  \
    AMP_FOR_EACH_DTYPE_AFTER(MAKE, bfloat16) \
    AMP_FOR_EACH_DTYPE_AFTER(MAKE, float32)
