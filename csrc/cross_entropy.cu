// cross_entropy: the cross-entropy of logits and class indices, and its gradient, in one pass each.
//
//   cross_entropy_{dtype}           <<<number of rows, THREADS>>>(logits, targets, classes, ignored,
//                                                                 losses, totals)
//   cross_entropy_backward_{dtype}  <<<number of rows, THREADS>>>(logits, targets, classes, ignored,
//                                                                 totals, factors, stride, gradients)
//       for dtype among float16, bfloat16, float32
//
//   logits     const dtype*      rows of `classes` elements, one after the other
//   targets    const long long*  the class of each row
//   classes    int               at most 2**30
//   ignored    long long         a row with this target has the loss 0 and the gradient 0
//   losses     float*            one per row; written
//   totals     Total*            8 bytes per row: its largest logit, and the log of the sum of
//                                exp(logit - largest); written by the first, read by the second
//   factors    const float*      what each loss is multiplied by on the way to the user's loss,
//                                `stride` elements apart; 0 for one that all rows share
//   gradients  dtype*            as the logits; written
//
// loss = largest - logit[target] + log(sum), gradient = (exp(logit - largest - log(sum)) - [1 at the
// target]) * factor: computed in float32, the gradient rounded once, to the dtype of the logits. So
// nothing as large as the logits is made but their gradient. Two numbers per row are kept, and not
// their sum, for that would be less exact where all logits of a row are far from zero.
//
// A row that has NaN or inf, or nothing but -inf, makes NaN of its loss and its gradient, as torch's
// log_softmax does; one with some -inf is as if these classes were missing. Of an ignored row the
// logits are not read. A target that is neither ignored nor a class is refused as torch does it: by
// a device-side assertion. The same logits at the same alignment give the same bits on every run.

#include "dtypes.cuh"
#include "reduction.cuh"
#include "sweep.cuh"

struct Total {
    float largest;
    float log_sum;
};

static_assert(sizeof(Total) == 8, "the host makes two float32 per row");

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// exp() by the GPU's own power of two: of an error no larger than that of its rounded argument.
__device__ __forceinline__ float exponential(float value) { return exp2f(value * 1.44269504f); }

// What was seen of a row.
struct Seen {
    float largest;  // -inf where there is nothing; NaN left out
    float sum;      // of exp(value - largest); NaN where a value is NaN or inf

    // -inf - -inf were NaN, where exp(-inf) = 0 is meant.
    __device__ __forceinline__ float reference() const {
        return largest == minus_infinity() ? 0.0f : largest;
    }

    __device__ __forceinline__ void add(const Seen& other) {
        const float mine = largest;
        largest = fmaxf(largest, other.largest);
        sum = sum * exponential(mine - reference()) +
              other.sum * exponential(other.largest - reference());
    }

    __device__ Seen from_lane(int lanes) const {
        return {::from_lane(largest, lanes), ::from_lane(sum, lanes)};
    }
};

// The result is in thread 0. Called once by all threads.
__device__ Seen seen_by_block(const Seen& mine) {
    __shared__ Seen warps[WARPS];
    return block_sum(mine, warps);
}

template <typename Logit>
struct Look : Reads<Logit> {
    Seen seen;

    template <int WIDTH>
    __device__ __forceinline__ void write(int, const Pack<Logit, WIDTH>& operands) {
        float value[WIDTH];
        float largest = seen.largest;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            value[k] = to_float(operands.element[k]);
            largest = fmaxf(largest, value[k]);
        }
        if (largest > seen.largest) {  // seldom, after the first packs
            seen.sum *= exponential(seen.largest - largest);
            seen.largest = largest;
        }
        const float reference = seen.reference();
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum += exponential(value[k] - reference);
        seen.sum += sum;
    }
};

