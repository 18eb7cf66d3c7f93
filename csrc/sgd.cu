// sgd: one step of SGD on many tensors, from gradient to half weight, in one launch.
//
//   sgd_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf, lr,
//           lr_address, momentum, dampening, weight_decay, decoupled, nesterov, maximize)
//       once per parameter group, with the rows of the group
//
//   sgd_{gradient}_to_{weight}  <<<BLOCKS_PER_CHUNK * number of chunks, THREADS>>>(tensors,
//           chunks, coefficients, scale, clip, found_inf)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   tensors       const Row*      56 bytes: addresses of gradient, float32 master, float32 momentum
//                                 buffer (0: no momentum), weight (0: none is written) and step,
//                                 whether the master wins (optimizer.cuh), number of elements. The
//                                 step is a float32 scalar, which counts the steps not skipped: the
//                                 first of them sets the buffer, torch's rule for a buffer that is
//                                 None. 1 and above: the buffer holds momentum, as after a
//                                 checkpoint is loaded; so it does where the step is 0 (null).
//   count         int             rows
//   coefficients  Coefficients*   32 bytes per row, for the second launch
//   found_inf     const float*    not 0: nothing is stepped, but master and weight are made to agree;
//                                 0 (null): never
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

#include "elementwise_step.cuh"

struct Coefficients {
    static constexpr int STATES = 1;  // momentum buffer
    static constexpr int AHEAD = 2;

    float lr;
    float momentum;
    float gradient_share;  // 1 - dampening
    float coupled_decay;   // weight_decay where it is coupled, else 0
    float kept;            // 1 - lr * weight_decay where decay is decoupled, else 1
    float sign;
    int nesterov;
    // Not 0: whatever the buffer holds, it is not momentum yet; also where there is none. An int would
    // spill a register on sm_90.
    float is_first;

    __device__ __forceinline__ void update(float grad, float& master,
                                           float (&state)[STATES]) const {
        auto& [buffer] = state;
        grad += coupled_decay * master;
        buffer = is_first != 0.0f ? grad : momentum * buffer + gradient_share * grad;
        master = master * kept - lr * (nesterov ? grad + momentum * buffer : buffer);
    }
};

using Row = ParameterRow<Coefficients::STATES>;

static_assert(sizeof(Row) == 56, "the host packs a row into 56 bytes");
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
    if (i >= count) return;
    if (is_skipped(found_inf)) {
        coefficients[i] = {};  // read by the second launch all the same, and used for nothing
        return;
    }
    lr = learning_rate(lr, lr_address);
    Coefficients result;
    result.lr = static_cast<float>(lr);
    result.momentum = static_cast<float>(momentum);
    result.gradient_share = static_cast<float>(1.0 - dampening);
    result.coupled_decay = decoupled ? 0.0f : static_cast<float>(weight_decay);
    result.kept = decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
    result.sign = maximize ? -1.0f : 1.0f;
    result.nesterov = nesterov;
    const bool is_first_step = advance(tensors[i].step);
    result.is_first = is_first_step || tensors[i].state[0] == nullptr ? 1.0f : 0.0f;
    coefficients[i] = result;
}

#define MAKE_SGD(GRADIENT, WEIGHT) AMP_ELEMENTWISE_STEP(sgd, GRADIENT, WEIGHT)

AMP_FOR_EACH_PAIR(MAKE_SGD)
