// cast: copies many tensors into tensors of another dtype (or of the same), in one launch.
//
//   cast_{source}_to_{target}  <<<number of chunks, THREADS>>>(tensors, chunks)
//       for source and target among float16, bfloat16, float32
//
//   tensors  const Row*    24 bytes: source address, target address, number of elements
//   chunks   const Chunk*  as in tensor_table.cuh
//
// A target may be its source only where the dtypes are of one size.

#include "dtypes.cuh"
#include "sweep.cuh"

struct Row {
    const void* source;
    void* target;
    long long length;
};

static_assert(sizeof(Row) == 24, "the host packs a row into 24 bytes");

template <typename Source, typename Target>
struct Cast : Reads<Source> {
    Target* target;

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Pack<Source, WIDTH>& operands) const {
        Pack<Target, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            round_to(result.element[k], to_float(operands.element[k]));
        }
        store(target + i, result);
    }
};

template <typename Source, typename Target>
__device__ __forceinline__ void cast_chunk(const Row* tensors, const Chunk& chunk) {
    constexpr int WIDTH = vector_width<Source, Target>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    Cast<Source, Target> cast{{part.of(static_cast<const Source*>(row.source))},
                              part.of(static_cast<Target*>(row.target))};
    sweep<WIDTH, 4>(part.length, pack_begins<WIDTH>(cast.source, cast.target), cast);
}

#define MAKE_CAST(SOURCE, TARGET)                                           \
    extern "C" __global__ void __launch_bounds__(THREADS)                   \
        cast_##SOURCE##_to_##TARGET(const Row* tensors, const Chunk* chunks) { \
        cast_chunk<SOURCE, TARGET>(tensors, chunks[blockIdx.x]);            \
    }

AMP_FOR_EACH_PAIR(MAKE_CAST)
