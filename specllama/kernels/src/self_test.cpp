// Every type and instruction set against plain C++, and a row among others against the row alone.
#include <cpuid.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "path.h"
#include "unpack.h"

namespace speck {

const Path* path_of_this_cpu(const char* name) {
    __builtin_cpu_init();
    // Compilers know these two names late, so they are read from the CPU.
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
    const bool vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    const struct {
        bool runs;
        const Path& (*get)();
    } all[] = {{avx2 && avx512, avx512vnni_path},
               {avx2 && vnni, avxvnni_path},
               {avx2, avx2_path}};
    for (const auto& each : all)
        if (each.runs && each.get && (!name || !*name || !strcmp(name, each.get().name))) return &each.get();
    return nullptr;
}

namespace {

struct Random {
    uint64_t state = 88172645463325252ull;
    uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (uint32_t)(state >> 16);
    }
    float number() { return (float)(int32_t)next() / 2147483648.0f; }
};

double half_value(half h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double sign = h >> 15 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

// How to read an unpacked block: weight = d * scale * (q - offset) - dmin * min, or d * value[q].
struct Reading {
    const char* name;
    void (*unpack)(const void*, Unpacked&);
    int group, offset;
    bool has_scale, has_min, added_min, by_value;
    size_t halfs[2];  // where the block's d and dmin lie
};

template <class B> void unpack_as(const void* block, Unpacked& u) { unpack(*(const B*)block, u); }

constexpr size_t none = ~(size_t)0;
const Reading readings[] = {
    {"q4_0", unpack_as<BlockQ4_0>, 32, 8, false, false, false, false, {0, none}},
    {"q4_1", unpack_as<BlockQ4_1>, 32, 0, false, true, true, false, {0, 2}},
    {"q5_0", unpack_as<BlockQ5_0>, 32, 16, false, false, false, false, {0, none}},
    {"q5_1", unpack_as<BlockQ5_1>, 32, 0, false, true, true, false, {0, 2}},
    {"q8_0", unpack_as<BlockQ8_0>, 32, 128, false, false, false, false, {0, none}},
    {"iq4_nl", unpack_as<BlockIQ4_NL>, 32, 0, false, false, false, true, {0, none}},
    {"q2_K", unpack_as<BlockQ2_K>, 16, 0, true, true, false, false, {80, 82}},
    {"q3_K", unpack_as<BlockQ3_K>, 16, 4, true, false, false, false, {108, none}},
    {"q4_K", unpack_as<BlockQ4_K>, 32, 0, true, true, false, false, {0, 2}},
    {"q5_K", unpack_as<BlockQ5_K>, 32, 0, true, true, false, false, {0, 2}},
    {"q6_K", unpack_as<BlockQ6_K>, 16, 32, true, false, false, false, {208, none}},
    {"iq4_xs", unpack_as<BlockIQ4_XS>, 32, 0, true, false, false, true, {0, none}},
};

// The product of one block with activations q * d: the exact sum of a group of integers, then doubles. `size` receives
// the sum of the magnitudes, by which a difference is judged.
double product(const Reading& r, const void* block, int n, const int8_t* q, double d, double& size) {
    Unpacked u;
    r.unpack(block, u);
    double sum = 0;
    for (int g = 0; g < n / r.group; g++) {
        int64_t part = 0, total = 0;
        for (int i = g * r.group; i < (g + 1) * r.group; i++) {
            part += (r.by_value ? iq4_values[u.q[i]] : u.q[i] - r.offset) * q[i];
            total += q[i];
        }
        const double scaled = half_value(u.d) * d * (r.has_scale ? u.scale[g] : 1) * (double)part;
        const double low = r.has_min ? half_value(u.dmin) * d * (double)total * (r.added_min ? 1 : -(double)u.min[g]) : 0;
        sum += scaled + low;
        size += std::fabs(scaled) + std::fabs(low);
    }
    return sum;
}

// The integers and the scale of block b of a column, whichever its form.
const int8_t* integers(const Type& type, const void* column, int b, double& d) {
    if (type.block == 32) {
        const auto& y = ((const Column32*)column)[b];
        d = y.d;
        return y.q;
    }
    const auto& y = ((const Column256*)column)[b];
    d = y.d;
    return y.q;
}

double floating_value(const Type& type, uint16_t w) {
    if (!strcmp(type.name, "f16")) return half_value(w);
    const uint32_t bits = (uint32_t)w << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

bool same(float a, float b) { return !memcmp(&a, &b, sizeof a) || (std::isnan(a) && std::isnan(b)); }

// An empty string if all is right. `kind`: 0 ordinary, 1 scales of zero and the smallest, 2 huge inputs, 3 a NaN.
std::string try_type(const Path& path, const Type& type, const Reading& reading, Random& random, int blocks, int columns,
                     int kind) {
    const int rows = path.rows, k = blocks * type.block;
    const auto where = [&](const char* what) {
        char text[200];
        snprintf(text, sizeof text, "%s %s: %s (%d blocks, %d columns, inputs %d)", path.name, type.name, what, blocks,
                 columns, kind);
        return std::string(text);
    };
    std::vector<uint8_t> file(type.file_bytes * rows * blocks + 1);
    uint8_t* weights = file.data() + 1;  // mapped files are not aligned
    for (size_t i = 0; i < type.file_bytes * rows * blocks; i++) weights[i] = (uint8_t)random.next();
    for (int b = 0; b < rows * blocks; b++)
        for (size_t at : reading.halfs)
            if (at != none) {
                const half value = (half)(kind == 1 ? random.next() % 3 : 0x1400 + random.next() % 0x1000);
                memcpy(weights + b * type.file_bytes + at, &value, sizeof value);
            }
    std::vector<float> x((size_t)k * columns);
    for (float& v : x) v = random.number() * (kind == 2 ? 1e30f : 1.0f);
    if (kind == 3) x[k / 2] = NAN;

    const size_t column_bytes = type.column_bytes * blocks;
    const auto y = std::make_unique<uint8_t[]>(column_bytes * columns);
    for (int c = 0; c < columns; c++) type.quantize(&x[(size_t)c * k], 0, blocks, y.get() + c * column_bytes);
    const size_t row_bytes = type.file_bytes * blocks;
    std::vector<uint16_t> aligned(row_bytes * rows / 2 + 1);
    memcpy(aligned.data(), weights, row_bytes * rows);
    const auto packed = std::make_unique<uint8_t[]>(type.packed_bytes * blocks);
    type.pack(weights, type.file_bytes * blocks, blocks, packed.get());
    std::vector<float> out((size_t)rows * columns + 1, 7.0f), alone(rows);
    type.tiles(packed.get(), blocks, columns, y.get(), blocks, out.data(), rows);
    if (out.back() != 7.0f) return where("writes behind its end");
    for (int c = 0; c < columns; c++) {
        type.tiles(packed.get(), blocks, 1, y.get() + c * column_bytes, blocks, alone.data(), rows);
        for (int r = 0; r < rows; r++) {
            if (!same(alone[r], out[(size_t)c * rows + r])) return where("a row depends on the columns beside it");
            double sum = 0, size = 0;
            for (int b = 0; b < blocks; b++) {
                double d;
                const int8_t* q = integers(type, y.get() + c * column_bytes, b, d);
                sum += product(reading, (const uint8_t*)aligned.data() + r * row_bytes + b * type.file_bytes, type.block, q, d,
                               size);
            }
            if (std::isnan(sum) != std::isnan(alone[r])) return where("NaN where there is none, or none where there is one");
            if (std::fabs(sum - alone[r]) > 1e-5 * size) return where("a wrong product");
        }
        for (int b = 0; b < blocks && kind != 3; b++) {
            double d;
            const int8_t* q = integers(type, y.get() + c * column_bytes, b, d);
            double most = 0;
            for (int i = 0; i < type.block; i++) most = std::fmax(most, std::fabs(x[(size_t)c * k + b * type.block + i]));
            for (int i = 0; i < type.block; i++)
                if (std::fabs(q[i] * d - x[(size_t)c * k + b * type.block + i]) > most / 127 * 0.501)
                    return where("an activation is rounded wrongly");
        }
    }
    return "";
}

std::string try_floating(const Path& path, const Type& type, Random& random, int blocks, int columns, bool with_nan) {
    const int rows = path.rows, k = blocks * type.block;
    std::vector<uint16_t> weights((size_t)rows * k);
    for (auto& w : weights) w = (uint16_t)((random.next() & 0x8000) | (0x2c00 + random.next() % 0x1000));
    std::vector<float> x((size_t)k * columns), out((size_t)rows * columns), alone(rows);
    for (float& v : x) v = random.number();
    if (with_nan) x[k / 2] = NAN;
    std::vector<uint8_t> y(type.column_bytes * blocks * columns), packed(type.packed_bytes * blocks);
    for (int c = 0; c < columns; c++) type.quantize(&x[(size_t)c * k], 0, blocks, &y[c * type.column_bytes * blocks]);
    type.pack(weights.data(), type.file_bytes * blocks, blocks, packed.data());
    type.tiles(packed.data(), blocks, columns, y.data(), blocks, out.data(), rows);
    for (int c = 0; c < columns; c++) {
        type.tiles(packed.data(), blocks, 1, &y[c * type.column_bytes * blocks], blocks, alone.data(), rows);
        for (int r = 0; r < rows; r++) {
            double sum = 0, size = 0;
            for (int i = 0; i < k; i++) {
                const double part = floating_value(type, weights[(size_t)r * k + i]) * x[(size_t)c * k + i];
                sum += part;
                size += std::fabs(part);
            }
            if (!same(alone[r], out[(size_t)c * rows + r]) || std::isnan(sum) != std::isnan(alone[r]) ||
                std::fabs(sum - alone[r]) > 1e-6 * size)
                return std::string(path.name) + " " + type.name + ": a wrong product";
        }
    }
    return "";
}

std::string try_types(const Path& path) {
    Random random;
    for (int i = 0; i < 2; i++)
        for (int columns : {1, 2, 3, 5, 8, 17})
            for (bool with_nan : {false, true})
                if (auto wrong = try_floating(path, path.types[i], random, 3, columns, with_nan); !wrong.empty()) return wrong;
    for (int i = 2; i < path.n_types; i++)
        for (const Reading& reading : readings)
            if (!strcmp(reading.name, path.types[i].name))
                for (int kind = 0; kind < 4; kind++)
                    for (int columns : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17})
                        for (int blocks : {1, 2, 5})
                            if (auto wrong = try_type(path, path.types[i], reading, random, blocks, columns, kind);
                                !wrong.empty())
                                return wrong;
    return "";
}

// Attention of `rows` rows over `positions` positions, the last row seeing all, against doubles.
std::string try_attention(const Path& path, int positions, int rows, int shared, int size, float softcap) {
    constexpr int kv_heads = 2;
    Random random;
    const int padded = (positions + 63) / 32 * 32;
    std::vector<float> q((size_t)rows * kv_heads * shared * size);
    std::vector<half> k((size_t)padded * kv_heads * size), v(k.size()), mask((size_t)padded * rows, 0xfc00);
    for (float& x : q) x = random.number() * 4;
    for (size_t i = 0; i < k.size(); i++) {  // the padding holds NaN
        const bool used = i / (kv_heads * size) < (size_t)positions;
        k[i] = used ? (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000)) : 0x7e00;
        v[i] = used ? (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000)) : 0x7e00;
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < positions - rows + 1 + r; j++) mask[(size_t)r * padded + j] = 0;

