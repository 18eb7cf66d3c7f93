// lamb: one step of LAMB on many tensors, from gradient to half weight, with no memory for updates.
//
//   lamb_prepare  <<<ceil(count / THREADS), THREADS>>>(tensors, count, coefficients, found_inf,
//           lr, lr_address, beta1, beta2, eps, weight_decay, decoupled, bias_correction,
//           gradient_averaging, adapt_always, maximize)
//       once per parameter group, with the rows of the group
//
//   lamb_moments_{gradient}_to_{weight}  <<<number of chunks, THREADS>>>(tensors, chunks,
//           coefficients, scale, clip, found_inf, norms)
//       once per mix of dtypes among float16, bfloat16, float32, with all rows
//
//   lamb_ratios  <<<number of tensors, THREADS>>>(ranges, norms, coefficients, ratios, found_inf)
//
//   lamb_update_{weight}  <<<number of chunks, THREADS>>>(tensors, chunks, coefficients, ratios,
//           found_inf)
//       once per dtype of weights, float16, bfloat16 or float32, with all rows
//
//   tensors       const Row*      64 bytes: addresses of gradient, master, exp_avg, exp_avg_sq,
//                                 weight (0: none is written) and step, whether the master wins
//                                 (optimizer.cuh), number of elements. The step is a float32
//                                 scalar; what lies between gradient and weight is float32.
//   count         int             rows
//   coefficients  Coefficients*   48 bytes per row, for the launches that follow
//   found_inf     const float*    not 0: nothing is stepped, but master and weight are made to agree;
//                                 0 (null): never
//   lr            double
//   lr_address    const float*    replaces lr unless it is 0 (null)
//   beta1, beta2, eps, weight_decay  double
//   decoupled     int             1: decay is added to the update (apex's adam_w_mode), 0: to the
//                                 gradient
//   bias_correction, gradient_averaging, maximize  int
//   adapt_always  int             1: also without weight decay (apex's use_nvlamb)
//   chunks        const Chunk*    as in tensor_table.cuh; each launch may have its own
//   scale         const float*    the loss scale that gradients still bear; 0 (null): none
//   clip          const float*    a factor for the unscaled gradients, min(1, max_grad_norm / norm)
//                                 in LAMB; 0 (null): none
//   norms         Norms*          16 bytes per chunk of the launches of lamb_moments
//   ranges        const Range*    per row, int32 begin and end of its chunks' entries in `norms`
//   ratios        float*          per row: what multiplies its update
//
// The rule is LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2) as apex.optimizers.FusedLAMB
// has it:
//
//   exp_avg     = beta1 * exp_avg + (1 - beta1) * gradient   (no factor without averaging)
//   exp_avg_sq  = beta2 * exp_avg_sq + (1 - beta2) * gradient ** 2
//   update      = (exp_avg / (1 - beta1 ** step)) / (sqrt(exp_avg_sq / (1 - beta2 ** step)) + eps)
//                 + weight_decay * master
//   ratio       = lr * |master| / |update|  (lr where either norm is 0, or without weight decay)
//   master     -= ratio * update
//
// The ratio needs the norm of the whole update. The last launch computes the update again from the
// moments, with the same bits, instead of having it written and read, 4 bytes per element each.

#include "optimizer.cuh"
#include "reduction.cuh"

using Row = ParameterRow<2>;  // exp_avg, exp_avg_sq

static_assert(sizeof(Row) == 64, "the host packs a row into 64 bytes");

struct Coefficients {
    float correction;         // 1 - beta1 ** step, or 1
    float square_correction;  // 1 - beta2 ** step, or 1
    float beta1;
    float gradient_share;  // 1 - beta1, or 1
    float beta2;
    float square_share;  // 1 - beta2
    float eps;
    float coupled_decay;    // weight_decay where it is coupled, else 0
    float decoupled_decay;  // weight_decay where it is decoupled, else 0
    float lr;
    float sign;  // -1 to maximize, else 1
    int adapts;  // whether the ratio of the norms enters
};

static_assert(sizeof(Coefficients) == 48, "the host reserves 48 bytes per row");

struct Range {
    int begin;
    int end;
};

static_assert(sizeof(Range) == 8, "the host packs a range into 8 bytes");

// Sums of squares, in float32 within a pack, in float64 from there on.
struct Norms {
    double master;
    double update;

    __device__ void add(const Norms& other) {
        master += other.master;
        update += other.update;
    }

