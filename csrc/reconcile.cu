// reconcile: makes many masters and their half copies agree again, in one launch.
//
//   reconcile_{copy}  <<<number of chunks, THREADS>>>(tensors, chunks)
//       for copy among float16, bfloat16
//
//   tensors  const Row*    32 bytes: master address (float32), copy address, whether the master
//                          wins (8 bytes, 0 or 1), number of elements
//   chunks   const Chunk*  as in tensor_table.cuh
//
// Where the master, rounded, has other bits than the copy, one of the two was written to since they
// were equal: the copy becomes the rounded master if that wins, else the master becomes the copy.
// Elsewhere nothing is written.

#include "dtypes.cuh"
#include "sweep.cuh"

struct Row {
    float* master;
    void* copy;
    long long wins;
    long long length;
};

static_assert(sizeof(Row) == 32, "the host packs a row into 32 bytes");

// Unlike ==, tells zeros of different signs apart and takes a NaN as equal to itself.
template <typename Type>
__device__ __forceinline__ bool same_bits(Type one, Type other) {
    return __float_as_uint(to_float(one)) == __float_as_uint(to_float(other));
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
        Pack<float, WIDTH> exact = operands.master;
        Pack<Copy, WIDTH> rounded;
        bool differ = false;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            round_to(rounded.element[k], exact.element[k]);
            if (same_bits(rounded.element[k], operands.copy.element[k])) continue;
            differ = true;
            exact.element[k] = to_float(operands.copy.element[k]);
        }
        if (!differ) return;
        if (wins) {
            store(copy + i, rounded);
        } else {
            store(master + i, exact);
        }
    }
};

template <typename Copy>
__device__ __forceinline__ void reconcile_chunk(const Row* tensors, const Chunk& chunk) {
    constexpr int WIDTH = vector_width<float, Copy>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    Reconcile<Copy> reconcile{part.of(row.master), part.of(static_cast<Copy*>(row.copy)),
                              row.wins != 0};
    sweep<WIDTH, 4>(part.length, all_aligned<WIDTH>(reconcile.master, reconcile.copy), reconcile);
}

#define MAKE_RECONCILE(COPY)                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)           \
        reconcile_##COPY(const Row* tensors, const Chunk* chunks) { \
        reconcile_chunk<COPY>(tensors, chunks[blockIdx.x]);         \
    }

MAKE_RECONCILE(float16)
MAKE_RECONCILE(bfloat16)
