// The buffer type in ggml's own CPU back end: odd shapes, unaligned data, one and several threads. Compiled with
// sanitizers by test_arithmetic.py, which also says what a build covers.
#include <unistd.h>

#include <fstream>

#include "backend.cpp"
#include "self_test.cpp"

#include "ggml-alloc.h"
#include "ggml-cpu.h"

std::vector<ggml_backend_buffer_type_t>& ggml_backend_cpu_get_extra_buffer_types();
extern "C" {
void ggml_barrier(ggml_threadpool*);
void ggml_threadpool_chunk_set(ggml_threadpool*, int);
int ggml_threadpool_chunk_add(ggml_threadpool*, int);
ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, ggml_backend_buffer_i, void*, size_t);
void ggml_compute_forward_flash_attn_ext(const ggml_compute_params*, ggml_tensor*);
}

namespace {

ggml_backend_t cpu;

// Tensors without data of their own: each array has its exact size, so that sanitizers see its ends.
struct Tensors {
    ggml_context* ctx = ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    std::vector<std::unique_ptr<char[]>> arrays;
    ~Tensors() { ggml_free(ctx); }

    // `skip` bytes before the data make it unaligned.
    char* allocate(ggml_tensor* tensor, size_t skip = 0) {
        arrays.push_back(std::make_unique<char[]>(ggml_nbytes(tensor) + skip));
        tensor->data = arrays.back().get() + skip;
        return (char*)tensor->data;
    }
    void compute(ggml_tensor* out, int threads) {
        allocate(out);
        ggml_cgraph* graph = ggml_new_graph_custom(ctx, 16, false);
        ggml_build_forward_expand(graph, out);
        ggml_backend_cpu_set_n_threads(cpu, threads);
        if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) throw std::string("a graph cannot be computed");
    }
};

// Weights in our buffer: one matrix or several experts.
struct Weight {
    ggml_context* ctx = ggml_init({2 * ggml_tensor_overhead(), nullptr, true});
    ggml_tensor* tensor;
    ggml_backend_buffer_t buffer;
    Weight(ggml_type kind, int k, int rows, int experts, const void* data, const char* name = "") {
        tensor = ggml_new_tensor_3d(ctx, kind, k, rows, experts);
        ggml_set_name(tensor, name);
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buffer_type());
        ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
    }
    ~Weight() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};

struct Shape {
    int rows, blocks, columns;
    int planes = 1;   // of columns
    int experts = 1;  // with more than one, every column goes to two of them
    bool shared = false;  // both experts get the same column
};

