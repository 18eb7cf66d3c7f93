// adamw: one step of AdamW or Adam on many tensors, from gradient to half weight, in one launch.
//
//   adamw_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf,
//           lr, lr_address, beta1, beta2, eps, weight_decay, decoupled, maximize)
//       once per parameter group, with the rows of the group
//
//   adamw_{gradient}_to_{weight}  <<<BLOCKS_PER_CHUNK * number of chunks, THREADS>>>(tensors,
//           chunks, coefficients, scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      72 bytes: addresses of gradient, master, exp_avg, exp_avg_sq,
//                                 max_exp_avg_sq (0: no amsgrad), weight (0: none is written) and
//                                 step, whether the master wins (optimizer.cuh), number of
//                                 elements. The step is a float32 scalar, as in torch's state;
//                                 what lies between gradient and weight is float32.
//   count         int             rows
//   coefficients  Coefficients*   36 bytes per row, for the second launch
//   found_inf     const float*    not 0: nothing is stepped, but master and weight are made to agree;
//                                 0 (null): never
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

#include "elementwise_step.cuh"

struct Coefficients {
    static constexpr int STATES = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq
    static constexpr int AHEAD = 1;

    float step_size;        // lr / (1 - beta1 ** step)
    float root_correction;  // sqrt(1 - beta2 ** step)
    float kept;             // 1 - lr * weight_decay where decay is decoupled, else 1
    float coupled_decay;    // weight_decay where it is coupled, else 0
    float gradient_share;   // 1 - beta1
    float beta2;
    float square_share;  // 1 - beta2
    float eps;
    float sign;

    __device__ __forceinline__ void update(float grad, float& master,
                                           float (&state)[STATES]) const {
        auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = state;
        grad += coupled_decay * master;
        exp_avg += gradient_share * (grad - exp_avg);
        exp_avg_sq = exp_avg_sq * beta2 + square_share * grad * grad;
        // Without amsgrad the largest so far is 0.
        max_exp_avg_sq = fmaxf(max_exp_avg_sq, exp_avg_sq);
        const float denominator = sqrtf(max_exp_avg_sq) / root_correction + eps;
        master = master * kept - step_size * exp_avg / denominator;
    }
};

using Row = ParameterRow<Coefficients::STATES>;

static_assert(sizeof(Row) == 72, "the host packs a row into 72 bytes");
static_assert(sizeof(Coefficients) == 36, "the host reserves 36 bytes per row");

extern "C" __global__ void __launch_bounds__(THREADS)
    adamw_prepare(const Row* tensors, int count, Coefficients* coefficients, const float* found_inf,
                  double lr, const float* lr_address, double beta1, double beta2, double eps,
                  double weight_decay, int decoupled, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count) return;
    if (is_skipped(found_inf)) {
        coefficients[i] = {};  // read by the second launch all the same, and used for nothing
        return;
    }
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

#define MAKE_ADAMW(GRADIENT, WEIGHT) AMP_ELEMENTWISE_STEP(adamw, GRADIENT, WEIGHT)

AMP_FOR_EACH_PAIR(MAKE_ADAMW)
