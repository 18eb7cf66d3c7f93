// float16 as CUDA's header of this name has it, as far as the kernels need it.

#pragma once

#include "cuda_on_cpu.h"

struct __half {
    unsigned short bits;
};

inline float __half2float(__half value) {
    const unsigned sign = (value.bits & 0x8000u) << 16;
    const unsigned rest = value.bits & 0x7fffu;
    if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    const float magnitude = rest >= 0x400 ? __uint_as_float((rest << 13) + (112u << 23))
                                          : static_cast<float>(rest) * 0x1p-24f;
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline __half __float2half_rn(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned sign = bits >> 16 & 0x8000;
    const unsigned magnitude = bits & 0x7fffffff;
    unsigned rounded;
    if (magnitude > 0x7f800000) return {0x7fff};  // CUDA's only NaN
    if (magnitude >= 0x477ff000) {                // 65520 and above
        rounded = 0x7c00;
    } else if (magnitude < 0x38800000) {  // below 2**-14, the smallest normal: units of 2**-24
        rounded = static_cast<unsigned>(std::nearbyint(__uint_as_float(magnitude) * 0x1p24f));
    } else {
        rounded = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    }
    return {static_cast<unsigned short>(sign | rounded)};
}
