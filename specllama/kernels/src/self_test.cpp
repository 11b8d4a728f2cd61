// Every type and instruction set against plain C++, and a row among others against the row alone.
#include <cpuid.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "path.h"
#include "unpack.h"

namespace speck {

const Path* path_of_this_cpu(const char* name) {
    if (!name) name = getenv("SPECLLAMA_ISA");
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

double floating_value(const Type& type, const void* weights, size_t i) {
    float value;
    if (!strcmp(type.name, "f16")) return half_value(((const half*)weights)[i]);
    if (!strcmp(type.name, "f32")) return ((const float*)weights)[i];
    const uint32_t bits = (uint32_t)((const uint16_t*)weights)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

bool same(float a, float b) { return !memcmp(&a, &b, sizeof a) || (std::isnan(a) && std::isnan(b)); }

enum Kind { ordinary, smallest_scales, nan_scale, huge_inputs, denormal_inputs, nan_input, infinite_input, kinds };

// Random blocks of a file.
void fill(uint8_t* weights, const Type& type, int blocks, Random& random, Kind kind = ordinary) {
    for (size_t i = 0; i < type.file_bytes * blocks; i++) weights[i] = (uint8_t)random.next();
    const auto set = [&](size_t at, half value) { memcpy(weights + at, &value, sizeof value); };
    const auto number = [&] { return (half)(0x1400 + random.next() % 0x1000); };
    for (const Reading& reading : readings)
        for (int b = 0; b < blocks && !strcmp(reading.name, type.name); b++)
            for (size_t at : reading.halfs)
                if (at != none) set(b * type.file_bytes + at, kind == smallest_scales ? (half)(random.next() % 3) : number());
    if (type.column_bytes == sizeof(ColumnFloat))
        for (size_t at = 0; at < type.file_bytes * blocks; at += sizeof(half))
            set(at, (half)((random.next() & 0x8000) | (0x1800 + number())));
}

// An empty string if all is right.
std::string try_type(const Path& path, const Type& type, const Reading& reading, Random& random, int blocks, int columns,
                     Kind kind) {
    const int rows = path.rows, k = blocks * type.block;
    const auto where = [&](const char* what) {
        char text[200];
        snprintf(text, sizeof text, "%s %s: %s (%d blocks, %d columns, inputs %d)", path.name, type.name, what, blocks,
                 columns, kind);
        return std::string(text);
    };
    std::vector<uint8_t> file(type.file_bytes * rows * blocks + 1);
    uint8_t* weights = file.data() + 1;  // mapped files are not aligned
    fill(weights, type, rows * blocks, random, kind);
    if (kind == nan_scale) {
        const half nan = 0x7e00;
        memcpy(weights + reading.halfs[0], &nan, sizeof nan);
    }
    std::vector<float> x((size_t)k * columns);
    for (float& v : x) v = random.number() * (kind == huge_inputs ? 1e30f : kind == denormal_inputs ? 1e-39f : 1.0f);
    if (kind == nan_input) x[k / 2] = NAN;
    if (kind == infinite_input) x[k / 2] = -INFINITY;

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
        for (int b = 0; b < blocks && kind < nan_input; b++) {
            double d;
            const int8_t* q = integers(type, y.get() + c * column_bytes, b, d);
            double most = 0;
            for (int i = 0; i < type.block; i++) most = std::fmax(most, std::fabs(x[(size_t)c * k + b * type.block + i]));
            for (int i = 0; i < type.block; i++)
                if (std::fabs(q[i] * d - x[(size_t)c * k + b * type.block + i]) > most / 127 * 0.501 + 0x1p-100)
                    return where("an activation is rounded wrongly");
        }
    }
    return "";
}

std::string try_floating(const Path& path, const Type& type, Random& random, int blocks, int columns, bool with_nan) {
    const int rows = path.rows, k = blocks * type.block;
    std::vector<float> weights((size_t)rows * k);
    fill((uint8_t*)weights.data(), type, rows * blocks, random);
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
                const double part = floating_value(type, weights.data(), (size_t)r * k + i) * x[(size_t)c * k + i];
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
    for (int i = 0; i < path.n_types; i++)
        for (int columns : {1, 2, 3, 5, 8, 10, 12, 17})
            for (bool with_nan : {false, true})
                if (path.types[i].column_bytes == sizeof(ColumnFloat))
                    if (auto wrong = try_floating(path, path.types[i], random, 3, columns, with_nan); !wrong.empty())
                        return wrong;
    for (int i = 0; i < path.n_types; i++)
        for (const Reading& reading : readings)
            if (!strcmp(reading.name, path.types[i].name))
                for (int kind = 0; kind < kinds; kind++)
                    for (int columns : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 17})
                        for (int blocks : {1, 2, 5})
                            if (kind == ordinary || (columns % 4 == 1 && blocks == 2))
                                if (auto wrong = try_type(path, path.types[i], reading, random, blocks, columns, (Kind)kind);
                                    !wrong.empty())
                                    return wrong;
    return "";
}

// The coarse copy of a head: its values, its error, a row among others; and the choice of high logits.
std::string try_head(const Path& path) {
    const Type& coarse = path.coarse;
    const int L = path.rows, blocks = 3, n = blocks * coarse.block, parts = n / 32;
    const auto wrong = [&](const char* what) { return std::string(path.name) + " coarse head: " + what; };
    Random random;
    std::vector<float> rows((size_t)L * n), copy(rows.size());
    for (float& w : rows) w = random.number() + random.number() + random.number();
    for (int i = 0; i < n; i++) rows[i] = 0.0f;
    const auto packed = std::make_unique<uint8_t[]>(coarse.packed_bytes * blocks);
    const double lost = path.pack_coarse(rows.data(), blocks, packed.get());
    std::vector<float> x(n), out((size_t)L * 17), alone(L);
    std::vector<Column32> y((size_t)parts * 17);
    for (int i = 0; i < n; i++) {  // a column with a single 1 reads one weight of each row
        std::fill(x.begin(), x.end(), 0.0f);
        x[i] = 1.0f;
        coarse.quantize(x.data(), 0, parts, y.data());
        coarse.tiles(packed.get(), blocks, 1, y.data(), parts, alone.data(), L);
        for (int r = 0; r < L; r++) copy[(size_t)r * n + i] = alone[r];
    }
    double expected = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const size_t block = i / coarse.block * coarse.block;
        float step = INFINITY;  // the smallest value of a block is half of the step between two
        for (int j = 0; j < coarse.block; j++) step = std::fmin(step, 2 * std::fabs(copy[block + j]));
        double nearest = INFINITY;
        for (double at : {-1.5, -0.5, 0.5, 1.5}) nearest = std::fmin(nearest, std::fabs(rows[i] - at * step));
        if (std::fabs(std::fabs(rows[i] - copy[i]) - nearest) > 1e-4) return wrong("a value that is not the nearest");
        expected += (rows[i] - copy[i]) * (rows[i] - copy[i]);
    }
    if (std::fabs(lost - expected) > 1e-4 * expected) return wrong("a wrong error");
    for (int columns : {1, 2, 3, 5, 8, 10, 12, 17})
        for (bool with_nan : {false, true}) {
            std::vector<float> all((size_t)n * columns);
            for (float& v : all) v = random.number();
            if (with_nan) all[n / 2] = NAN;
            for (int c = 0; c < columns; c++) coarse.quantize(&all[(size_t)c * n], 0, parts, &y[(size_t)c * parts]);
            coarse.tiles(packed.get(), blocks, columns, y.data(), parts, out.data(), L);
            for (int c = 0; c < columns; c++) {
                coarse.tiles(packed.get(), blocks, 1, &y[(size_t)c * parts], parts, alone.data(), L);
                for (int r = 0; r < L; r++) {
                    double sum = 0, size = 0;
                    for (int i = 0; i < n; i++) {
                        const Column32& at = y[(size_t)c * parts + i / 32];
                        const double part = (double)copy[(size_t)r * n + i] * at.q[i % 32] * at.d;
                        sum += part;
                        size += std::fabs(part);
                    }
                    if (!same(alone[r], out[(size_t)c * L + r])) return wrong("a row depends on the columns beside it");
                    if (std::isnan(sum) != std::isnan(alone[r]) || std::fabs(sum - alone[r]) > 1e-5 * size)
                        return wrong("a wrong product");
                }
            }
        }
    for (int count : {1, L - 1, L, 5 * L + 3}) {
        std::vector<float> logits(count);
        for (float& v : logits) v = random.number();
        logits[count / 2] = NAN;
        float most = -INFINITY;
        for (float v : logits) most = v > most ? v : most;
        if (path.highest(logits.data(), count) != most) return wrong("another highest logit");
        std::vector<int> high(count / L + 1), expected_groups;
        high.resize(path.high_groups(logits.data(), count, 0.9f, high.data()));
        for (int i = 0; i < count; i++)
            if (logits[i] >= 0.9f && (expected_groups.empty() || expected_groups.back() != i / L)) expected_groups.push_back(i / L);
        if (high != expected_groups) return wrong("other groups with a high logit");
    }
    return "";
}