// Every number of the product equals that of its row and column alone.
std::string try_product(ggml_type kind, const Shape& its, int threads) {
    const Type& type = *type_of[kind];
    const int k = its.blocks * type.block, L = path->rows, rows = its.rows, experts = its.experts;
    const size_t row_bytes = type.file_bytes * its.blocks;
    Random random;
    std::vector<uint8_t> file(row_bytes * rows * experts + 1);
    fill(file.data() + 1, type, rows * its.blocks * experts, random);
    const Weight weight(kind, k, rows, experts, file.data() + 1);

    Tensors tensors;
    ggml_tensor *input, *out, *ids = nullptr;
    if (experts > 1) {
        input = ggml_new_tensor_3d(tensors.ctx, GGML_TYPE_F32, k, its.shared ? 1 : 2, its.columns);
        // The two best of all experts are the start of each row of a larger tensor.
        ggml_tensor* sorted = ggml_new_tensor_2d(tensors.ctx, GGML_TYPE_I32, experts, its.columns);
        auto* best = (int32_t*)tensors.allocate(sorted);
        for (int c = 0; c < its.columns; c++) {
            best[c * experts] = random.next() % experts;
            best[c * experts + 1] = (best[c * experts] + 1 + random.next() % (experts - 1)) % experts;
        }
        ids = ggml_view_2d(tensors.ctx, sorted, 2, its.columns, sorted->nb[1], 0);
    } else {
        input = ggml_new_tensor_3d(tensors.ctx, GGML_TYPE_F32, k, its.planes, its.columns);
    }
    auto* x = (float*)tensors.allocate(input, sizeof(float));
    for (int64_t i = 0; i < ggml_nelements(input); i++) x[i] = random.number();
    // Without experts, the columns of a plane do not lie side by side.
    if (ids) out = ggml_mul_mat_id(tensors.ctx, weight.tensor, input, ids);
    else out = ggml_mul_mat(tensors.ctx, weight.tensor, ggml_permute(tensors.ctx, input, 0, 2, 1, 3));
    if (!ggml_backend_supports_op(cpu, out)) return std::string(type.name) + ": not supported";
    tensors.compute(out, threads);

    std::vector<uint8_t> padded(row_bytes * L), packed(type.packed_bytes * its.blocks), y(type.column_bytes * its.blocks);
    std::vector<float> alone(L);
    for (int64_t c = 0; c < out->ne[1] * out->ne[2]; c++) {
        const int64_t slot = c % out->ne[1], plane = c / out->ne[1];
        const int64_t column = ids ? (its.shared ? plane : c) : slot * its.planes + plane;
        const int expert = ids ? *(const int32_t*)((const char*)ids->data + slot * ids->nb[0] + plane * ids->nb[1]) : 0;
        type.quantize(x + column * k, 0, its.blocks, y.data());
        for (int first = 0; first < rows; first += L) {
            const int n = std::min(rows - first, L);
            memcpy(padded.data(), file.data() + 1 + (expert * rows + first) * row_bytes, n * row_bytes);
            type.pack(padded.data(), row_bytes, its.blocks, packed.data());
            type.tiles(packed.data(), its.blocks, 1, y.data(), its.blocks, alone.data(), L);
            for (int r = 0; r < n; r++)
                if (!same(alone[r], ((const float*)out->data)[c * rows + first + r]))
                    return std::string(type.name) + ": a wrong number in row " + std::to_string(first + r) + " of " +
                           std::to_string(rows) + ", column " + std::to_string(c);
        }
    }
    return "";
}

// Logits of a draft: the high ones are exact, the others near, all the same for any threads and columns beside them.
std::string try_coarse_head(ggml_type kind, const char* name) {
    constexpr int k = 256, rows = 4101, columns = 70;
    const Type& type = *type_of[kind];
    Random random;
    std::vector<float> weights((size_t)k * rows);
    for (float& w : weights) w = random.number() + random.number() + random.number();
    std::vector<uint8_t> file(type.file_bytes * (k / type.block) * rows);
    ggml_quantize_chunk(kind, weights.data(), file.data(), 0, rows, k, nullptr);
    float scale = 1.0f;  // of the inputs
    const auto logits = [&](bool is_draft, int n, int threads, int skip = 0) {
        specllama_kernels_enable(3, is_draft, false);
        const Weight weight(kind, k, rows, 1, file.data(), name);
        if (is_draft != (head_of(weight.tensor) != nullptr)) throw std::string("a coarse copy where none is due, or none");
        Tensors tensors;
        ggml_tensor* input = ggml_new_tensor_2d(tensors.ctx, GGML_TYPE_F32, k, n);
        auto* x = (float*)tensors.allocate(input);
        Random numbers;
        for (int i = -k * skip; i < k * n; i++) {
            const float number = numbers.number();
            if (i >= 0) x[i] = number * scale;
        }
        ggml_tensor* out = ggml_mul_mat(tensors.ctx, weight.tensor, input);
        tensors.compute(out, threads);
        return std::vector<float>((float*)out->data, (float*)out->data + rows * n);
    };
    constexpr float spread = 2.8f;  // of the logits, as a model's: errors of two-bit weights deviate by less than 1
    double squares = 0;
    for (float logit : logits(false, 1, 1)) squares += (double)logit * logit / rows;
    scale = spread / (float)std::sqrt(squares);
    const std::vector<float> exact = logits(false, columns, 1), draft = logits(true, columns, 1);
    if (logits(true, columns, 3) != draft) return "logits depend on the number of threads";
    const std::vector<float> alone = logits(true, 1, 2, 2);
    if (memcmp(alone.data(), &draft[2 * rows], rows * sizeof(float))) return "logits depend on the columns beside them";
    for (int c = 0; c < columns; c++) {
        const float *p = &exact[(size_t)c * rows], *q = &draft[(size_t)c * rows];
        int n_equal = 0;
        const float most = *std::max_element(p, p + rows);
        for (int r = 0; r < rows; r++) {
            if (p[r] == q[r]) n_equal++;
            else if (p[r] > most - 2) return "a high logit is not exact";
            else if (std::fabs(p[r] - q[r]) > 8) return "a logit is far off";
        }
        if (n_equal == rows) return "no logit is coarse";
    }
    if (kind == GGML_TYPE_F16) {
        const half infinite = 0x7c00;
        memcpy(&file[2 * (k + 1)], &infinite, sizeof infinite);
        specllama_kernels_enable(3, true, false);
        if (head_of(Weight(kind, k, rows, 1, file.data(), name).tensor)) return "a copy with an unknown error is read";
    }
    return "";
}

