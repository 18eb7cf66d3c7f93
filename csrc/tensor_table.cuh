// tensor_table.cuh: the two tables by which one launch works on any number of tensors.
//
// Knows nothing of what is done to the elements. A launch gets
//
//   tensors  one row per tensor: its addresses, then its number of elements, 8 bytes each. The
//            layout of a row stands in each .cu. Uploaded again when an address changed.
//   chunks   (int32 tensor, int32 index): elements index * CHUNK and following, CHUNK of them or
//            up to the tensor's end, of the tensor in that row. It depends on the sizes only. A
//            tensor without elements has no chunk.
//
// and has one block of THREADS threads per chunk. Tensors are dense: their elements fill the memory
// from the address on, in the same order in every tensor of a row. An address must be aligned to
// its dtype. Elements move in packs from the first one on that is aligned to a pack in all tensors
// of the row (16 bytes suffice), and one by one where there is none: views that begin at one place
// in memories of different dtypes move in packs, wherever the place is. The rows of all dtype mixes
// may share one table: a launch touches the rows that its chunks name.
//
// Compile with --fmad=false: every operator then rounds as written, in packs and outside of them,
// so that alignment has no influence on an element's bits (it has on the order of sums).

#pragma once

constexpr int CHUNK = 16384;
constexpr int THREADS = 256;

struct Chunk {
    int tensor;
    int index;
};

static_assert(sizeof(Chunk) == 8, "the host packs a chunk into 8 bytes");

// The part of a tensor that is one block's: `length` elements, at most CHUNK, from `begin` on.
struct Part {
    long long begin;
    int length;

    __device__ Part(const Chunk& chunk, long long tensor_length)
        : begin(static_cast<long long>(chunk.index) * CHUNK),
          length(static_cast<int>(min(tensor_length - begin, static_cast<long long>(CHUNK)))) {}

    // Take one of `shares` equal ones of a whole chunk; after the tensor's end it has no elements.
    __device__ void narrow(int share, int shares) {
        const int size = CHUNK / shares;
        begin += share * size;
        length = max(0, min(length - share * size, size));
    }

    // Where the part begins in a tensor; a null address, for none, stays null.
    template <typename Type>
    __device__ Type* of(Type* address) const {
        return address == nullptr ? nullptr : address + begin;
    }
};