// An attention of `rows` rows over `positions` positions; the last row sees all of them, or the last `window`.
struct Case {
    int positions, rows, shared, k_size, v_size;
    float softcap = 0.0f;
    int window = 1 << 30;
    bool masked = true;  // else every row sees all, and the cache has no padding
    bool branches = false;  // of the last tokens, a row sees every third
    int sequences = 1;      // a row sees every so many-th position

    bool sees(int row, int position) const {
        const int last = positions - rows + row;
        if ((last - position) % sequences) return false;
        if (branches && position > positions - 90 && (position - last) % 3) return false;
        return !masked || (position <= last && position > last - window);
    }
};

// What each row sees; `a` refers to it.
std::vector<int> all_sights(const Path& path, Attention& a, const std::vector<half>& mask, int rows) {
    const int size = Sight::size(a.positions);
    std::vector<int> sights((size_t)rows * size);
    for (int r = 0; r < rows; r++) path.look(&mask[(size_t)r * a.positions], a.positions, &sights[(size_t)r * size]);
    a.sights = sights.data();
    return sights;
}

// Against doubles, and each row among the others against the row alone.
std::string try_attention(const Path& path, const Case& its) {
    constexpr int kv_heads = 2;
    const int rows = its.rows, shared = its.shared, k_size = its.k_size, v_size = its.v_size;
    Random random;
    const int padded = its.masked ? (its.positions + 63) / 32 * 32 : its.positions;
    std::vector<float> q((size_t)rows * kv_heads * shared * k_size);
    std::vector<half> k((size_t)padded * kv_heads * k_size), v((size_t)padded * kv_heads * v_size);
    std::vector<half> mask((size_t)padded * rows, hidden_half);
    for (float& x : q) x = random.number() * 4;
    const auto fill_cache = [&](std::vector<half>& cache, int size) {  // the padding holds NaN
        for (size_t i = 0; i < cache.size(); i++)
            cache[i] = i / (kv_heads * size) < (size_t)its.positions
                           ? (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000)) : 0x7e00;
    };
    fill_cache(k, k_size);
    fill_cache(v, v_size);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < its.positions; j++)
            if (its.sees(r, j)) mask[(size_t)r * padded + j] = 0;

    Attention a{};
    a.q = (const char*)q.data(), a.k = (const char*)k.data(), a.v = (const char*)v.data();
    a.mask = its.masked ? (const char*)mask.data() : nullptr;
    a.q_row = (size_t)kv_heads * shared * k_size * 4, a.q_head = (size_t)k_size * 4;
    a.k_position = (size_t)kv_heads * k_size * 2, a.k_head = (size_t)k_size * 2;
    a.v_position = (size_t)kv_heads * v_size * 2, a.v_head = (size_t)v_size * 2;
    a.mask_row = (size_t)padded * 2;
    a.k_size = k_size, a.v_size = v_size, a.positions = padded, a.shared = shared;
    a.softcap = its.softcap, a.scale = 0.1f / (its.softcap != 0.0f ? its.softcap : 1.0f);
    const std::vector<int> sights = all_sights(path, a, mask, rows);
    std::vector<int> order(rows);
    std::iota(order.begin(), order.end(), 0);
    const int floats = a.state_floats(), chunks = Sight::chunks(padded);
    std::vector<float> work(a.work_floats()), states((size_t)rows * shared * floats), next(states.size());
    std::vector<float> out(v_size), one(v_size);
    const auto wrong = [&](const char* what) {
        char text[200];
        snprintf(text, sizeof text, "%s attention: %s (%d positions, %d rows, heads of %d and %d)", path.name, what,
                 its.positions, rows, k_size, v_size);
        return std::string(text);
    };
    for (int head = 0; head < kv_heads; head++) {
        const auto run = [&](int row, int n) {
            for (int chunk = 0; chunk < chunks; chunk++) {
                path.attend_chunk(a, head, &order[row], n, chunk, (chunk ? next : states).data(), work.data());
                for (int i = 0; chunk && i < n * shared; i++)
                    path.join(v_size, &states[(size_t)i * floats], &next[(size_t)i * floats]);
            }
        };
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < shared; h++) {
                float* query = &q[((size_t)r * kv_heads * shared + head * shared + h) * k_size];
                run(0, rows);
                path.finish(v_size, &states[((size_t)r * shared + h) * floats], out.data());
                run(r, 1);
                path.finish(v_size, &states[(size_t)h * floats], one.data());
                if (memcmp(out.data(), one.data(), v_size * sizeof(float)))
                    return wrong("a row depends on the rows beside it");
                std::vector<double> score(its.positions), expected(v_size);
                double most = -INFINITY, total = 0;
                for (int j = 0; j < its.positions; j++) {
                    double s = 0;
                    for (int d = 0; d < k_size; d++) s += query[d] * half_value(k[((size_t)j * kv_heads + head) * k_size + d]);
                    s = its.softcap != 0.0f ? its.softcap * std::tanh(s * a.scale) : s * a.scale;
                    score[j] = its.sees(r, j) ? s : -INFINITY;
                    most = std::fmax(most, score[j]);
                }
                for (int j = 0; j < its.positions; j++) {
                    const double p = std::exp(score[j] - most);
                    total += p;
                    for (int d = 0; d < v_size; d++) expected[d] += p * half_value(v[((size_t)j * kv_heads + head) * v_size + d]);
                }
                for (int d = 0; d < v_size; d++)
                    if (!(std::fabs(out[d] - expected[d] / total) < 1e-4)) return wrong("a wrong result");
                const float before = query[k_size / 2];
                query[k_size / 2] = NAN;
                run(r, 1);
                query[k_size / 2] = before;
                path.finish(v_size, &states[(size_t)h * floats], one.data());
                if (!std::isnan(one[0]) || !std::isnan(one[v_size - 1])) return wrong("a NaN is lost");
            }
    }
    return "";
}