// A matrix whose rows fill no block stays as in the file, and its product is llama.cpp's.
std::string try_left_out() {
    constexpr int k = 48, rows = 9, columns = 3;
    std::vector<uint16_t> file(k * rows, 0x3c00);  // ones
    const Weight weight(GGML_TYPE_F16, k, rows, 1, file.data());
    Tensors tensors;
    ggml_tensor* input = ggml_new_tensor_2d(tensors.ctx, GGML_TYPE_F32, k, columns);
    auto* x = (float*)tensors.allocate(input);
    for (int i = 0; i < k * columns; i++) x[i] = 1.0f;
    ggml_tensor* out = ggml_mul_mat(tensors.ctx, weight.tensor, input);
    tensors.compute(out, 2);
    for (int i = 0; i < rows * columns; i++)
        if (((const float*)out->data)[i] != k) return "a matrix that is not packed is multiplied wrongly";
    return buffer_type() == weight.buffer->buft && !packable(weight.tensor) ? "" : "rows that fill no block are packed";
}

// Large buffers lie in huge pages where the system has them.
std::string try_huge_pages() {
    const std::vector<uint8_t> file((size_t)4096 * 544);  // 512 weights in 16 blocks of 34 bytes
    const Weight weight(GGML_TYPE_Q8_0, 512, 4096, 1, file.data());
    const auto base = (uintptr_t)ggml_backend_buffer_get_base(weight.buffer);
    if (base % (2 << 20)) return "a large buffer does not begin with a huge page";
    std::ifstream smaps(access("/sys/kernel/mm/transparent_hugepage", F_OK) ? "" : "/proc/self/smaps");
    bool here = false;
    for (std::string line; std::getline(smaps, line);) {
        uintptr_t first, last;
        if (sscanf(line.c_str(), "%zx-%zx ", &first, &last) == 2) here = first <= base && base < last;
        if (here && !line.compare(0, 7, "VmFlags") && line.find(" hg") == std::string::npos) return "a large buffer has small pages";
    }
    return "";
}

// Any number of threads packs the same bytes, and a mapped file stays as it is.
std::string try_threads() {
    constexpr int blocks = 18, rows = 2001, experts = 2;
    for (int kind = 0; kind < GGML_TYPE_COUNT; kind++) {
        if (!type_of[kind]) continue;
        const Type& type = *type_of[kind];
        const size_t size = type.file_bytes * blocks * rows * experts;
        void* file = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (file == MAP_FAILED) throw std::string("no memory can be mapped");
        Random random;
        fill((uint8_t*)file, type, blocks * rows * experts, random);
        const std::vector<char> before((char*)file, (char*)file + size);
        std::vector<char> first;
        std::string wrong;
        for (int threads : {1, 2, 3, 7}) {
            specllama_kernels_enable(threads, false, threads != 1);
            const Weight weight((ggml_type)kind, type.block * blocks, rows, experts, file);
            const auto* data = (const char*)weight.tensor->data;
            const std::vector<char> packed(data, data + packed_size(type, weight.tensor));
            if (first.empty()) first = packed;
            if (packed != first) wrong = std::string(type.name) + ": other bytes with " + std::to_string(threads) + " threads";
        }
        if (memcmp(before.data(), file, size)) wrong = std::string(type.name) + ": packing changes a mapped file";
        munmap(file, size);
        if (!wrong.empty()) return wrong;
    }
    return "";
}

