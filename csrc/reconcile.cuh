// reconcile.cuh: makes a master and its half copy agree where one was written to; knows no tables.
//
// Where the master, rounded, has other bits than the copy, one of the two was written to since they
// were equal: the copy becomes the rounded master if that wins, else the master becomes the copy.
// Elsewhere nothing changes: the master keeps the bits that the copy cannot hold.

#pragma once

#include "dtypes.cuh"
#include "sweep.cuh"

// Unlike ==, tells zeros of different signs apart and takes a NaN as equal to itself.
template <typename Type>
__device__ __forceinline__ bool same_bits(Type one, Type other) {
    return __float_as_uint(to_float(one)) == __float_as_uint(to_float(other));
}

// Let a master follow its copy; return whether any element changed.
template <typename Copy, int WIDTH>
__device__ __forceinline__ bool follow(Pack<float, WIDTH>& master, const Pack<Copy, WIDTH>& copy) {
    bool differ = false;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        Copy rounded;
        round_to(rounded, master.element[k]);
        if (same_bits(rounded, copy.element[k])) continue;
        differ = true;
        master.element[k] = to_float(copy.element[k]);
    }
    return differ;
}

template <typename Copy, int WIDTH>
__device__ __forceinline__ void store_rounded(Copy* address, const Pack<float, WIDTH>& master) {
    Pack<Copy, WIDTH> copy;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) round_to(copy.element[k], master.element[k]);
    store(address, copy);
}

template <typename Copy>
struct Reconcile {
    float* master;
    Copy* copy;
    bool wins;

    template <int WIDTH>
    struct Operands {
        Pack<float, WIDTH> master;
        Pack<Copy, WIDTH> copy;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        return {load<WIDTH>(master + i), load<WIDTH>(copy + i)};
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Operands<WIDTH>& operands) const {
        Pack<float, WIDTH> followed = operands.master;
        if (!follow(followed, operands.copy)) return;
        if (wins) {
            store_rounded(copy + i, operands.master);
        } else {
            store(master + i, followed);
        }
    }
};
