// adamw: one step of AdamW or Adam on many tensors, from gradient to half weight, in one launch.
//
//   adamw_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf,
//           lr, lr_address, beta1, beta2, eps, weight_decay, decoupled, maximize)
//       once per parameter group, with the rows of the group
//
//   adamw_{gradient}_to_{weight}  <<<number of chunks, THREADS>>>(tensors, chunks, coefficients,
//           scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      64 bytes: addresses of gradient, master, exp_avg, exp_avg_sq,
//                                 max_exp_avg_sq (0: no amsgrad), weight (0: none is written) and
//                                 step, number of elements. The step is a float32 scalar, as in
//                                 torch's state; what lies between gradient and weight is float32.
//   count         int             rows
//   coefficients  Coefficients*   36 bytes per row, for the second launch
//   found_inf     const float*    not 0: both launches do nothing; 0 (null): never
//   lr            double
//   lr_address    const float*    replaces lr unless it is 0 (null)
//   beta1, beta2, eps, weight_decay  double
//   decoupled     int             1: AdamW's weight decay, 0: Adam's
//   maximize      int
//   chunks        const Chunk*    as in tensor_table.cuh
//   scale         const float*    the loss scale that gradients still bear; 0 (null): none
//   clip          const float*    a factor for the unscaled gradients; 0 (null): none
//
// The rule and the order of its operations are those of torch.optim.adam._single_tensor_adam.

#include "optimizer.cuh"

struct Row {
    const void* gradient;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    float* max_exp_avg_sq;
    void* weight;
    float* step;
    long long length;
};

static_assert(sizeof(Row) == 64, "the host packs a row into 64 bytes");

struct Coefficients {
    float step_size;        // lr / (1 - beta1 ** step)
    float root_correction;  // sqrt(1 - beta2 ** step)
    float kept;             // 1 - lr * weight_decay where decay is decoupled, else 1
    float coupled_decay;    // weight_decay where it is coupled, else 0
    float gradient_share;   // 1 - beta1
    float beta2;
    float square_share;  // 1 - beta2
    float eps;
    float sign;  // -1 to maximize, else 1
};

static_assert(sizeof(Coefficients) == 36, "the host reserves 36 bytes per row");

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_prepare(const Row* tensors, int count, Coefficients* coefficients, const float* found_inf,
                  double lr, const float* lr_address, double beta1, double beta2, double eps,
                  double weight_decay, int decoupled, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count || is_skipped(found_inf)) return;
    const float step = *tensors[i].step + 1.0f;
    *tensors[i].step = step;
    lr = learning_rate(lr, lr_address);
    Coefficients result;
    result.step_size = static_cast<float>(lr / (1.0 - pow(beta1, static_cast<double>(step))));
    result.root_correction =
        static_cast<float>(sqrt(1.0 - pow(beta2, static_cast<double>(step))));
    result.kept = decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
    result.coupled_decay = decoupled ? 0.0f : static_cast<float>(weight_decay);
    result.gradient_share = static_cast<float>(1.0 - beta1);
    result.beta2 = static_cast<float>(beta2);
    result.square_share = static_cast<float>(1.0 - beta2);
    result.eps = static_cast<float>(eps);
    result.sign = maximize ? -1.0f : 1.0f;
    coefficients[i] = result;
}

template <typename GradientType, typename Weight>
struct Adam {
    const GradientType* gradient;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    float* max_exp_avg_sq;
    Weight* weight;
    Coefficients coefficients;
    Gradient incoming;

    template <int WIDTH>
    struct Operands {
        Pack<GradientType, WIDTH> gradient;
        Pack<float, WIDTH> master, exp_avg, exp_avg_sq, max_exp_avg_sq;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        return {load<WIDTH>(gradient + i), load<WIDTH>(master + i), load<WIDTH>(exp_avg + i),
                load<WIDTH>(exp_avg_sq + i),
                max_exp_avg_sq == nullptr ? Pack<float, WIDTH>{} : load<WIDTH>(max_exp_avg_sq + i)};
    }

    __device__ __forceinline__ void update(float grad, float& master, float& exp_avg,
                                           float& exp_avg_sq, float& max_exp_avg_sq) const {
        const Coefficients& c = coefficients;
        grad += c.coupled_decay * master;
        exp_avg += c.gradient_share * (grad - exp_avg);
        exp_avg_sq = exp_avg_sq * c.beta2 + c.square_share * grad * grad;
        // Without amsgrad the largest so far is 0.
        max_exp_avg_sq = fmaxf(max_exp_avg_sq, exp_avg_sq);
        const float denominator = sqrtf(max_exp_avg_sq) / c.root_correction + c.eps;
        master = master * c.kept - c.step_size * exp_avg / denominator;
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, Operands<WIDTH> operands) const {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            update(incoming.of(operands.gradient.element[k]), operands.master.element[k],
                   operands.exp_avg.element[k], operands.exp_avg_sq.element[k],
                   operands.max_exp_avg_sq.element[k]);
        }
        store(master + i, operands.master);
        store(exp_avg + i, operands.exp_avg);
        store(exp_avg_sq + i, operands.exp_avg_sq);
        if (max_exp_avg_sq != nullptr) store(max_exp_avg_sq + i, operands.max_exp_avg_sq);
        store_weight(weight == nullptr ? nullptr : weight + i, operands.master);
    }
};

template <typename GradientType, typename Weight>
__device__ __forceinline__ void adamw_chunk(const Row* tensors, const Chunk& chunk,
                                            const Coefficients* coefficients, const float* scale,
                                            const float* clip) {
    constexpr int WIDTH = vector_width<GradientType, float, Weight>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    const Coefficients own = coefficients[chunk.tensor];
    Adam<GradientType, Weight> adam{part.of(static_cast<const GradientType*>(row.gradient)),
                                    part.of(row.master),
                                    part.of(row.exp_avg),
                                    part.of(row.exp_avg_sq),
                                    part.of(row.max_exp_avg_sq),
                                    part.of(static_cast<Weight*>(row.weight)),
                                    own,
                                    Gradient(scale, clip, own.sign)};
    const bool aligned = all_aligned<WIDTH>(adam.gradient, adam.master, adam.exp_avg,
                                            adam.exp_avg_sq, adam.max_exp_avg_sq, adam.weight);
    sweep<WIDTH, 1>(part.length, aligned, adam);
}

#define MAKE_ADAMW(GRADIENT, WEIGHT)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) adamw_##GRADIENT##_to_##WEIGHT(     \
        const Row* tensors, const Chunk* chunks, const Coefficients* coefficients,            \
        const float* scale, const float* clip, const float* found_inf) {                      \
        if (is_skipped(found_inf)) return;                                                    \
        adamw_chunk<GRADIENT, WEIGHT>(tensors, chunks[blockIdx.x], coefficients, scale, clip); \
    }

AMP_FOR_EACH_PAIR(MAKE_ADAMW)