// Rows of several sequences, windows and branches in one cache, against the same rows where nothing else is in it.
std::string try_scattered(const Path& path) {
    constexpr int size = 64, rows = 13, positions = 1021;  // no multiple of a block
    Random random;
    std::vector<float> q((size_t)rows * size);
    std::vector<half> k((size_t)positions * size), v(k.size()), alone_k(k.size()), alone_v(k.size());
    for (float& x : q) x = random.number() * 4;
    for (half& x : k) x = (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000));
    for (half& x : v) x = (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000));
    std::vector<half> mask((size_t)rows * positions, hidden_half);
    const auto sees = [&](int row, int j) {
        switch (row) {
            case 0: return true;
            case 1: case 2: case 3: case 4: return j >= 100 + row && j < 1000 + row;  // a window
            case 5: case 6: return j >= 333 && j < 990 + row;                          // a sequence behind another
            case 7: return j % 3 == 0;                                                 // sequences that take turns
            case 8: return j % 3 == 0 && j < 900;
            case 9: return j < 500 || (j > 730 && random.next() % 4 == 0);             // branches
            case 10: return j < 500 || (j > 730 && random.next() % 2 == 0);
            case 11: return j == 1020;
            default: return random.next() % 7 > 1;
        }
    };
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < positions; j++)
            if (sees(r, j)) mask[(size_t)r * positions + j] = 0;
    Attention a{};
    a.q_row = a.q_head = size * 4, a.k_position = a.k_head = a.v_position = a.v_head = size * 2;
    a.mask_row = positions * 2, a.k_size = a.v_size = size, a.shared = 1, a.scale = 0.1f, a.positions = positions;
    const int floats = a.state_floats();
    std::vector<float> work(a.work_floats()), all(rows * floats), next(all.size()), together(rows * size), alone(size);
    const auto run = [&](const std::vector<half>& masks, const std::vector<int>& order, float* out) {
        const int n = (int)order.size();
        a.mask = (const char*)masks.data();
        const std::vector<int> sights = all_sights(path, a, masks, n);
        for (int chunk = 0; chunk < Sight::chunks(positions); chunk++) {
            path.attend_chunk(a, 0, order.data(), n, chunk, (chunk ? next : all).data(), work.data());
            for (int i = 0; chunk && i < n; i++) path.join(size, &all[i * floats], &next[i * floats]);
        }
        for (int i = 0; i < n; i++) path.finish(size, &all[i * floats], out + order[i] * size);
    };
    a.q = (const char*)q.data(), a.k = (const char*)k.data(), a.v = (const char*)v.data();
    run(mask, {12, 1, 2, 3, 4, 0, 6, 5, 7, 9, 10, 8, 11}, together.data());
    a.k = (const char*)alone_k.data(), a.v = (const char*)alone_v.data();
    for (int r = 0; r < rows; r++) {
        std::vector<half> own(positions, hidden_half);
        int n = 0;
        for (int j = 0; j < positions; j++) {
            if (mask[(size_t)r * positions + j]) continue;
            own[n] = 0;
            memcpy(&alone_k[(size_t)n * size], &k[(size_t)j * size], size * sizeof(half));
            memcpy(&alone_v[(size_t)n++ * size], &v[(size_t)j * size], size * sizeof(half));
        }
        a.q = (const char*)&q[(size_t)r * size];
        run(own, {0}, alone.data());
        if (memcmp(&together[(size_t)r * size], alone.data(), size * sizeof(float)))
            return std::string(path.name) + " attention: row " + std::to_string(r) + " is not that of its sequence alone";
    }
    return "";
}

