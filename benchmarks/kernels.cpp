// Products of one type of weights after another, in every buffer type of the CPU, and what the machine could do.
//
// Usage: PROGRAM LIBRARY THREADS ROUNDS dense|experts. Compiled by kernels.py with the flags of one instruction set.
// Prints lines: "read GB/s", "multiply GMAC/s", "fma GMAC/s", then "TYPE BUFFER COLUMNS MS BYTES MULTIPLICATIONS".
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "ggml-alloc.h"
#include "ggml-cpu.h"
#include "ggml_private.h"
#include "simd.h"

std::vector<ggml_backend_buffer_type_t>& ggml_backend_cpu_get_extra_buffer_types();
extern "C" {
void ggml_barrier(ggml_threadpool*);
void ggml_threadpool_chunk_set(ggml_threadpool*, int);
int ggml_threadpool_chunk_add(ggml_threadpool*, int);
ggml_backend_buffer_t ggml_backend_buffer_init(ggml_backend_buffer_type_t, ggml_backend_buffer_i, void*, size_t);
void ggml_compute_forward_flash_attn_ext(const ggml_compute_params*, ggml_tensor*);
}

namespace {

using namespace speck::SPECK_ISA;

struct Shape {
    int row, rows, experts = 1, used = 1;  // numbers in a row; the experts that a token uses
};
using Layer = std::vector<Shape>;
// The matrices of a layer of Qwen2.5-1.5B, and the experts of a layer of OLMoE-1B-7B.
const Layer dense{{1536, 1536}, {1536, 256}, {1536, 256}, {1536, 1536}, {1536, 8960}, {1536, 8960}, {8960, 1536}};
const Layer mixture{{2048, 1024, 64, 8}, {2048, 1024, 64, 8}, {1024, 2048, 64, 8}};
constexpr int longest_row = 8960;
constexpr size_t streamed_bytes = 200'000'000;  // more than a cache holds
constexpr int widths[] = {1, 2, 4, 8, 16};
constexpr int widest = 16;

ggml_backend_t cpu;
int n_threads;

double seconds(const std::function<void()>& work) {
    const auto begun = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// The seconds of the fastest of five rounds in which every thread does `work`.
double fastest(const std::function<void(int)>& work) {
    double best = 1e9;
    for (int round = 0; round < 5; round++)
        best = std::min(best, seconds([&] {
            std::vector<std::thread> threads;
            for (int i = 0; i < n_threads; i++) threads.emplace_back(work, i);
            for (auto& thread : threads) thread.join();
        }));
    return best;
}

volatile float sink;

double read_rate() {
    std::vector<uint8_t> memory(streamed_bytes, 1);
    const size_t share = memory.size() / n_threads / 256 * 256;
    return share * n_threads / fastest([&](int i) {
        Simd::Int sums[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
        constexpr size_t size = sizeof(Simd::Int);
        const uint8_t* p = memory.data() + i * share;
        for (size_t at = 0; at < share; at += 4 * size)
            for (int j = 0; j < 4; j++) sums[j] = Simd::either(sums[j], Simd::load(p + at + j * size));
        float out[16];
        for (const auto& sum : sums) Simd::store(out, Simd::to_float(sum)), sink = out[0];
    });
}

// As in a tile of Q4_K without its loads, scales and unpacking: groups of 32 weights for as many columns as a tile has.
double multiply_rate() {
    constexpr int N = Simd::tile, groups = 1 << 20;
    return 32.0 * Simd::rows * N * groups * n_threads / fastest([&](int) {
        alignas(64) uint8_t weights[64];
        int8_t q[N][32];
        memset(weights, 5, sizeof weights), memset(q, 3, sizeof q);
        Simd::Float acc[N];
        for (auto& each : acc) each = Simd::zero_float();
        for (int g = 0; g < groups; g++) {
            asm volatile("" ::: "memory");
            const Simd::Int w = Simd::load(weights);
            Simd::Sum sum[N];
            for (int c = 0; c < N; c++) sum[c] = Simd::start(0);
            const auto add = [&](auto t) __attribute__((always_inline)) {
                for (int c = 0; c < N; c++) Simd::add<8, false, t>(sum[c], w, q[c] + 4 * t);
            };
            add(std::integral_constant<int, 0>{}), add(std::integral_constant<int, 1>{});
            add(std::integral_constant<int, 2>{}), add(std::integral_constant<int, 3>{});
            add(std::integral_constant<int, 4>{}), add(std::integral_constant<int, 5>{});
            add(std::integral_constant<int, 6>{}), add(std::integral_constant<int, 7>{});
            for (int c = 0; c < N; c++) acc[c] = Simd::add(acc[c], Simd::total(sum[c]));
        }
        float out[16];
        for (const auto& each : acc) Simd::store(out, each), sink = out[0];
    });
}

double fma_rate() {
    constexpr int N = 10, rounds = 1 << 22;  // enough to hide the latency
    return (double)Simd::rows * N * rounds * n_threads / fastest([&](int) {
        Simd::Float acc[N];
        for (auto& each : acc) each = Simd::zero_float();
        for (int i = 0; i < rounds; i++) {
            const Simd::Float w = Simd::all((float)i);
            for (auto& each : acc) each = Simd::fma(w, w, each);
        }
        float out[16];
        for (const auto& each : acc) Simd::store(out, each), sink = out[0];
    });
}

// The weights of several layers in one buffer type, multiplied with any number of columns.
struct Matrices {
    const Layer& layer;
    ggml_context* ctx;
    ggml_backend_buffer_t buffer;
    std::vector<ggml_tensor*> weights;
    std::vector<int32_t> chosen;  // experts of each column, by chance
    size_t bytes = 0;             // that one column needs
    double multiplications = 0;

    Matrices(const Layer& layer, ggml_type kind, ggml_backend_buffer_type_t buft, const std::vector<char>& block, int n_layers)
        : layer(layer) {
        ctx = ggml_init({(size_t)n_layers * 8 * ggml_tensor_overhead(), nullptr, true});
        for (int i = 0; i < n_layers; i++)
            for (const auto& its : layer) weights.push_back(ggml_new_tensor_3d(ctx, kind, its.row, its.rows, its.experts));
        buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
        std::vector<char> data;
        for (size_t i = 0; i < weights.size(); i++) {
            ggml_tensor* weight = weights[i];
            data.resize(ggml_nbytes(weight));
            for (size_t at = 0; at < data.size(); at += block.size())
                memcpy(data.data() + at, block.data(), std::min(block.size(), data.size() - at));
            ggml_backend_tensor_set(weight, data.data(), 0, data.size());
            const Shape& its = layer[i % layer.size()];
            bytes += data.size() / its.experts * its.used;
            multiplications += (double)ggml_nelements(weight) / its.experts * its.used;
        }
        std::mt19937 random(1);
        std::vector<int32_t> all(layer[0].experts);
        std::iota(all.begin(), all.end(), 0);
        for (int i = 0; i < widest; i++) {
            std::shuffle(all.begin(), all.end(), random);
            chosen.insert(chosen.end(), all.begin(), all.begin() + layer[0].used);
        }
    }
    ~Matrices() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    static ggml_tensor* product(ggml_context* work, ggml_tensor* weight, const Shape& its, int columns, void* x, void* ids) {
        ggml_tensor* input = ggml_new_tensor_3d(work, GGML_TYPE_F32, its.row, 1, columns);
        input->data = x;
        if (its.experts == 1) return ggml_mul_mat(work, weight, ggml_reshape_2d(work, input, its.row, columns));
        ggml_tensor* which = ggml_new_tensor_2d(work, GGML_TYPE_I32, its.used, columns);
        which->data = ids;
        return ggml_mul_mat_id(work, weight, input, which);
    }

    double run(int columns, float* x, float* y) {
        ggml_context* work = ggml_init({weights.size() * 4 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
        ggml_cgraph* graph = ggml_new_graph(work);
        for (size_t i = 0; i < weights.size(); i++) {
            ggml_tensor* out = product(work, weights[i], layer[i % layer.size()], columns, x, chosen.data());
            out->data = y;
            ggml_build_forward_expand(graph, out);
        }
        const double spent = seconds([&] { ggml_backend_graph_compute(cpu, graph); });
        ggml_free(work);
        return spent;
    }
};

bool holds(ggml_backend_buffer_type_t buft, ggml_type kind, const Shape& its) {
    ggml_context* ctx = ggml_init({8 * ggml_tensor_overhead(), nullptr, true});
    ggml_tensor* weight = ggml_new_tensor_3d(ctx, kind, its.row, 256, its.experts);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
    const bool yes = buffer && ggml_backend_supports_op(cpu, Matrices::product(ctx, weight, its, 512, nullptr, nullptr));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return yes;
}

void measure(ggml_type kind, const Layer& layer, int rounds) {
    std::vector<float> source(64 * longest_row);
    uint32_t state = 1;
    for (float& x : source) state = state * 1664525 + 1013904223, x = (float)(int32_t)state / 2147483648.0f;
    std::vector<char> block(ggml_row_size(kind, longest_row) * 64);
    ggml_quantize_chunk(kind, source.data(), block.data(), 0, 64, longest_row, nullptr);

    size_t layer_bytes = 0;
    for (const auto& its : layer) layer_bytes += ggml_row_size(kind, its.row) * its.rows * its.experts;
    auto bufts = ggml_backend_cpu_get_extra_buffer_types();
    bufts.push_back(ggml_backend_cpu_buffer_type());
    std::vector<std::unique_ptr<Matrices>> all;
    for (auto buft : bufts)
        if (holds(buft, kind, layer[0]))
            all.push_back(std::make_unique<Matrices>(layer, kind, buft, block, (int)(streamed_bytes / layer_bytes) + 1));
    std::vector<float> x((size_t)longest_row * widest), y((size_t)longest_row * widest * layer[0].used);
    for (size_t i = 0; i < x.size(); i++) x[i] = source[i % source.size()];
    for (int n : widths) {
        std::vector<std::vector<double>> times(all.size());
        for (int round = 0; round < rounds; round++)
            for (size_t i = 0; i < all.size(); i++) times[i].push_back(all[i]->run(n, x.data(), y.data()));
        for (size_t i = 0; i < all.size(); i++) {
            std::nth_element(times[i].begin(), times[i].begin() + rounds / 2, times[i].end());
            printf("%s %s %d %.4f %zu %.0f\n", ggml_type_name(kind), ggml_backend_buft_name(all[i]->buffer->buft), n,
                   1e3 * times[i][rounds / 2], all[i]->bytes, all[i]->multiplications);
        }
        fflush(stdout);
    }
}

}  // namespace

int main(int, char** argv) {
    n_threads = atoi(argv[2]);
    printf("read %.2f\n", read_rate() / 1e9);
    printf("multiply %.1f\n", multiply_rate() / 1e9);
    printf("fma %.1f\n", fma_rate() / 1e9);
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);  // a line for each weight
    cpu = ggml_backend_cpu_init();
    auto params = ggml_threadpool_params_default(n_threads);
    ggml_backend_cpu_set_threadpool(cpu, ggml_threadpool_new(&params));
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const speck::Host host{ggml_backend_cpu_get_extra_buffer_types, ggml_barrier, ggml_threadpool_chunk_set,
                           ggml_threadpool_chunk_add, ggml_backend_buffer_init, ggml_backend_buft_is_host,
                           ggml_tensor_overhead, ggml_type_name, ggml_type_size, ggml_blck_size, ggml_op_name,
                           ggml_backend_dev_backend_reg, ggml_compute_forward_flash_attn_ext,
                           ggml_get_type_traits, ggml_backend_get_device(cpu)};
    const char* reason = "";
    const auto attach = (const char* (*)(const speck::Host*, const char**))dlsym(library, "specllama_kernels_attach");
    if (!attach(&host, &reason)) return fprintf(stderr, "%s\n", reason), 1;
    ((void (*)(int, int, int))dlsym(library, "specllama_kernels_enable"))(n_threads, 0, 0);
    std::istringstream types(((const char* (*)())dlsym(library, "specllama_kernels_types"))());
    std::string name, share;
    while (types >> name >> share)
        for (int kind = 0; kind < GGML_TYPE_COUNT; kind++)
            if (const char* its = ggml_type_name((ggml_type)kind); its && name == its) measure((ggml_type)kind, strcmp(argv[4], "experts") ? dense : mixture, atoi(argv[3]));
    fflush(stdout);
    _exit(0);  // the threads wait for work
}
