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

// Where packs can begin in tensors, as a set of bits to be united with that of others: bit n, after
// the first n elements, where an address is aligned to a pack again. A null address adds none.
template <int WIDTH, typename Type>
__device__ __forceinline__ unsigned pack_begin(const Type* address) {
    if (address == nullptr) return 0;
    return 1u << (-(reinterpret_cast<unsigned long long>(address) / sizeof(Type)) % WIDTH);
}

template <int WIDTH, typename... Types>
__device__ __forceinline__ unsigned pack_begins(const Types*... addresses) {
    return (pack_begin<WIDTH>(addresses) | ...);
}

// The reading half of an operation (below) on one tensor.
template <typename Type>
struct Reads {
    const Type* source;

    template <int WIDTH>
    using Operands = Pack<Type, WIDTH>;

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        return load<WIDTH>(source + i);
    }
};

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
// `begins` is where packs can begin in the tensors, not empty; unless it is the same in all of them
// the elements move one by one.
template <int WIDTH, int AHEAD, typename Operation>
__device__ __forceinline__ void sweep(int length, unsigned begins, Operation& operation) {
    const bool are_alike = (begins & (begins - 1)) == 0;
    const int head = are_alike ? min(__ffs(begins) - 1, length) : 0;
    const int tail = are_alike ? head + (length - head) / WIDTH * WIDTH : 0;
    sweep_packs<WIDTH, AHEAD>(head, tail, operation);
    // Before the packs, then after them, by the same code: twice of it would take more registers.
#pragma unroll 1
    for (int begin = 0, end = head;; begin = tail, end = length) {
        sweep_packs<1, AHEAD>(begin, end, operation);
        if (end == length) break;
    }
}
