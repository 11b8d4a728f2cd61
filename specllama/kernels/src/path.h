// What the instruction sets have in common: a table of types, and for each the functions that pack and multiply it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace speck {

struct Type {
    const char* name;    // as ggml names it
    int block;           // weights in a block
    size_t file_bytes;   // of a block of one row
    size_t packed_bytes; // of a block of `rows` rows
    size_t column_bytes; // of a block of activations

    // rows rows of a file, row_bytes apart, to `blocks` packed blocks
    void (*pack)(const void* file_rows, size_t row_bytes, int blocks, void* out);
    // out[c * out_stride + r] = row r times column c; the columns are `stride` blocks apart
    void (*tiles)(const void* packed, int blocks, int columns, const void* y, size_t stride, float* out,
                  size_t out_stride);
    void (*quantize)(const float* x, int first_block, int last_block, void* out);
};

constexpr uint16_t hidden_half = 0xfc00;  // -infinity
constexpr int attention_block = 32;   // positions
constexpr int attention_chunk = 256;  // positions whose softmax is computed from nothing
constexpr int attention_rows = 16;    // at once

// What a row sees, as numbers: how many positions, the last one, and where each chunk of them begins.
struct Sight {
    enum { count, last, starts };
    static constexpr int chunks(int positions) { return (positions + attention_chunk - 1) / attention_chunk; }
    static constexpr int size(int positions) { return starts + chunks(positions); }
};

// The sizes and strides (in bytes) of an attention of float queries over a cache of binary16.
struct Attention {
    const char *q, *k, *v, *mask;  // mask may be null
    size_t q_row, q_head, k_position, k_head, v_position, v_head, mask_row;
    int k_size, v_size;  // numbers in a head
    int positions;       // in the cache
    int shared;          // query heads that share a head of the cache
    float scale, softcap;  // softcap 0: none
    const int* sights;  // one `Sight` for each row, if there is a mask

    const int* sight(int row) const { return sights + (size_t)row * Sight::size(positions); }
    bool sees(int row, int position) const { return ((const uint16_t*)(mask + row * mask_row))[position] != hidden_half; }
    int count(int row) const { return mask ? sight(row)[Sight::count] : positions; }
    int chunks(int row) const { return Sight::chunks(count(row)); }
    int state_floats() const { return v_size + 2; }
    // Widened blocks with room for a window that moves, and weights.
    int work_floats() const { return 2 * attention_block * (k_size + v_size) + shared * (attention_block + 1); }
};

struct Path {
    const char* name;
    int rows;  // side by side in a packed block
    const Type* types;
    int n_types;
    Type coarse;  // of the coarse copy of a head, which `pack_coarse` packs from floats
    double (*pack_coarse)(const float* rows, int blocks, void* out);  // returns the sum of the squared errors
    float (*highest)(const float* logits, int64_t n);
    int (*high_groups)(const float* logits, int64_t n, float least, int* high);

    void (*look)(const uint16_t* mask, int positions, int* sight);
    void (*attend_chunk)(const Attention&, int kv_head, const int* rows, int n, int chunk, float* states, float* work);
    void (*join)(int v_size, float* all, const float* next);
    void (*finish)(int v_size, const float* state, float* out);
    int attention_step;  // sizes of heads are multiples of this
};

#define SPECK_EXPORT extern "C" __attribute__((visibility("default")))

constexpr char missing_instructions[] = "the CPU lacks AVX2, or the instruction set in SPECLLAMA_ISA";

// The instruction set that is named, or the one in the environment variable SPECLLAMA_ISA, or else the best of this CPU;
// null if the CPU lacks it.
const Path* path_of_this_cpu(const char* name);

// Weak: a program may be linked with some of them only.
__attribute__((weak)) const Path& avx2_path();
__attribute__((weak)) const Path& avxvnni_path();
__attribute__((weak)) const Path& avx512vnni_path();

}  // namespace speck
