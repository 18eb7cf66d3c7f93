// adagrad: one step of Adagrad on many tensors, from gradient to half weight, in one launch.
//
//   adagrad_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf,
//           lr, lr_address, lr_decay, weight_decay, eps, maximize)
//       once per parameter group, with the rows of the group
//
//   adagrad_{gradient}_to_{weight}  <<<BLOCKS_PER_CHUNK * number of chunks, THREADS>>>(tensors,
//           chunks, coefficients, scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      56 bytes: addresses of gradient, master, sum of squares, weight
//                                 (0: none is written) and step, whether the master wins
//                                 (optimizer.cuh), number of elements. The step is a float32
//                                 scalar, as in torch's state; what lies between gradient and
//                                 weight is float32.
//   count         int             rows
//   coefficients  Coefficients*   16 bytes per row, for the second launch
//   found_inf     const float*    not 0: nothing is stepped, but master and weight are made to agree;
//                                 0 (null): never
//   lr            double
//   lr_address    const float*    replaces lr unless it is 0 (null)
//   lr_decay, weight_decay, eps  double
//   maximize      int
//   chunks        const Chunk*    as in tensor_table.cuh
//   scale         const float*    the loss scale that gradients still bear; 0 (null): none
//   clip          const float*    a factor for the unscaled gradients; 0 (null): none
//
// The rule and the order of its operations are those of torch.optim.adagrad._single_tensor_adagrad.

#include "elementwise_step.cuh"

struct Coefficients {
    static constexpr int STATES = 1;  // sum of squares
    static constexpr int AHEAD = 2;

    float step_size;  // lr / (1 + (step - 1) * lr_decay)
    float coupled_decay;
    float eps;
    float sign;

    __device__ __forceinline__ void update(float grad, float& master,
                                           float (&state)[STATES]) const {
        auto& [sum] = state;
        grad += coupled_decay * master;
        sum += grad * grad;
        master -= step_size * grad / (sqrtf(sum) + eps);
    }
};

using Row = ParameterRow<Coefficients::STATES>;

static_assert(sizeof(Row) == 56, "the host packs a row into 56 bytes");
static_assert(sizeof(Coefficients) == 16, "the host reserves 16 bytes per row");

extern "C" __global__ void __launch_bounds__(THREADS)
    adagrad_prepare(const Row* tensors, int count, Coefficients* coefficients,
                    const float* found_inf, double lr, const float* lr_address, double lr_decay,
                    double weight_decay, double eps, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count) return;
    if (is_skipped(found_inf)) {
        coefficients[i] = {};  // read by the second launch all the same, and used for nothing
        return;
    }
    const double steps_before = *tensors[i].step;
    *tensors[i].step += 1.0f;
    Coefficients result;
    result.step_size =
        static_cast<float>(learning_rate(lr, lr_address) / (1.0 + steps_before * lr_decay));
    result.coupled_decay = static_cast<float>(weight_decay);
    result.eps = static_cast<float>(eps);
    result.sign = maximize ? -1.0f : 1.0f;
    coefficients[i] = result;
}

#define MAKE_ADAGRAD(GRADIENT, WEIGHT) AMP_ELEMENTWISE_STEP(adagrad, GRADIENT, WEIGHT)

AMP_FOR_EACH_PAIR(MAKE_ADAGRAD)
