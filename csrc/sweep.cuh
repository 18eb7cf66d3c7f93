// sweep.cuh: a block's way over the elements of its chunk, in aligned packs and in single elements.
//
// Knows nothing of dtypes, nor of what is done to the elements.

#pragma once

#include "tensor_table.cuh"

// WIDTH elements that move at once.
template <typename Type, int WIDTH>
struct alignas(sizeof(Type) * WIDTH) Pack {
    static_assert(sizeof(Type) * WIDTH <= 16, "a GPU moves at most 16 bytes at once");
    Type element[WIDTH];
};

template <int WIDTH, typename Type>
__device__ __forceinline__ Pack<Type, WIDTH> load(const Type* address) {
    __builtin_assume(__isGlobal(address));
    return *reinterpret_cast<const Pack<Type, WIDTH>*>(address);
}

template <typename Type, int WIDTH>
__device__ __forceinline__ void store(Type* address, const Pack<Type, WIDTH>& pack) {
    __builtin_assume(__isGlobal(address));
    *reinterpret_cast<Pack<Type, WIDTH>*>(address) = pack;
}

template <int WIDTH, typename Type>
__device__ __forceinline__ bool is_aligned(const Type* address) {
    return reinterpret_cast<unsigned long long>(address) % alignof(Pack<Type, WIDTH>) == 0;
}

template <int WIDTH, typename... Types>
__device__ __forceinline__ bool all_aligned(const Types*... addresses) {
    return (is_aligned<WIDTH>(addresses) && ...);
}

// Each thread reads AHEAD packs before it uses the first, to keep more bytes on their way.
template <int WIDTH, int AHEAD, typename Operation>
__device__ __forceinline__ void sweep_packs(int begin, int end, Operation& operation) {
    constexpr int STRIDE = THREADS * WIDTH;
    int i = begin + static_cast<int>(threadIdx.x) * WIDTH;
    if constexpr (AHEAD > 1) {
#pragma unroll 1
        for (; i + (AHEAD - 1) * STRIDE < end; i += AHEAD * STRIDE) {
            typename Operation::template Operands<WIDTH> operands[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                operands[k] = operation.template read<WIDTH>(i + k * STRIDE);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                operation.template write<WIDTH>(i + k * STRIDE, operands[k]);
            }
        }
    }
#pragma unroll 1
    for (; i < end; i += STRIDE) {
        operation.template write<WIDTH>(i, operation.template read<WIDTH>(i));
    }
}

// Let the block pass over `length` elements. An operation has
//   Operands<WIDTH>              what it reads for WIDTH elements
//   read<WIDTH>(i)               returns them for elements i to i + WIDTH - 1
//   write<WIDTH>(i, operands)    computes and stores; no later element may need what it stored
template <int WIDTH, int AHEAD, typename Operation>
__device__ __forceinline__ void sweep(int length, bool aligned, Operation& operation) {
    const int packed = aligned ? length / WIDTH * WIDTH : 0;
    sweep_packs<WIDTH, AHEAD>(0, packed, operation);
    sweep_packs<1, AHEAD>(packed, length, operation);
}