template <typename Logit>
struct Gradient : Reads<Logit> {
    Logit* gradients;
    Total total;
    float factor;
    int target;

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Pack<Logit, WIDTH>& operands) const {
        float value[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            value[k] = exponential(to_float(operands.element[k]) - total.largest - total.log_sum);
        }
        if (i <= target && target < i + WIDTH) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                if (i + k == target) value[k] -= 1.0f;
            }
        }
        Pack<Logit, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) round_to(result.element[k], value[k] * factor);
        store(gradients + i, result);
    }
};

template <typename Logit>
struct Zeros {
    Logit* gradients;

    template <int WIDTH>
    struct Operands {};

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int) const {
        return {};
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, const Operands<WIDTH>&) const {
        Pack<Logit, WIDTH> result;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) round_to(result.element[k], 0.0f);
        store(gradients + i, result);
    }
};

// Where the block's row begins in memory that has all of them.
template <typename Type>
__device__ __forceinline__ Type* row_of(Type* rows, int classes) {
    return rows + static_cast<long long>(blockIdx.x) * classes;
}

template <typename Logit>
constexpr int ROW_AHEAD = 16 / vector_width<Logit>;  // packs; more of 8 halves would spill

template <typename Logit>
__device__ __forceinline__ void loss_of_row(const Logit* rows, const long long* targets,
                                            int classes, long long ignored, float* losses,
                                            Total* totals) {
    constexpr int WIDTH = vector_width<Logit>;
    const long long target = targets[blockIdx.x];
    const Logit* logits = row_of(rows, classes);
    if (target == ignored) {
        if (threadIdx.x == 0) {
            losses[blockIdx.x] = 0.0f;
            totals[blockIdx.x] = {0.0f, 0.0f};
        }
        return;
    }
    assert(0 <= target && target < classes);
    Look<Logit> look{{logits}, {minus_infinity(), 0.0f}};
    sweep<WIDTH, ROW_AHEAD<Logit>>(classes, pack_begins<WIDTH>(logits), look);
    const Seen seen = seen_by_block(look.seen);
    if (threadIdx.x == 0) {
        const Total total{seen.largest, logf(seen.sum)};
        losses[blockIdx.x] = total.largest - to_float(logits[target]) + total.log_sum;
        totals[blockIdx.x] = total;
    }
}

template <typename Logit>
__device__ __forceinline__ void gradient_of_row(const Logit* rows, const long long* targets,
                                                int classes, long long ignored,
                                                const Total* totals, const float* factors,
                                                long long stride, Logit* gradients_of_rows) {
    constexpr int WIDTH = vector_width<Logit>;
    const long long target = targets[blockIdx.x];
    const Logit* logits = row_of(rows, classes);
    Logit* gradients = row_of(gradients_of_rows, classes);
    if (target == ignored) {
        Zeros<Logit> zeros{gradients};
        sweep<WIDTH, 1>(classes, pack_begins<WIDTH>(gradients), zeros);
        return;
    }
    const Gradient<Logit> gradient{{logits}, gradients, totals[blockIdx.x],
                                   factors[blockIdx.x * stride], static_cast<int>(target)};
    sweep<WIDTH, ROW_AHEAD<Logit>>(classes, pack_begins<WIDTH>(logits, gradients), gradient);
}

#define MAKE_CROSS_ENTROPY(LOGIT)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_##LOGIT(               \
        const LOGIT* logits, const long long* targets, int classes, long long ignored,         \
        float* losses, Total* totals) {                                                        \
        loss_of_row(logits, targets, classes, ignored, losses, totals);                        \
    }                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_backward_##LOGIT(      \
        const LOGIT* logits, const long long* targets, int classes, long long ignored,         \
        const Total* totals, const float* factors, long long stride, LOGIT* gradients) {       \
        gradient_of_row(logits, targets, classes, ignored, totals, factors, stride, gradients); \
    }

MAKE_CROSS_ENTROPY(float16)
MAKE_CROSS_ENTROPY(bfloat16)
MAKE_CROSS_ENTROPY(float32)
