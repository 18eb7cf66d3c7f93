// reconcile: makes many masters and their half copies agree again, in one launch.
//
//   reconcile_{copy}  <<<number of chunks, THREADS>>>(tensors, chunks)
//       for copy among float16, bfloat16
//
//   tensors  const Row*    32 bytes: master address (float32), copy address, whether the master
//                          wins (8 bytes, 0 or 1), number of elements
//   chunks   const Chunk*  as in tensor_table.cuh
//
// Which of the two follows the other, and where, stands in reconcile.cuh.

#include "reconcile.cuh"

struct Row {
    float* master;
    void* copy;
    long long wins;
    long long length;
};

static_assert(sizeof(Row) == 32, "the host packs a row into 32 bytes");

template <typename Copy>
__device__ __forceinline__ void reconcile_chunk(const Row* tensors, const Chunk& chunk) {
    constexpr int WIDTH = vector_width<float, Copy>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    Reconcile<Copy> reconcile{part.of(row.master), part.of(static_cast<Copy*>(row.copy)),
                              row.wins != 0};
    sweep<WIDTH, 4>(part.length, pack_begins<WIDTH>(reconcile.master, reconcile.copy), reconcile);
}

#define MAKE_RECONCILE(COPY)                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)           \
        reconcile_##COPY(const Row* tensors, const Chunk* chunks) { \
        reconcile_chunk<COPY>(tensors, chunks[blockIdx.x]);         \
    }

MAKE_RECONCILE(float16)
MAKE_RECONCILE(bfloat16)
