// unscale: divides many gradients by the loss scale and examines what it writes, in one launch.
//
//   unscale_{source}_to_{target}  <<<number of chunks, THREADS>>>(tensors, chunks, scale, found)
//       for source and target among float16, bfloat16, float32
//
//   tensors  const Row*    24 bytes: source address, target address, number of elements
//   chunks   const Chunk*  as in tensor_table.cuh
//   scale    const float*  the loss scale; 0 (null) where there is none, as if it were 1
//   found    Statistics*   one per chunk, as in statistics.cuh; written, not added to
//
// target = source * (1 / scale): the inverse is rounded once to float32, the product to float32 and
// then to the target's dtype. Examined is the value as stored, after that rounding: with a scale
// below 1 a finite source may overflow. A target may be its source. Where the target address is 0
// nothing is written: the values are examined only, for an optimizer that unscales them itself.
// summarize.cu makes totals of what the chunks found.

#include "dtypes.cuh"
#include "statistics.cuh"
#include "sweep.cuh"

struct Row {
    const void* source;
    void* target;
    long long length;
};

static_assert(sizeof(Row) == 24, "the host packs a row into 24 bytes");

template <typename Source, typename Target>
struct Unscale : Reads<Source> {
    Target* target;
    float inverse;
    Statistics found;

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Pack<Source, WIDTH>& operands) {
        Pack<Target, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            round_to(result.element[k], to_float(operands.element[k]) * inverse);
        }
        examine(result, found);
        if (target != nullptr) store(target + i, result);
    }
};

template <typename Source, typename Target>
__device__ __forceinline__ void unscale_chunk(const Row* tensors, const Chunk& chunk,
                                              const float* scale, Statistics& found) {
    constexpr int WIDTH = vector_width<Source, Target>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    const float inverse = scale == nullptr ? 1.0f : 1.0f / *scale;
    Unscale<Source, Target> unscale{{part.of(static_cast<const Source*>(row.source))},
                                    part.of(static_cast<Target*>(row.target)), inverse, {}};
    constexpr int AHEAD = 16 / WIDTH;  // packs; of 8 halves, more than two would spill
    sweep<WIDTH, AHEAD>(part.length, pack_begins<WIDTH>(unscale.source, unscale.target), unscale);
    const Statistics total = block_total(flagged(unscale.found));
    if (threadIdx.x == 0) found = total;
}

#define MAKE_UNSCALE(SOURCE, TARGET)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) unscale_##SOURCE##_to_##TARGET(       \
        const Row* tensors, const Chunk* chunks, const float* scale, Statistics* found) {       \
        unscale_chunk<SOURCE, TARGET>(tensors, chunks[blockIdx.x], scale, found[blockIdx.x]);   \
    }

AMP_FOR_EACH_PAIR(MAKE_UNSCALE)
