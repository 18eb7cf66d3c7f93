// rmsprop: one step of RMSprop on many tensors, from gradient to half weight, in one launch.
//
//   rmsprop_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf,
//           lr, lr_address, alpha, eps, weight_decay, momentum, centered, maximize)
//       once per parameter group, with the rows of the group
//
//   rmsprop_{gradient}_to_{weight}  <<<BLOCKS_PER_CHUNK * number of chunks, THREADS>>>(tensors,
//           chunks, coefficients, scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      72 bytes: addresses of gradient, master, square_avg, momentum
//                                 buffer (0: no momentum), grad_avg (0: not centered), weight
//                                 (0: none is written) and step, whether the master wins
//                                 (optimizer.cuh), number of elements. The step is a float32
//                                 scalar, as in torch's state; what lies between gradient and
//                                 weight is float32.
//   count         int             rows
//   coefficients  Coefficients*   32 bytes per row, for the second launch
//   found_inf     const float*    not 0: nothing is stepped, but master and weight are made to agree;
//                                 0 (null): never
//   lr            double
//   lr_address    const float*    replaces lr unless it is 0 (null)
//   alpha, eps, weight_decay, momentum  double
//   centered, maximize  int
//   chunks        const Chunk*    as in tensor_table.cuh
//   scale         const float*    the loss scale that gradients still bear; 0 (null): none
//   clip          const float*    a factor for the unscaled gradients; 0 (null): none
//
// The rule and the order of its operations are those of torch.optim.rmsprop._single_tensor_rmsprop.

#include "elementwise_step.cuh"

struct Coefficients {
    static constexpr int STATES = 3;  // square_avg, momentum_buffer, grad_avg
    static constexpr int AHEAD = 1;

    float lr;
    float alpha;
    float square_share;   // 1 - alpha
    float average_share;  // 1 - alpha where the rule is centered, else 0: grad_avg stays 0
    float coupled_decay;
    float eps;
    float momentum;
    float sign;

    __device__ __forceinline__ void update(float grad, float& master,
                                           float (&state)[STATES]) const {
        auto& [square_avg, buffer, grad_avg] = state;
        grad += coupled_decay * master;
        square_avg = square_avg * alpha + square_share * grad * grad;
        grad_avg += average_share * (grad - grad_avg);
        const float variance = square_avg - grad_avg * grad_avg;
        // Rounding may leave less than nothing of a variance near 0; torch's rule makes NaN of that.
        const float deviation = variance < 0.0f ? 0.0f : sqrtf(variance);
        buffer = momentum * buffer + grad / (deviation + eps);
        master -= lr * buffer;
    }
};

using Row = ParameterRow<Coefficients::STATES>;

static_assert(sizeof(Row) == 72, "the host packs a row into 72 bytes");
static_assert(sizeof(Coefficients) == 32, "the host reserves 32 bytes per row");

extern "C" __global__ void __launch_bounds__(THREADS)
    rmsprop_prepare(const Row* tensors, int count, Coefficients* coefficients,
                    const float* found_inf, double lr, const float* lr_address, double alpha,
                    double eps, double weight_decay, double momentum, int centered, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count) return;
    if (is_skipped(found_inf)) {
        coefficients[i] = {};  // read by the second launch all the same, and used for nothing
        return;
    }
    *tensors[i].step += 1.0f;
    Coefficients result;
    result.lr = static_cast<float>(learning_rate(lr, lr_address));
    result.alpha = static_cast<float>(alpha);
    result.square_share = static_cast<float>(1.0 - alpha);
    result.average_share = centered ? static_cast<float>(1.0 - alpha) : 0.0f;
    result.coupled_decay = static_cast<float>(weight_decay);
    result.eps = static_cast<float>(eps);
    result.momentum = static_cast<float>(momentum);
    result.sign = maximize ? -1.0f : 1.0f;
    coefficients[i] = result;
}

#define MAKE_RMSPROP(GRADIENT, WEIGHT) AMP_ELEMENTWISE_STEP(rmsprop, GRADIENT, WEIGHT)

AMP_FOR_EACH_PAIR(MAKE_RMSPROP)