    __device__ Norms from_lane(int lanes) const {
        return {::from_lane(master, lanes), ::from_lane(update, lanes)};
    }
};

static_assert(sizeof(Norms) == 16, "the host reserves 16 bytes per chunk");

__device__ __forceinline__ float correction(double beta, float step, int bias_correction) {
    return bias_correction ? static_cast<float>(1.0 - pow(beta, static_cast<double>(step))) : 1.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lamb_prepare(const Row* tensors, int count, Coefficients* coefficients, const float* found_inf,
                 double lr, const float* lr_address, double beta1, double beta2, double eps,
                 double weight_decay, int decoupled, int bias_correction, int gradient_averaging,
                 int adapt_always, int maximize) {
    const int i = static_cast<int>(blockIdx.x * THREADS + threadIdx.x);
    if (i >= count) return;
    if (is_skipped(found_inf)) {
        coefficients[i] = {};  // read by the second launch all the same, and used for nothing
        return;
    }
    const float step = *tensors[i].step + 1.0f;
    *tensors[i].step = step;
    Coefficients result;
    result.correction = correction(beta1, step, bias_correction);
    result.square_correction = correction(beta2, step, bias_correction);
    result.beta1 = static_cast<float>(beta1);
    result.gradient_share = gradient_averaging ? static_cast<float>(1.0 - beta1) : 1.0f;
    result.beta2 = static_cast<float>(beta2);
    result.square_share = static_cast<float>(1.0 - beta2);
    result.eps = static_cast<float>(eps);
    result.coupled_decay = decoupled ? 0.0f : static_cast<float>(weight_decay);
    result.decoupled_decay = decoupled ? static_cast<float>(weight_decay) : 0.0f;
    result.lr = static_cast<float>(learning_rate(lr, lr_address));
    result.sign = maximize ? -1.0f : 1.0f;
    result.adapts = adapt_always || weight_decay != 0.0;
    coefficients[i] = result;
}

__device__ __forceinline__ float update_of(const Coefficients& c, float master, float exp_avg,
                                           float exp_avg_sq) {
    const float denominator = sqrtf(exp_avg_sq / c.square_correction) + c.eps;
    return exp_avg / c.correction / denominator + c.decoupled_decay * master;
}

template <typename GradientType, typename Weight>
struct Moments {
    const GradientType* gradient;
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    Weight* weight;
    bool follows;
    bool skips;
    Coefficients coefficients;
    Gradient incoming;
    Norms norms;

    template <int WIDTH>
    struct Operands {
        Pack<GradientType, WIDTH> gradient;
        Pack<float, WIDTH> master, exp_avg, exp_avg_sq;
        Pack<Weight, WIDTH> weight;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        Operands<WIDTH> operands{load<WIDTH>(gradient + i), load<WIDTH>(master + i),
                                 load<WIDTH>(exp_avg + i), load<WIDTH>(exp_avg_sq + i), {}};
        if (follows) operands.weight = load<WIDTH>(weight + i);
        return operands;
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, Operands<WIDTH> operands) {
        if (follows && follow(operands.master, operands.weight)) store(master + i, operands.master);
        if (skips) {
            store_weight(weight + i, operands.master);
        } else {
            update(i, operands);
        }
    }

    template <int WIDTH>
    __device__ __forceinline__ void update(int i, Operands<WIDTH>& operands) {
        const Coefficients& c = coefficients;
        float masters = 0.0f;
        float updates = 0.0f;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const float master = operands.master.element[k];
            float& first = operands.exp_avg.element[k];
            float& second = operands.exp_avg_sq.element[k];
            const float grad =
                incoming.of(operands.gradient.element[k]) + c.coupled_decay * master;
            first = first * c.beta1 + c.gradient_share * grad;
            second = second * c.beta2 + c.square_share * grad * grad;
            const float update = update_of(c, master, first, second);
            masters += master * master;
            updates += update * update;
        }
        norms.add({masters, updates});
        store(exp_avg + i, operands.exp_avg);
        store(exp_avg_sq + i, operands.exp_avg_sq);
    }
};

