// update_scale: moves a dynamic loss scale on the device, once per backward pass.
//
//   update_scale  <<<1, 32>>>(scaler, found_inf, dynamic, growth_factor, backoff_factor,
//                             growth_interval, hysteresis, floor, cap)
//
//   scaler           Scaler*        40 bytes, as below; its address is that of the scale
//   found_inf        const float*   not 0 (or NaN): the gradients overflowed
//   dynamic          int            0: a static scale, which only counts
//   growth_factor    double
//   backoff_factor   double
//   growth_interval  long long
//   hysteresis       long long
//   floor, cap       float
//
// The rule is that of LossScaler in loss_scaler.py, with the same bits where scale, floor and cap
// are float32 numbers: products are formed in float64 and rounded to float32 once.

struct Scaler {
    float scale;
    float scale_before;  // the last update: gradients of the pass that it judged still bear it
    int skipped;         // 1 where the last update told to skip the step, else 0
    int reduced;         // 1 where the last update lowered the scale, else 0
    long long unskipped;
    long long hysteresis_left;
    long long overflows_at_floor;
};

static_assert(sizeof(Scaler) == 40, "the host packs a scaler into 40 bytes");

__device__ void after_overflow(Scaler& scaler, double backoff_factor, float floor) {
    scaler.overflows_at_floor = scaler.scale <= floor ? scaler.overflows_at_floor + 1 : 0;
    if (scaler.hysteresis_left > 1) {
        scaler.hysteresis_left -= 1;
        return;
    }
    const float lowered = fmaxf(floor, static_cast<float>(scaler.scale * backoff_factor));
    // A scale loaded from below the floor is not raised.
    scaler.scale = fminf(scaler.scale, lowered);
}

__device__ void after_growth_interval(Scaler& scaler, double growth_factor, long long hysteresis,
                                      float cap) {
    scaler.unskipped = 0;
    scaler.hysteresis_left = hysteresis;
    const float raised = fminf(cap, static_cast<float>(scaler.scale * growth_factor));
    // A scale loaded from above the cap is not lowered.
    scaler.scale = fmaxf(scaler.scale, raised);
}

extern "C" __global__ void update_scale(Scaler* address, const float* found_inf, int dynamic,
                                        double growth_factor, double backoff_factor,
                                        long long growth_interval, long long hysteresis,
                                        float floor, float cap) {
    if (threadIdx.x != 0) return;
    Scaler scaler = *address;
    scaler.scale_before = scaler.scale;
    scaler.skipped = *found_inf != 0.0f;
    if (scaler.skipped) {
        scaler.unskipped = 0;
        if (dynamic) after_overflow(scaler, backoff_factor, floor);
    } else {
        scaler.unskipped += 1;
        scaler.overflows_at_floor = 0;
        if (dynamic && scaler.unskipped >= growth_interval) {
            after_growth_interval(scaler, growth_factor, hysteresis, cap);
        }
    }
    scaler.reduced = scaler.scale < scaler.scale_before;
    *address = scaler;
}
