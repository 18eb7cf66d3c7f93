// elementwise_step.cuh: a step that takes an element's own numbers only, from gradient to half
// weight, in one launch; knows no rule.
//
// The rule is in the type of a tensor's Coefficients, which has
//   STATES                          how many float32 tensors of state a parameter may have
//   AHEAD                           packs that a thread reads before it uses the first
//   sign                            -1 to maximize, else 1
//   update(gradient, master, state) steps one element; state that it does not have is 0

#pragma once

#include "optimizer.cuh"

template <typename Coefficients, typename GradientType, typename Weight>
struct ElementwiseStep {
    static constexpr int STATES = Coefficients::STATES;

    const GradientType* gradient;
    float* master;
    float* state[STATES];
    Weight* weight;
    bool follows;
    bool skips;
    Coefficients coefficients;
    Gradient incoming;

    template <int WIDTH>
    struct Operands {
        Pack<GradientType, WIDTH> gradient;
        Pack<float, WIDTH> master;
        Pack<float, WIDTH> state[STATES];
        Pack<Weight, WIDTH> weight;
    };

    __device__ __forceinline__ ElementwiseStep(const ParameterRow<STATES>& row, const Part& part,
                                               const Coefficients& coefficients,
                                               const float* scale, const float* clip, bool skips)
        : gradient(part.of(static_cast<const GradientType*>(row.gradient))),
          master(part.of(row.master)),
          weight(part.of(static_cast<Weight*>(row.weight))),
          follows(follows_weight<Weight>(row)),
          skips(skips),
          coefficients(coefficients),
          incoming(scale, clip, coefficients.sign) {
#pragma unroll
        for (int s = 0; s < STATES; ++s) state[s] = part.of(row.state[s]);
    }

    template <int WIDTH>
    __device__ __forceinline__ unsigned begins() const {
        unsigned begins = pack_begins<WIDTH>(gradient, master, weight);
#pragma unroll
        for (int s = 0; s < STATES; ++s) begins |= pack_begin<WIDTH>(state[s]);
        return begins;
    }

    template <int WIDTH>
    __device__ __forceinline__ Operands<WIDTH> read(int i) const {
        Operands<WIDTH> operands{load<WIDTH>(gradient + i), load<WIDTH>(master + i), {}, {}};
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
            if (state[s] != nullptr) operands.state[s] = load<WIDTH>(state[s] + i);
        }
        if (follows) operands.weight = load<WIDTH>(weight + i);
        return operands;
    }

    template <int WIDTH>
    __device__ __forceinline__ void write(int i, Operands<WIDTH> operands) const {
        if (follows) follow(operands.master, operands.weight);
        if (!skips) update(i, operands);
        store(master + i, operands.master);
        store_weight(weight == nullptr ? nullptr : weight + i, operands.master);
    }

    template <int WIDTH>
    __device__ __forceinline__ void update(int i, Operands<WIDTH>& operands) const {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            float element[STATES];
#pragma unroll
            for (int s = 0; s < STATES; ++s) element[s] = operands.state[s].element[k];
            coefficients.update(incoming.of(operands.gradient.element[k]),
                                operands.master.element[k], element);
#pragma unroll
            for (int s = 0; s < STATES; ++s) operands.state[s].element[k] = element[s];
        }
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
            if (state[s] != nullptr) store(state[s] + i, operands.state[s]);
        }
    }
};

// So many blocks share a chunk. Each reads and writes up to nine tensors; on an H200 the memory gave
// 2.6 % more where a block had 4,096 elements of each, not 16,384. Kernels that pass over one or two
// tensors lost by it.
constexpr int BLOCKS_PER_CHUNK = 4;

// Let the block step its share of a chunk; a skipped step has master and half weight agree, and no more.
template <typename GradientType, typename Weight, int STATES, typename Coefficients>
__device__ __forceinline__ void step_chunk(const ParameterRow<STATES>* tensors,
                                           const Chunk* chunks, const Coefficients* coefficients,
                                           const float* scale, const float* clip,
                                           const float* found_inf) {
    constexpr int WIDTH = vector_width<GradientType, float, Weight>;
    const Chunk chunk = chunks[blockIdx.x / BLOCKS_PER_CHUNK];
    const ParameterRow<STATES> row = tensors[chunk.tensor];
    Part part(chunk, row.length);
    part.narrow(blockIdx.x % BLOCKS_PER_CHUNK, BLOCKS_PER_CHUNK);
    const bool skips = is_skipped(found_inf);
    if (part.length == 0 || (skips && row.weight == nullptr)) return;
    ElementwiseStep<Coefficients, GradientType, Weight> step(
        row, part, coefficients[chunk.tensor], scale, clip, skips);
    sweep<WIDTH, Coefficients::AHEAD>(part.length, step.template begins<WIDTH>(), step);
}

// Define the kernel {name}_{gradient}_to_{weight} of a source's Row and Coefficients.
#define AMP_ELEMENTWISE_STEP(NAME, GRADIENT, WEIGHT)                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME##_##GRADIENT##_to_##WEIGHT(   \
        const Row* tensors, const Chunk* chunks, const Coefficients* coefficients,           \
        const float* scale, const float* clip, const float* found_inf) {                     \
        step_chunk<GRADIENT, WEIGHT>(tensors, chunks, coefficients, scale, clip, found_inf); \
    }