template <typename GradientType, typename Weight>
__device__ __forceinline__ Norms sweep_moments(const Row* tensors, const Chunk& chunk,
                                               const Coefficients* coefficients, const float* scale,
                                               const float* clip, bool skips) {
    constexpr int WIDTH = vector_width<GradientType, float, Weight>;
    const Row row = tensors[chunk.tensor];
    if (skips && row.weight == nullptr) return {};
    const Part part(chunk, row.length);
    const Coefficients own = coefficients[chunk.tensor];
    Moments<GradientType, Weight> moments{part.of(static_cast<const GradientType*>(row.gradient)),
                                          part.of(row.master),
                                          part.of(row.state[0]),
                                          part.of(row.state[1]),
                                          part.of(static_cast<Weight*>(row.weight)),
                                          follows_weight<Weight>(row),
                                          skips,
                                          own,
                                          Gradient(scale, clip, own.sign),
                                          {}};
    const unsigned begins = pack_begins<WIDTH>(moments.gradient, moments.master, moments.exp_avg,
                                               moments.exp_avg_sq, moments.weight);
    sweep<WIDTH, 1>(part.length, begins, moments);
    return moments.norms;
}

// The result is in thread 0.
__device__ Norms block_total(const Norms& mine) {
    __shared__ Norms warps[WARPS];
    return block_sum(mine, warps);
}

__device__ __forceinline__ float ratio_of(const Coefficients& c, const Norms& norms) {
    const float master = static_cast<float>(sqrt(norms.master));
    const float update = static_cast<float>(sqrt(norms.update));
    return c.adapts && master != 0.0f && update != 0.0f ? c.lr * (master / update) : c.lr;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lamb_ratios(const Range* ranges, const Norms* norms, const Coefficients* coefficients,
                float* ratios, const float* found_inf) {
    if (is_skipped(found_inf)) return;
    const Range range = ranges[blockIdx.x];
    const Norms sum = block_total(thread_sum(norms, range.begin, range.end));
    if (threadIdx.x == 0) ratios[blockIdx.x] = ratio_of(coefficients[blockIdx.x], sum);
}

template <typename Weight>
struct Update {
    float* master;
    const float* exp_avg;
    const float* exp_avg_sq;
    Weight* weight;
    Coefficients coefficients;
    float ratio;

    template <int WIDTH>
    struct Operands {
        Pack<float, WIDTH> master, exp_avg, exp_avg_sq;
    };

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        return {load<WIDTH>(master + i), load<WIDTH>(exp_avg + i), load<WIDTH>(exp_avg_sq + i)};
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, Operands<WIDTH> operands) const {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            float& one = operands.master.element[k];
            one -= ratio * update_of(coefficients, one, operands.exp_avg.element[k],
                                     operands.exp_avg_sq.element[k]);
        }
        store(master + i, operands.master);
        store_weight(weight == nullptr ? nullptr : weight + i, operands.master);
    }
};

template <typename Weight>
__device__ __forceinline__ void update_chunk(const Row* tensors, const Chunk& chunk,
                                             const Coefficients* coefficients,
                                             const float* ratios) {
    constexpr int WIDTH = vector_width<float, Weight>;
    const Row row = tensors[chunk.tensor];
    const Part part(chunk, row.length);
    Update<Weight> update{part.of(row.master),
                          part.of(row.state[0]),
                          part.of(row.state[1]),
                          part.of(static_cast<Weight*>(row.weight)),
                          coefficients[chunk.tensor],
                          ratios[chunk.tensor]};
    const unsigned begins =
        pack_begins<WIDTH>(update.master, update.exp_avg, update.exp_avg_sq, update.weight);
    sweep<WIDTH, 1>(part.length, begins, update);
}

#define MAKE_MOMENTS(GRADIENT, WEIGHT)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) lamb_moments_##GRADIENT##_to_##WEIGHT( \
        const Row* tensors, const Chunk* chunks, const Coefficients* coefficients,               \
        const float* scale, const float* clip, const float* found_inf, Norms* norms) {           \
        const bool skips = is_skipped(found_inf);                                                \
        const Norms sum = block_total(sweep_moments<GRADIENT, WEIGHT>(                           \
            tensors, chunks[blockIdx.x], coefficients, scale, clip, skips));                     \
        if (threadIdx.x == 0) norms[blockIdx.x] = sum;                                           \
    }
#define MAKE_UPDATE(WEIGHT)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) lamb_update_##WEIGHT(   \
        const Row* tensors, const Chunk* chunks, const Coefficients* coefficients, \
        const float* ratios, const float* found_inf) {                            \
        if (is_skipped(found_inf)) return;                                        \
        update_chunk<WEIGHT>(tensors, chunks[blockIdx.x], coefficients, ratios);  \
    }

AMP_FOR_EACH_PAIR(MAKE_MOMENTS)
MAKE_UPDATE(float16)
MAKE_UPDATE(bfloat16)
MAKE_UPDATE(float32)
