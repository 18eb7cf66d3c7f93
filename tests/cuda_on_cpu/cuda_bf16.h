// bfloat16 as CUDA's header of this name has it, as far as the kernels need it.

#pragma once

#include "cuda_on_cpu.h"

struct __nv_bfloat16 {
    unsigned short bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};  // CUDA's only NaN
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