const Case cases[] = {
    {40, 3, 3, 64, 64},
    {600, 2, 2, 128, 128},
    {300, 5, 1, 80, 80, 30.0f},
    {77, 2, 4, 256, 256},
    {513, 9, 2, 64, 64, 0.0f, 50},
    {33, 2, 1, 96, 96, 0.0f, 1 << 30, false},
    {1, 1, 1, 192, 128, 0.0f, 1 << 30, false},
    {290, 1, 1, 16, 48},
    {300, 9, 2, 64, 64, 0.0f, 120, true, true},
    {1200, 9, 2, 64, 64, 0.0f, 900, true, false, 3},
};

}  // namespace
}  // namespace speck

// Tries the instruction set `isa` (null: as `path_of_this_cpu`, "all": each). Returns what is wrong, or an empty text.
SPECK_EXPORT const char* specllama_kernels_self_test(const char* isa) {
    using namespace speck;
    static std::string wrong;
    wrong.clear();
    const bool all = isa && !strcmp(isa, "all");
    for (const char* name : {"avx2", "avxvnni", "avx512vnni"}) {
        const Path* path = path_of_this_cpu(all ? name : isa);
        if (!path && !all) return missing_instructions;
        if (path && wrong.empty()) wrong = try_types(*path);
        if (path && wrong.empty()) wrong = try_head(*path);
        if (path && wrong.empty()) wrong = try_scattered(*path);
        for (const Case& each : cases)
            if (path && wrong.empty()) wrong = try_attention(*path, each);
        if (!all) break;
    }
    return wrong.c_str();
}