// As `Case`, inside ggml: by ours, or by llama.cpp for what is left to it. The slopes of ALiBi are those of the paper.
std::string try_graph(const Case& its, float bias, int threads, bool ours) {
    constexpr int kv_heads = 2;
    const int heads = kv_heads * its.shared, rows = its.rows;
    const float scale = 0.1f;
    Random random;
    Tensors tensors;
    // As in llama.cpp's graphs: the numbers of all heads of a token lie side by side.
    const auto several = [&](ggml_type kind, int size, int n_heads, int n) {
        ggml_tensor* t = ggml_new_tensor_3d(tensors.ctx, kind, size, n_heads, n);
        tensors.allocate(t);
        return t;
    };
    ggml_tensor* q = several(GGML_TYPE_F32, its.k_size, heads, rows);
    ggml_tensor* k = several(GGML_TYPE_F16, its.k_size, kv_heads, its.positions);
    ggml_tensor* v = several(GGML_TYPE_F16, its.v_size, kv_heads, its.positions);
    ggml_tensor* mask = its.masked ? ggml_new_tensor_2d(tensors.ctx, GGML_TYPE_F16, its.positions, rows) : nullptr;
    auto* queries = (float*)q->data;
    for (int64_t i = 0; i < ggml_nelements(q); i++) queries[i] = random.number() * 4;
    for (ggml_tensor* cache : {k, v})
        for (int64_t i = 0; i < ggml_nelements(cache); i++)
            ((half*)cache->data)[i] = (half)(0x3000 + random.next() % 0xc00 + (random.next() & 0x8000));
    if (mask) {
        auto* m = (half*)tensors.allocate(mask);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < its.positions; j++)
                m[r * its.positions + j] = its.sees(r, j) ? ggml_fp32_to_fp16(bias ? -(float)(j % 7) : 0.0f) : 0xfc00;
    }
    const auto attend = [&](int row, int n) {
        ggml_tensor* part = ggml_view_3d(tensors.ctx, q, q->ne[0], q->ne[1], n, q->nb[1], q->nb[2], row * q->nb[2]);
        ggml_tensor* rest = mask ? ggml_view_2d(tensors.ctx, mask, mask->ne[0], n, mask->nb[1], row * mask->nb[1]) : nullptr;
        const auto turned = [&](ggml_tensor* t) { return ggml_permute(tensors.ctx, t, 0, 2, 1, 3); };
        return ggml_flash_attn_ext(tensors.ctx, turned(part), turned(k), turned(v), rest, scale, bias, its.softcap);
    };
    ggml_tensor* all = attend(0, rows);
    if (Attend::supported(all) != ours) return "attention is not computed where it was expected";
    tensors.compute(all, threads);
    const auto* out = (const float*)all->data;
    ggml_tensor* last = attend(rows - 1, 1);
    tensors.compute(last, 1);
    if (memcmp(last->data, out + (size_t)(rows - 1) * heads * its.v_size, ggml_nbytes(last)))
        return "attention: a row depends on the rows beside it";
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++) {
            const double slope = bias ? std::pow(2.0, -bias * (h + 1) / heads) : 1.0;
            std::vector<double> expected(its.v_size);
            double total = 0;
            for (int j = 0; j < its.positions; j++) {
                double s = 0;
                const auto* key = (const half*)k->data + ((size_t)j * kv_heads + h / its.shared) * its.k_size;
                for (int d = 0; d < its.k_size; d++) s += queries[((size_t)r * heads + h) * its.k_size + d] * half_value(key[d]);
                s = its.softcap ? its.softcap * std::tanh(s * scale / its.softcap) : s * scale;
                if (mask) s += slope * half_value(((const half*)mask->data)[r * its.positions + j]);
                const double p = std::exp(s);
                total += p;
                const auto* value = (const half*)v->data + ((size_t)j * kv_heads + h / its.shared) * its.v_size;
                for (int d = 0; d < its.v_size; d++) expected[d] += p * half_value(value[d]);
            }
            for (int d = 0; d < its.v_size; d++)
                if (!(std::fabs(out[((size_t)r * heads + h) * its.v_size + d] - expected[d] / total) < (ours ? 1e-4 : 5e-3)))
                    return "attention: a wrong result in heads of " + std::to_string(its.k_size);
        }
    return "";
}

