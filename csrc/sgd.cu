// sgd: one step of SGD on many tensors, from gradient to half weight, in one launch.
//
//   sgd_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf, lr,
//           lr_address, momentum, dampening, weight_decay, decoupled, nesterov, maximize)
//       once per parameter group, with the rows of the group
//
//   sgd_{gradient}_to_{weight}  <<<number of chunks, THREADS>>>(tensors, chunks, coefficients,
//           scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      48 bytes: addresses of gradient, float32 master, float32 momentum
//                                 buffer (0: no momentum), weight (0: none is written) and step,
//                                 number of elements. The step is a float32 scalar, which counts
//                                 the steps not skipped: the first of them sets the buffer, torch's
//                                 rule for a buffer that is None. 1 and above: the buffer holds
//                                 momentum, as after a checkpoint is loaded. It may be 0 (null)
//                                 where the buffer is.
//   count         int             rows
//   coefficients  Coefficients*   32 bytes per row, for the second launch
//   found_inf     const float*    not 0: both launches do nothing; 0 (null): never
//   lr            double
//   lr_address    const float*    replaces lr unless it is 0 (null)
//   momentum, dampening, weight_decay  double
//   decoupled     int             0: decay is added to the gradient, as torch does; 1: it shrinks
//                                 the master by 1 - lr * weight_decay, past the momentum
//   nesterov, maximize  int
//   chunks        const Chunk*    as in tensor_table.cuh
//   scale         const float*    the loss scale that gradients still bear; 0 (null): none
//   clip          const float*    a factor for the unscaled gradients; 0 (null): none
//
// The rule and the order of its operations are those of torch.optim.sgd._single_tensor_sgd.

#include "optimizer.cuh"

struct Row {
    const void* gradient;
    float* master;
    float* momentum;
    void* weight;
    float* step;
    long long length;
};

static_assert(sizeof(Row) == 48, "the host packs a row into 48 bytes");

struct Coefficients {
    float lr;
    float momentum;
    float gradient_share;  // 1 - dampening
    float coupled_decay;   // weight_decay where it is coupled, else 0
    float kept;            // 1 - lr * weight_decay where decay is decoupled, else 1
    float sign;            // -1 to maximize, else 1
    int nesterov;
    int is_first;  // whatever the buffer holds, it is not momentum yet
};

static_assert(sizeof(Coefficients) == 32, "the host reserves 32 bytes per row");

__device__ __forceinline__ bool advance(float* step) {
    if (step == nullptr) return false;
    *step += 1.0f;
    return *step == 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sgd_prepare(const Row* tensors, int count, Coefficients* coefficients, const float* found_inf,
                double lr, const float* lr_address, double momentum, double dampening,
                double weight_decay, int decoupled, int nesterov, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count || is_skipped(found_inf)) return;
    lr = learning_rate(lr, lr_address);
    Coefficients result;
    result.lr = static_cast<float>(lr);
    result.momentum = static_cast<float>(momentum);
    result.gradient_share = static_cast<float>(1.0 - dampening);
    result.coupled_decay = decoupled ? 0.0f : static_cast<float>(weight_decay);
    result.kept = decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
    result.sign = maximize ? -1.0f : 1.0f;
    result.nesterov = nesterov;
    result.is_first = advance(tensors[i].step);
    coefficients[i] = result;
}

template <typename GradientType, typename Weight>
struct Sgd {
    const GradientType* gradient;
    float* master;
    float* momentum;
    Weight* weight;
    Coefficients coefficients;
    Gradient incoming;

    template <int WIDTH>
    struct Operands {
        Pack<GradientType, WIDTH> gradient;
        Pack<float, WIDTH> master, momentum;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        const bool holds_momentum = momentum != nullptr && !coefficients.is_first;
        return {load<WIDTH>(gradient + i), load<WIDTH>(master + i),
                holds_momentum ? load<WIDTH>(momentum + i) : Pack<float, WIDTH>{}};
    }

    __device__ __forceinline__ void update(float grad, float& master, float& buffer) const {
        const Coefficients& c = coefficients;
        grad += c.coupled_decay * master;
        float update = grad;
        if (momentum != nullptr) {
            buffer = c.is_first ? grad : c.momentum * buffer + c.gradient_share * grad;
            update = c.nesterov ? grad + c.momentum * buffer : buffer;
        }
        master = master * c.kept - c.lr * update;
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, Operands<WIDTH> operands) const {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            update(incoming.of(operands.gradient.element[k]), operands.master.element[k],
                   operands.momentum.element[k]);
        }
        store(master + i, operands.master);
        if (momentum != nullptr) store(momentum + i, operands.momentum);
        store_weight(weight == nullptr ? nullptr : weight + i, operands.master);
    }
};

template <typename GradientType, typename Weight>
__device__ __forceinline__ void sgd_chunk(const Row* tensors, const Chunk& chunk,
                                          const Coefficients* coefficients, const float* scale,
                                          const float* clip) {
    constexpr int WIDTH = vector_width<GradientType, float, Weight>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    const Coefficients own = coefficients[chunk.tensor];
    Sgd<GradientType, Weight> sgd{part.of(static_cast<const GradientType*>(row.gradient)),
                                  part.of(row.master),
                                  part.of(row.momentum),
                                  part.of(static_cast<Weight*>(row.weight)),
                                  own,
                                  Gradient(scale, clip, own.sign)};
    sweep<WIDTH, 2>(part.length,
                    all_aligned<WIDTH>(sgd.gradient, sgd.master, sgd.momentum, sgd.weight), sgd);
}

#define MAKE_SGD(GRADIENT, WEIGHT)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) sgd_##GRADIENT##_to_##WEIGHT(     \
        const Row* tensors, const Chunk* chunks, const Coefficients* coefficients,          \
        const float* scale, const float* clip, const float* found_inf) {                    \
        if (is_skipped(found_inf)) return;                                                  \
        sgd_chunk<GRADIENT, WEIGHT>(tensors, chunks[blockIdx.x], coefficients, scale, clip); \
    }

AMP_FOR_EACH_PAIR(MAKE_SGD)
