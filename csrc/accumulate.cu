// accumulate: adds up many pairs of gradients and examines what it writes, in one launch.
//
//   accumulate_{x}_{y}_to_{target}  <<<number of chunks, THREADS>>>(tensors, chunks, a, x_scale,
//                                                                   b, y_scale, found)
//       for x, y and target among float16, bfloat16, float32
//
//   tensors  const Row*    32 bytes: addresses of x, y and target, number of elements
//   chunks   const Chunk*  as in tensor_table.cuh
//   a, b     float
//   x_scale, y_scale  const float*  loss scales that x and y still bear; 0 (null): none
//   found    Statistics*   one per chunk, as in statistics.cuh; written, not added to
//
// target = (a / x_scale) * x + (b / y_scale) * y: 1 / scale is rounded once, then its product with
// a or b, each of the two products and their sum, all to float32, and the sum then to the target's
// dtype. With a and b 1 that is what unscale and an addition give, bit for bit. Examined is the
// value as stored. A target may be its x or y. summarize.cu makes totals of what the chunks found.

#include "dtypes.cuh"
#include "statistics.cuh"
#include "sweep.cuh"

struct Row {
    const void* x;
    const void* y;
    void* target;
    long long length;
};

static_assert(sizeof(Row) == 32, "the host packs a row into 32 bytes");

template <typename X, typename Y, typename Target>
struct Accumulate {
    const X* x;
    const Y* y;
    Target* target;
    float a;
    float b;
    Statistics found;

    template <int WIDTH>
    struct Operands {
        Pack<X, WIDTH> x;
        Pack<Y, WIDTH> y;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        return {load<WIDTH>(x + i), load<WIDTH>(y + i)};
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Operands<WIDTH>& operands) {
        Pack<Target, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            round_to(result.element[k],
                     a * to_float(operands.x.element[k]) + b * to_float(operands.y.element[k]));
        }
        examine(result, found);
        store(target + i, result);
    }
};

__device__ __forceinline__ float divided(float coefficient, const float* scale) {
    return scale == nullptr ? coefficient : coefficient * (1.0f / *scale);
}

template <typename X, typename Y, typename Target>
__device__ __forceinline__ void accumulate_chunk(const Row* tensors, const Chunk& chunk, float a,
                                                 float b, Statistics& found) {
    constexpr int WIDTH = vector_width<X, Y, Target>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    Accumulate<X, Y, Target> accumulate{part.of(static_cast<const X*>(row.x)),
                                        part.of(static_cast<const Y*>(row.y)),
                                        part.of(static_cast<Target*>(row.target)), a, b, {}};
    const unsigned begins = pack_begins<WIDTH>(accumulate.x, accumulate.y, accumulate.target);
    sweep<WIDTH, 2>(part.length, begins, accumulate);
    const Statistics total = block_total(flagged(accumulate.found));
    if (threadIdx.x == 0) found = total;
}

#define MAKE_ACCUMULATE(X, Y, TARGET)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) accumulate_##X##_##Y##_to_##TARGET(      \
        const Row* tensors, const Chunk* chunks, float a, const float* x_scale, float b,           \
        const float* y_scale, Statistics* found) {                                                 \
        accumulate_chunk<X, Y, TARGET>(tensors, chunks[blockIdx.x], divided(a, x_scale),           \
                                       divided(b, y_scale), found[blockIdx.x]);                    \
    }
#define MAKE_FOR_EACH_TARGET(X, Y)  \
    MAKE_ACCUMULATE(X, Y, float16)  \
    MAKE_ACCUMULATE(X, Y, bfloat16) \
    MAKE_ACCUMULATE(X, Y, float32)

AMP_FOR_EACH_PAIR(MAKE_FOR_EACH_TARGET)