std::string try_all() {
    for (int kind = 0; kind < GGML_TYPE_COUNT; kind++) {
        if (!type_of[kind]) continue;
        for (int threads : {1, 3})
            for (const Shape& each : {Shape{1, 2, 1}, {7, 2, 5}, {16, 2, 2}, {35, 3, 67}, {9, 1, 0}, {9, 1, 2, 3},
                                      {9, 1, 0, 1, 4}, {9, 2, 5, 1, 4}, {40, 1, 70, 1, 3, true}})
                if (auto wrong = try_product((ggml_type)kind, each, threads); !wrong.empty()) return wrong;
    }
    // Several packing threads, and more rows than a thread takes at once.
    if (auto wrong = try_threads(); !wrong.empty()) return wrong;
    specllama_kernels_enable(3, false, false);
    if (auto wrong = try_product(GGML_TYPE_Q8_0, {2001, 18, 3}, 3); !wrong.empty()) return wrong;
    for (ggml_type kind : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q6_K, GGML_TYPE_F16})
        for (const char* name : {"output.weight", "token_embd.weight"})
            if (auto wrong = try_coarse_head(kind, name); !wrong.empty()) return wrong;
    specllama_kernels_enable(3, true, false);  // a matrix of another name has no coarse copy
    if (auto wrong = try_product(GGML_TYPE_Q8_0, {4100, 4, 3}, 3); !wrong.empty()) return wrong;
    specllama_kernels_enable(3, false, false);
    if (auto wrong = try_left_out(); !wrong.empty()) return wrong;
    if (auto wrong = try_huge_pages(); !wrong.empty()) return wrong;

    const int step = path->attention_step;
    const Case sizes[] = {
        {77, 3, 2, 64, 64}, {77, 3, 2, 80, 80}, {77, 3, 2, 96, 96}, {77, 3, 2, 128, 128}, {77, 3, 2, 256, 256},
        {45, 2, 1, 72, 72}, {45, 2, 1, 50, 50}, {45, 2, 2, 192, 128},
        {600, 1, 3, 64, 64}, {600, 8, 1, 64, 64}, {600, 9, 2, 64, 64}, {530, 40, 1, 64, 64},
        {300, 4, 2, 64, 64, 30.0f}, {520, 5, 1, 64, 64, 0.0f, 40}, {33, 2, 2, 64, 64, 0.0f, 1 << 30, false},
        {300, 5, 2, 64, 64, 0.0f, 1 << 30, true, true}, {300, 20, 1, 64, 64, 0.0f, 200, true, true},
        {900, 7, 2, 64, 64, 0.0f, 1 << 30, true, false, 3}, {900, 40, 1, 64, 64, 0.0f, 700, true, false, 5},
    };
    for (int threads : {1, 3})
        for (const Case& each : sizes)
            if (auto wrong = try_graph(each, 0.0f, threads, each.k_size % step == 0 && each.v_size % step == 0); !wrong.empty())
                return wrong;
    return try_graph({600, 3, 2, 64, 64}, 8.0f, 2, false);  // ALiBi
}

}  // namespace

int main() {
    cpu = ggml_backend_cpu_init();
    const Host its{ggml_backend_cpu_get_extra_buffer_types, ggml_barrier, ggml_threadpool_chunk_set,
                   ggml_threadpool_chunk_add, ggml_backend_buffer_init, ggml_backend_buft_is_host,
                   ggml_tensor_overhead, ggml_type_name, ggml_type_size, ggml_blck_size,
                   ggml_op_name, ggml_backend_dev_backend_reg, ggml_compute_forward_flash_attn_ext,
                   ggml_get_type_traits, ggml_backend_get_device(cpu)};
    const char* reason = "";
    if (!specllama_kernels_attach(&its, &reason)) return puts(reason), 1;
    std::string wrong = specllama_kernels_self_test(nullptr);
    if (wrong.empty()) wrong = try_all();
    ggml_backend_free(cpu);
    puts(wrong.c_str());
    return wrong.empty() ? 0 : 1;
}
