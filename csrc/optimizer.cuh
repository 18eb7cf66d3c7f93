// optimizer.cuh: what the optimizers' kernels share; knows nothing of any one's rule.
//
// Each optimizer takes its hyperparameters in a first small launch, one per parameter group, which
// advances the step counters and leaves the coefficients of each tensor on the device. The launches
// that follow then take tensors of all groups together.

#pragma once

#include "dtypes.cuh"
#include "reconcile.cuh"
#include "sweep.cuh"
#include "tensor_table.cuh"

// A parameter: addresses, 0 (null) for state or weight that it does not have; whether the master
// wins where master and weight disagree (0 or 1; reconcile.cuh); and its elements.
template <int STATES>
struct ParameterRow {
    const void* gradient;
    float* master;
    float* state[STATES];
    void* weight;
    float* step;
    long long wins;
    long long length;
};

// Whether the step is skipped; a null address: never.
__device__ __forceinline__ bool is_skipped(const float* found_inf) {
    return found_inf != nullptr && *found_inf != 0.0f;
}

__device__ __forceinline__ float value_or_1(const float* address) {
    return address == nullptr ? 1.0f : *address;
}

__device__ __forceinline__ double learning_rate(double value, const float* address) {
    return address == nullptr ? value : static_cast<double>(*address);
}

// The gradient as it enters the rule: unscaled, then clipped, with a rounding after each, as if
// both had been done in memory.
struct Gradient {
    float inverse;  // of the loss scale; negative where the objective is maximized
    float clip;

    __device__ Gradient(const float* scale, const float* clip, float sign)
        : inverse(sign * (1.0f / value_or_1(scale))), clip(value_or_1(clip)) {}

    template <typename Type>
    __device__ __forceinline__ float of(Type stored) const {
        return to_float(stored) * inverse * clip;
    }
};

// Whether the master takes what was written to its half weight since the last step, before it is
// stepped. A skipped step does this, too, and has the weight follow where the master wins: the host
// need not know that it was skipped, and takes the two for equal.
template <typename Weight, int STATES>
__device__ __forceinline__ bool follows_weight(const ParameterRow<STATES>& row) {
    return sizeof(Weight) == 2 && row.weight != nullptr && row.wins == 0;
}

// Write the half weight of an updated master, where there is one.
template <typename Weight, int WIDTH>
__device__ __forceinline__ void store_weight(Weight* address, const Pack<float, WIDTH>& master) {
    if (address != nullptr) store_rounded(address, master);
}
