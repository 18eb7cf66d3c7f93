// cast: copies many float32 tensors into half-precision ones, in one launch.
//
// The host cuts every tensor into chunks and uploads one record per chunk; the table stays on the
// device for as long as the addresses do. One block casts one chunk, so that a launch has as many
// blocks as the table has records, whatever the number and the sizes of the tensors.
//
//   launch: cast_to_float16  <<<number of chunks, 256>>>(chunks)
//           cast_to_bfloat16 <<<number of chunks, 256>>>(chunks)
//
// Rounding is to nearest even, as in torch's Tensor.to: infinities and NaN stay what they are, and
// a value above the largest finite half becomes an infinity.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The host builds the same layout: two addresses and a length, 24 bytes.
struct Chunk {
    const float* source;
    void* target;
    long long length;  // elements; may be 0
};

static_assert(sizeof(Chunk) == 24, "the host packs a chunk into 24 bytes");

__device__ __forceinline__ void round_to(float value, __half& out) { out = __float2half_rn(value); }

__device__ __forceinline__ void round_to(float value, __nv_bfloat16& out) {
    out = __float2bfloat16_rn(value);
}

// Eight elements move at once: two 16-byte loads and one 16-byte store.
constexpr int VECTOR = 8;

template <typename Half>
struct alignas(16) HalfVector {
    Half element[VECTOR];
};

__device__ __forceinline__ bool is_aligned(const void* address) {
    return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}

template <typename Half>
__device__ __forceinline__ void cast_vector(const float4* source, HalfVector<Half>* target) {
    const float4 low = source[0];
    const float4 high = source[1];
    HalfVector<Half> packed;
    round_to(low.x, packed.element[0]);
    round_to(low.y, packed.element[1]);
    round_to(low.z, packed.element[2]);
    round_to(low.w, packed.element[3]);
    round_to(high.x, packed.element[4]);
    round_to(high.y, packed.element[5]);
    round_to(high.z, packed.element[6]);
    round_to(high.w, packed.element[7]);
    *target = packed;
}

template <typename Half>
__device__ void cast_chunk(const Chunk& chunk) {
    const float* source = chunk.source;
    Half* target = static_cast<Half*>(chunk.target);
    // A view may start anywhere: unless both ends are aligned every element goes by itself.
    const bool aligned = is_aligned(source) && is_aligned(target);
    const long long vectors = aligned ? chunk.length / VECTOR : 0;
    for (long long i = threadIdx.x; i < vectors; i += blockDim.x) {
        cast_vector(reinterpret_cast<const float4*>(source) + 2 * i,
                    reinterpret_cast<HalfVector<Half>*>(target) + i);
    }
    for (long long i = vectors * VECTOR + threadIdx.x; i < chunk.length; i += blockDim.x) {
        round_to(source[i], target[i]);
    }
}

extern "C" __global__ void cast_to_float16(const Chunk* chunks) {
    cast_chunk<__half>(chunks[blockIdx.x]);
}

extern "C" __global__ void cast_to_bfloat16(const Chunk* chunks) {
    cast_chunk<__nv_bfloat16>(chunks[blockIdx.x]);
}