    Attention a{};
    a.q = (const char*)q.data(), a.k = (const char*)k.data(), a.v = (const char*)v.data();
    a.mask = (const char*)mask.data();
    a.q_row = (size_t)kv_heads * shared * size * 4, a.q_head = (size_t)size * 4;
    a.k_position = a.v_position = (size_t)kv_heads * size * 2, a.k_head = a.v_head = (size_t)size * 2;
    a.mask_row = (size_t)padded * 2;
    a.k_size = a.v_size = size, a.positions = padded, a.shared = shared;
    a.scale = softcap != 0.0f ? 0.1f / softcap : 0.1f, a.softcap = softcap;
    const int floats = a.state_floats(), chunks = (padded + attention_chunk - 1) / attention_chunk;
    std::vector<float> work(a.work_floats()), states((size_t)rows * shared * floats), next(states.size()), out(size), one(size);
    for (int head = 0; head < kv_heads; head++) {
        const auto run = [&](int row, int n) {
            for (int chunk = 0; chunk < chunks; chunk++) {
                path.attend_chunk(a, head, row, n, chunk, (chunk ? next : states).data(), work.data());
                for (int i = 0; chunk && i < n * shared; i++)
                    path.join(size, &states[(size_t)i * floats], &next[(size_t)i * floats]);
            }
        };
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < shared; h++) {
                run(0, rows);
                path.finish(size, &states[((size_t)r * shared + h) * floats], out.data());
                run(r, 1);
                path.finish(size, &states[(size_t)h * floats], one.data());
                if (memcmp(out.data(), one.data(), size * sizeof(float)))
                    return std::string(path.name) + " attention: a row depends on the rows beside it";
                const float* query = &q[((size_t)r * kv_heads * shared + head * shared + h) * size];
                std::vector<double> score(positions - rows + 1 + r);
                double most = -INFINITY, total = 0;
                for (size_t j = 0; j < score.size(); j++) {
                    double s = 0;
                    for (int d = 0; d < size; d++) s += query[d] * half_value(k[(j * kv_heads + head) * size + d]);
                    score[j] = softcap != 0.0f ? softcap * std::tanh(s * a.scale) : s * a.scale;
                    most = std::fmax(most, score[j]);
                }
                std::vector<double> expected(size);
                for (size_t j = 0; j < score.size(); j++) {
                    const double p = std::exp(score[j] - most);
                    total += p;
                    for (int d = 0; d < size; d++) expected[d] += p * half_value(v[(j * kv_heads + head) * size + d]);
                }
                for (int d = 0; d < size; d++)
                    if (!(std::fabs(out[d] - expected[d] / total) < 1e-4))
                        return std::string(path.name) + " attention: a wrong result";
            }
    }
    return "";
}

}  // namespace
}  // namespace speck

// Tries the instruction set `isa` (null: the best of this CPU, "all": each). Returns what is wrong, or an empty text.
SPECK_EXPORT const char* specllama_kernels_self_test(const char* isa) {
    using namespace speck;
    static std::string wrong;
    wrong.clear();
    const bool all = isa && !strcmp(isa, "all");
    for (const char* name : {"avx2", "avxvnni", "avx512vnni"}) {
        const Path* path = path_of_this_cpu(all ? name : isa);
        if (!path && !all) return "the CPU lacks these instructions";
        if (path && wrong.empty()) wrong = try_types(*path);
        if (path && wrong.empty()) wrong = try_attention(*path, 40, 3, 3, 64, 0.0f);
        if (path && wrong.empty()) wrong = try_attention(*path, 600, 2, 2, 128, 0.0f);
        if (path && wrong.empty()) wrong = try_attention(*path, 300, 5, 1, 80, 30.0f);
        if (!all) break;
    }
    return wrong.c_str();
}

#ifdef SPECK_MAIN
int main() {
    const char* wrong = specllama_kernels_self_test("all");
    puts(wrong);
    return *wrong ? 1 : 0;
}
#endif
