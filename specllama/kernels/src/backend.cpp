// The buffer type of packed weights, as one of the CPU's extra buffer types.
//
// llama.cpp then loads every weight that `supports_op` accepts through `set_tensor`, which packs it, and computes its
// products with `compute_forward`, inside the CPU's own graph and thread pool: no copies between devices, and no
// threads of ours.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

#include "ggml_private.h"
#include "path.h"

namespace speck {
namespace {

constexpr size_t alignment = 64;
// Settings of the models that a thread loads; several threads may load at once.
thread_local int pack_threads = 1;  // 0: their weights are not packed
thread_local bool coarse_heads = false;  // they are drafts, see `Head`
thread_local bool is_mapped = false;  // their files are mapped
std::atomic<bool> attends{false};  // attention is ours, from the first packed weight on
std::atomic<int64_t> n_packed{0};  // weights, so far
constexpr int columns_at_once = 64;  // their activations stay in the second-level cache
constexpr size_t chunk_bytes = 96 * 1024;  // of weights that a thread takes at once
constexpr int most_rows = 16;  // side by side in a packed block, of any instruction set
constexpr size_t single_thread_bytes = 1 << 20;  // packing less is not worth a thread
constexpr size_t huge_page = 2 << 20;
constexpr int coarse_activations = 32;  // in a block of a column of `Path::coarse`

Host host;
const Path* path;
const Type* type_of[GGML_TYPE_COUNT];

size_t rounded(size_t size) { return (size + alignment - 1) / alignment * alignment; }

const Type* packable(const ggml_tensor* weight) {
    const Type* type = (unsigned)weight->type < GGML_TYPE_COUNT ? type_of[weight->type] : nullptr;
    const bool fits = type && weight->ne[0] > 0 && weight->ne[0] % type->block == 0 && weight->ne[1] > 0 &&
                      weight->ne[2] > 0 && weight->ne[3] == 1 &&
                      weight->nb[1] == type->file_bytes * (weight->ne[0] / type->block) &&
                      weight->nb[2] == weight->nb[1] * weight->ne[1];
    return fits ? type : nullptr;
}

// Groups of rows of one matrix that are packed side by side; the last may be filled up with rows of zeros.
int64_t groups_of(const ggml_tensor* weight) { return (weight->ne[1] + path->rows - 1) / path->rows; }

size_t packed_size(const Type& type, const ggml_tensor* weight) {
    return type.packed_bytes * (weight->ne[0] / type.block) * groups_of(weight) * weight->ne[2];
}

// ---- the buffer

ggml_backend_buffer_type* buffer_type();

// A coarse copy of a draft's head, the matrix that makes logits. A draft reads this copy, and of the head itself only
// the rows whose logits can be among the highest: see `Product::compute_head`.
struct Head {
    // Coarse logits so many deviations below the highest are taken as they are. 162 rows of the default draft: at
    // temperature 1 its law then changes by a total variation of 0.014 (top-k 40: 0.003), for 4.6 % of the weights.
    static constexpr double margin = 6.0;

    const void* weights;  // where the tensor's data lies
    char* packed;
    double spread;  // of the difference between a weight and its copy: the root of the mean square

    static bool pays(const ggml_tensor* tensor) {
        return coarse_heads && (!strcmp(tensor->name, "output.weight") || !strcmp(tensor->name, "token_embd.weight")) &&
               tensor->ne[0] % path->coarse.block == 0 && tensor->ne[2] == 1 && (size_t)tensor->ne[1] >= least_rows &&
               3 * bytes(tensor) < 2 * packed_size(*packable(tensor), tensor);
    }
    static size_t bytes(const ggml_tensor* tensor) { return packed_size(path->coarse, tensor); }
    static constexpr size_t least_rows = 4096;  // fewer are read in no time
};

struct Buffer {
    void* data;
    Head head{};

    ~Buffer() {
        free(data);
        free(head.packed);
    }
};

Buffer* of(ggml_backend_buffer_t buffer) { return (Buffer*)buffer->context; }

// The head that `weight` is, or null.
const Head* head_of(const ggml_tensor* weight) {
    const Head& head = of(weight->buffer)->head;
    return head.packed && head.weights == weight->data ? &head : nullptr;
}

void free_buffer(ggml_backend_buffer_t buffer) { delete of(buffer); }
void* get_base(ggml_backend_buffer_t buffer) { return of(buffer)->data; }
void clear(ggml_backend_buffer_t buffer, uint8_t value) { memset(of(buffer)->data, value, buffer->size); }

void* allocated(size_t size) {
    void* data;
    if (posix_memalign(&data, size < huge_page ? alignment : huge_page, std::max<size_t>(size, 1))) return nullptr;
#ifdef MADV_HUGEPAGE  // passes are 2 to 3 % shorter; without room for huge pages the kernel takes small ones
    if (size >= huge_page) madvise(data, size, MADV_HUGEPAGE);
#endif
    return data;
}

// Calls work(first, last) for parts of [0, n), in so many threads.
template <class Work> void share_out(int64_t n, int threads, const Work& work) {
    std::vector<std::thread> others;
    for (int i = 1; i < threads; i++) {
        try {
            others.emplace_back(work, n * i / threads, n * (i + 1) / threads);
        } catch (...) {  // no thread can be started
            work(n * i / threads, n * (i + 1) / threads);
        }
    }
    work(0, n / threads);
    for (auto& thread : others) thread.join();
}

void copy_coarsely(ggml_tensor* tensor, const char* data, int threads) {
    Head& head = of(tensor->buffer)->head;
    free(head.packed);
    head.packed = (char*)allocated(Head::bytes(tensor));
    if (!head.packed) return;
    const int64_t n = tensor->ne[0], blocks = n / path->coarse.block;
    const auto to_float = host.type_traits(tensor->type)->to_float;
    std::vector<double> lost(groups_of(tensor));
    share_out(groups_of(tensor), threads, [&](int64_t first, int64_t last) {
        std::vector<float> rows(n * path->rows);
        for (int64_t g = first; g < last; g++)
            for (int64_t r = 0; r < path->rows; r++) {
                const int64_t row = g * path->rows + r;
                float* to = &rows[n * r];
                if (row >= tensor->ne[1]) std::fill(to, to + n, 0.0f);
                else if (to_float) to_float(data + row * tensor->nb[1], to, n);
                else memcpy(to, data + row * tensor->nb[1], n * sizeof *to);
                if (r + 1 == path->rows)
                    lost[g] = path->pack_coarse(rows.data(), (int)blocks, head.packed + g * blocks * path->coarse.packed_bytes);
            }
    });
    head.weights = tensor->data;
    head.spread = std::sqrt(std::accumulate(lost.begin(), lost.end(), 0.0) / ((double)n * tensor->ne[1]));
    if (std::isfinite(head.spread)) return;
    free(head.packed);  // a weight is no number, so nothing is known of the error
    head.packed = nullptr;
}

#ifdef MADV_DONTNEED
// The pages that lie wholly in the data.
void advise_pages(const void* data, size_t size, int advice) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), end = ((uintptr_t)data + size) / page * page;
    const uintptr_t begin = ((uintptr_t)data + page - 1) / page * page;
    if (begin < end) madvise((void*)begin, end - begin, advice);
}
#endif

void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
    const Type* type = packable(tensor);
    if (!type) {  // a tensor that is no matrix of ours stays as it is
        memcpy((char*)tensor->data + offset, data, size);
        return;
    }
    if (offset != 0 || size != tensor->nb[2] * tensor->ne[2]) {
        fprintf(stderr, "specllama: %s is set in parts, which packed weights cannot be\n", tensor->name);
        abort();
    }
    const int blocks = (int)(tensor->ne[0] / type->block);
    const size_t row_bytes = tensor->nb[1];
    const int64_t groups = groups_of(tensor) * tensor->ne[2];
    const auto pack = [&](int64_t first, int64_t last) {
        for (int64_t g = first; g < last; g++) {
            const int64_t matrix = g / groups_of(tensor), row = g % groups_of(tensor) * path->rows;
            const char* rows = (const char*)data + matrix * tensor->nb[2] + row * row_bytes;
            std::vector<char> filled;
            if (const int64_t n = tensor->ne[1] - row; n < path->rows) {
                filled.resize(row_bytes * path->rows);
                memcpy(filled.data(), rows, n * row_bytes);
                rows = filled.data();
            }
            type->pack(rows, row_bytes, blocks, (char*)tensor->data + g * blocks * type->packed_bytes);
        }
    };
#ifdef MADV_NOHUGEPAGE  // a huge page would be mapped again, whole, when one of the tensor's neighbours is read
    if (is_mapped) advise_pages(data, size, MADV_NOHUGEPAGE);
#endif
    const int threads = size < single_thread_bytes ? 1 : std::max(pack_threads, 1);
    share_out(groups, threads, pack);
    if (Head::pays(tensor)) copy_coarsely(tensor, (const char*)data, threads);
#ifdef MADV_DONTNEED  // the pages of a mapped file leave this process; they stay in the system's cache
    if (is_mapped) advise_pages(data, size, MADV_DONTNEED);
#endif
    n_packed++;
    attends = true;
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void* data = allocated(size);
    if (!data) return nullptr;
    ggml_backend_buffer_i iface{};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.set_tensor = set_tensor;
    iface.clear = clear;
    return host.buffer_init(buft, iface, new Buffer{data}, size);
}

size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
    const Type* type = packable(tensor);
    return type ? packed_size(*type, tensor) : tensor->nb[3] * tensor->ne[3];
}

// ---- the product

// The columns of a product in the order in which they are computed: those of one expert side by side (MUL_MAT_ID), or all
// as they are (MUL_MAT).
struct Columns {
    const ggml_tensor* op;
    int count;
    int matrices;  // experts, or one
    int32_t* start = nullptr;  // of the columns of each expert, and their end
    int32_t* from = nullptr;   // where a column lies in input and output: token * slots + slot

    static size_t bytes(const ggml_tensor* op) {
        return op->op == GGML_OP_MUL_MAT_ID ? (op->src[0]->ne[2] + 2 + of(op)) * sizeof(int32_t) : 0;
    }
    static int of(const ggml_tensor* op) { return (int)(op->ne[1] * op->ne[2] * op->ne[3]); }

    // `room`: `bytes` of memory.
    Columns(const ggml_tensor* op, void* room) : op(op), count(of(op)), matrices((int)op->src[0]->ne[2]) {
        if (op->op != GGML_OP_MUL_MAT_ID) return;
        start = (int32_t*)room;
        from = start + matrices + 2;
        memset(start, 0, (matrices + 2) * sizeof *start);
        for (int c = 0; c < count; c++) start[expert(c) + 2]++;
        for (int m = 2; m < matrices + 2; m++) start[m] += start[m - 1];
        for (int c = 0; c < count; c++) from[start[expert(c) + 1]++] = c;
    }

    int expert(int c) const {
        const ggml_tensor* ids = op->src[2];
        return *(const int32_t*)((const char*)ids->data + c % ids->ne[0] * ids->nb[0] + c / ids->ne[0] * ids->nb[1]);
    }
    const float* input(int i) const {
        const ggml_tensor* t = op->src[1];
        const int64_t c = from ? from[i] : i, slots = op->ne[1], plane = c / slots;
        return (const float*)((const char*)t->data + c % slots % t->ne[1] * t->nb[1] + plane % t->ne[2] * t->nb[2] +
                              plane / t->ne[2] * t->nb[3]);
    }
    float* output(int i) const { return (float*)((char*)op->data + (from ? from[i] : i) * op->nb[1]); }
    int first(int matrix) const { return start ? start[matrix] : 0; }
    int last(int matrix) const { return start ? start[matrix + 1] : count; }
};

struct Product : ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor* op, size_t& size) override {
        const Type& type = *packable(op->src[0]);
        size = rounded(type.column_bytes * (op->src[0]->ne[0] / type.block) * Columns::of(op)) +
               rounded(Columns::bytes(op)) * n_threads + alignment;
        if (head_of(op->src[0]))
            size += rounded(coarse_bytes(op->src[0]) * Columns::of(op)) + Columns::of(op) * n_threads * sizeof(float);
        return true;
    }

    // Of a column.
    static size_t coarse_bytes(const ggml_tensor* weight) {
        return path->coarse.column_bytes * (weight->ne[0] / coarse_activations);
    }

    // Blocks of all columns, shared out evenly over the threads.
    static void quantize(const ggml_compute_params* params, const Columns& columns, const Type& type, int blocks, char* y) {
        const int64_t all = (int64_t)blocks * columns.count;
        int64_t at = all * params->ith / params->nth;
        const int64_t end = all * (params->ith + 1) / params->nth;
        while (at < end) {
            const int64_t c = at / blocks;
            const int first = (int)(at % blocks), last = (int)std::min<int64_t>(blocks, first + end - at);
            type.quantize(columns.input((int)c), first, last, y + c * blocks * type.column_bytes);
            at += last - first;
        }
    }

    bool compute_forward(ggml_compute_params* params, ggml_tensor* op) override {
        const ggml_tensor* weight = op->src[0];
        const Type& type = *packable(weight);
        const int64_t groups = groups_of(weight);
        const int blocks = (int)(weight->ne[0] / type.block);
        char* room = (char*)rounded((size_t)params->wdata);
        const Columns columns(op, room + rounded(Columns::bytes(op)) * params->ith);
        char* y = room + rounded(Columns::bytes(op)) * params->nth;

        quantize(params, columns, type, blocks, y);
        if (const Head* head = head_of(weight)) {
            compute_head(params, *head, type, columns, y);
            return true;
        }
        if (params->ith == 0) host.chunk_set(params->threadpool, params->nth);
        host.barrier(params->threadpool);

        int used = 0;
        for (int m = 0; m < columns.matrices; m++) used += columns.first(m) < columns.last(m);
        const size_t group_bytes = type.packed_bytes * blocks;
        const int64_t fair = std::max<int64_t>(groups * used / (params->nth * 4), 1);
        const int64_t chunk = std::clamp<int64_t>(chunk_bytes / group_bytes, 1, std::min(fair, groups));
        const int64_t chunks = (groups + chunk - 1) / chunk;  // of a matrix
        int64_t next = params->ith;
        for (int m = 0, before = 0; m < columns.matrices; m++) {
            if (columns.first(m) == columns.last(m)) continue;
            for (; next < before + chunks; next = host.chunk_add(params->threadpool, 1)) {
                const int64_t first = (next - before) * chunk, last = std::min(first + chunk, groups);
                for (int c = columns.first(m); c < columns.last(m); c += columns_at_once)
                    for (int64_t g = first; g < last; g++) {
                        const int n = std::min(columns_at_once, columns.last(m) - c);
                        const size_t rows = std::min<int64_t>(path->rows, weight->ne[1] - g * path->rows);
                        float out[columns_at_once * most_rows];  // the last group is filled up
                        type.tiles((const char*)weight->data + (m * groups + g) * group_bytes, blocks, n,
                                   y + (size_t)c * blocks * type.column_bytes, blocks, out, path->rows);
                        for (int i = 0; i < n; i++)
                            memcpy(columns.output(c + i) + g * path->rows, out + i * path->rows, rows * sizeof(float));
                    }
            }
            before += chunks;
        }
        return true;
    }

    // Logits of a draft. Coarse and exact logits differ by about spread * |column|. Groups of rows with a coarse logit of
    // less than `margin` such deviations below the highest are computed again from the weights. A group's numbers depend
    // on its column alone.
    static void compute_head(ggml_compute_params* params, const Head& head, const Type& type, const Columns& columns, char* y) {
        const ggml_tensor* weight = columns.op->src[0];
        const int64_t groups = groups_of(weight);
        const int n = (int)weight->ne[0], count = columns.count, blocks = n / type.block, coarse_blocks = n / path->coarse.block;
        const Type& coarse = path->coarse;
        char* z = y + rounded(type.column_bytes * blocks * count);
        auto* highest = (float*)(z + rounded(coarse_bytes(weight) * count));  // of each thread and column
        quantize(params, columns, coarse, n / coarse_activations, z);
        if (params->ith == 0) host.chunk_set(params->threadpool, params->nth);
        host.barrier(params->threadpool);

        float* own = highest + (size_t)params->ith * count;
        std::fill(own, own + count, -INFINITY);
        const size_t coarse_group = coarse.packed_bytes * coarse_blocks;
        const int64_t chunk = std::clamp<int64_t>(chunk_bytes / coarse_group, 1, groups);
        for (int64_t first = params->ith * chunk; first < groups; first = host.chunk_add(params->threadpool, 1) * chunk) {
            const int64_t last = std::min(first + chunk, groups), row = first * path->rows;
            const int64_t rows = std::min(last * path->rows, weight->ne[1]) - row;
            for (int c = 0; c < count; c += columns_at_once)
                for (int64_t g = first; g < last; g++) {
                    float out[columns_at_once * most_rows];  // the last group is filled up
                    const int few = std::min(columns_at_once, count - c);
                    coarse.tiles(head.packed + g * coarse_group, coarse_blocks, few, z + c * coarse_bytes(weight),
                                 n / coarse_activations, out, path->rows);
                    const size_t size = std::min<int64_t>(path->rows, weight->ne[1] - g * path->rows) * sizeof(float);
                    for (int i = 0; i < few; i++)
                        memcpy(columns.output(c + i) + g * path->rows, out + i * path->rows, size);
                }
            for (int c = 0; c < count; c++) own[c] = std::max(own[c], path->highest(columns.output(c) + row, rows));
        }
        host.barrier(params->threadpool);

        const size_t group_bytes = type.packed_bytes * blocks;
        constexpr int at_once = 1024;  // groups
        for (int c = 0; c < count; c++) {
            double square = 0;
            float most = -INFINITY;
            for (int i = 0; i < n; i++) square += (double)columns.input(c)[i] * columns.input(c)[i];
            for (int i = 0; i < params->nth; i++) most = std::max(most, highest[(size_t)i * count + c]);
            const double deviation = head.spread * std::sqrt(square);
            const float least = (float)(most - Head::margin * deviation);
            const int64_t end = groups * (params->ith + 1) / params->nth;
            for (int64_t first = groups * params->ith / params->nth; first < end; first += at_once) {
                int high[at_once];
                float* logits = columns.output(c) + first * path->rows;
                const int64_t rows = std::min(std::min(first + at_once, end) * path->rows, weight->ne[1]) - first * path->rows;
                const int n_high = path->high_groups(logits, rows, least, high);
                for (int i = 0; i < n_high; i++) {
                    float out[most_rows];
                    type.tiles((const char*)weight->data + (first + high[i]) * group_bytes, blocks, 1,
                               y + (size_t)c * blocks * type.column_bytes, blocks, out, path->rows);
                    const int64_t at = (int64_t)high[i] * path->rows;
                    memcpy(logits + at, out, std::min<int64_t>(path->rows, rows - at) * sizeof(float));
                }
            }
        }
    }
};

// llama.cpp's attention has one version for a single row, one for few and one for many, and their sums differ.
struct Attend : ggml::cpu::tensor_traits {
    static constexpr int few_rows = 8;  // so few that threads share out the chunks

    static bool supported(const ggml_tensor* op) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        float bias;
        memcpy(&bias, (const float*)op->op_params + 1, sizeof bias);
        return !op->src[4] && bias == 0.0f && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 &&
               v->type == GGML_TYPE_F16 && op->type == GGML_TYPE_F32 && q->nb[0] == 4 && k->nb[0] == 2 && v->nb[0] == 2 &&
               q->ne[3] == 1 && k->ne[3] == 1 && k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 &&
               q->ne[0] % path->attention_step == 0 && v->ne[0] % path->attention_step == 0 && v->ne[0] == op->ne[0] &&
               (!mask || (mask->type == GGML_TYPE_F16 && mask->nb[0] == 2 && mask->ne[2] == 1 && mask->ne[3] == 1));
    }

    static Attention arguments(const ggml_tensor* op) {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        Attention a{};
        a.q = (const char*)q->data, a.k = (const char*)k->data, a.v = (const char*)v->data;
        a.q_row = q->nb[1], a.q_head = q->nb[2];
        a.k_position = k->nb[1], a.k_head = k->nb[2], a.v_position = v->nb[1], a.v_head = v->nb[2];
        if (mask) a.mask = (const char*)mask->data, a.mask_row = mask->nb[1];
        a.k_size = (int)k->ne[0], a.v_size = (int)v->ne[0];
        a.positions = (int)k->ne[1];
        a.shared = (int)(q->ne[2] / k->ne[2]);
        memcpy(&a.scale, op->op_params, sizeof a.scale);
        memcpy(&a.softcap, (const float*)op->op_params + 2, sizeof a.softcap);
        if (a.softcap != 0.0f) a.scale /= a.softcap;
        return a;
    }

    // Floats of one thread: `work`, and two states for each row and head at once.
    static size_t own_floats(const Attention& a) {
        const size_t states = (size_t)2 * attention_rows * a.shared * a.state_floats();
        return rounded((a.work_floats() + states) * sizeof(float)) / sizeof(float);
    }

    // Of what the rows see, and of their order for each thread.
    static size_t sight_floats(const ggml_tensor* op, int n_threads) {
        return rounded((Sight::size((int)op->src[1]->ne[1]) + n_threads) * op->src[0]->ne[1] * sizeof(int)) / sizeof(float);
    }

    // Rows of one sequence side by side: they share widened blocks. The later ones see the last position of the first.
    static void order_rows(const Attention& a, int n, int* rows) {
        std::iota(rows, rows + n, 0);
        for (int *at = rows, *end = rows + n; a.mask && at < end;) {
            const int last = a.sight(*at)[Sight::last];
            at = std::stable_partition(at + 1, end, [&](int row) { return last >= 0 && a.sees(row, last); });
        }
    }

    bool work_size(int n_threads, const ggml_tensor* op, size_t& size) override {
        if (!supported(op)) return false;
        const Attention a = arguments(op);
        size_t floats = own_floats(a) * n_threads + sight_floats(op, n_threads);
        if (op->src[0]->ne[1] <= few_rows)
            floats += op->src[0]->ne[1] * op->src[0]->ne[2] * Sight::chunks(a.positions) * a.state_floats();
        size = floats * sizeof(float) + alignment;
        return true;
    }

    bool compute_forward(ggml_compute_params* params, ggml_tensor* op) override {
        if (!supported(op)) {
            // Of llama.cpp's versions, the plain one computes a single row as it does several.
            ggml_compute_params plain = *params;
            plain.use_ref = op->src[0]->ne[1] == 1;
            host.flash_attention(&plain, op);
            return true;
        }
        size_t needed;
        // The graph was planned before attention was ours.
        if (!work_size(params->nth, op, needed) || params->wsize < needed) return false;
        Attention a = arguments(op);
        const int rows = (int)op->src[0]->ne[1], heads = (int)op->src[1]->ne[2], size = a.state_floats();
        float* shared = (float*)rounded((size_t)params->wdata);
        int* sights = (int*)shared;
        int* order = sights + ((size_t)Sight::size(a.positions) + params->ith) * rows;
        shared += sight_floats(op, params->nth);
        a.sights = sights;
        for (int r = params->ith; a.mask && r < rows; r += params->nth)
            path->look((const uint16_t*)(a.mask + r * a.mask_row), a.positions, sights + (size_t)r * Sight::size(a.positions));
        if (params->ith == 0) host.chunk_set(params->threadpool, params->nth);
        host.barrier(params->threadpool);
        order_rows(a, rows, order);
        const auto most_chunks = [&](int first, int n) {
            int most = 1;
            for (int r = first; r < first + n; r++) most = std::max(most, a.chunks(order[r]));
            return most;
        };
        float* own = shared + own_floats(a) * params->ith;
        float* states = own + a.work_floats();
        shared += own_floats(a) * params->nth;
        const auto out = [&](int row, int head) {
            return (float*)((char*)op->data + (head + (size_t)row * op->ne[1]) * op->nb[1]);
        };
        const bool by_chunks = rows <= few_rows && most_chunks(0, rows) > 1;
        // Smaller tiles where threads would have nothing to do.
        const int tile_rows = std::clamp(rows * heads / (2 * params->nth), 1, attention_rows);
        const int tiles = by_chunks ? most_chunks(0, rows) : (rows + tile_rows - 1) / tile_rows;
        for (int item = params->ith; item < heads * tiles; item = host.chunk_add(params->threadpool, 1)) {
            const int head = item % heads, tile = item / heads;
            if (by_chunks) {
                path->attend_chunk(a, head, order, rows, tile, shared + (size_t)item * rows * a.shared * size, own);
                continue;
            }
            const int first = tile * tile_rows, n = std::min(tile_rows, rows - first), n_chunks = most_chunks(first, n);
            float* next = states + (size_t)n * a.shared * size;
            for (int chunk = 0; chunk < n_chunks; chunk++) {
                path->attend_chunk(a, head, order + first, n, chunk, chunk ? next : states, own);
                for (int i = 0; chunk && i < n * a.shared; i++) path->join(a.v_size, states + i * size, next + i * size);
            }
            for (int i = 0; i < n * a.shared; i++)
                path->finish(a.v_size, states + i * size, out(order[first + i / a.shared], head * a.shared + i % a.shared));
        }
        if (!by_chunks) return true;
        host.barrier(params->threadpool);
        for (int i = params->ith; i < heads * rows * a.shared; i += params->nth) {
            const int head = i / (rows * a.shared), at = i % (rows * a.shared), row = order[at / a.shared];
            const auto state = [&](int chunk) {
                return shared + ((size_t)(chunk * heads + head) * rows * a.shared + at) * size;
            };
            for (int chunk = 1; chunk < a.chunks(row); chunk++) path->join(a.v_size, state(0), state(chunk));
            path->finish(a.v_size, state(0), out(row, head * a.shared + at % a.shared));
        }
        return true;
    }
};

struct Packed : ggml::cpu::extra_buffer_type {
    Product product;
    Attend attend;

    static bool is_ours(const ggml_tensor* op) {
        return (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && op->src[0]->buffer &&
               op->src[0]->buffer->buft == buffer_type();
    }

    bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) override {
        if (!is_ours(op)) return false;
        // While a model is loaded, llama.cpp asks with an empty buffer.
        if (!pack_threads && op->src[0]->buffer->size == 0) return false;
        const ggml_tensor* input = op->src[1];
        if (op->src[0]->view_src) return false;  // a part of a weight lies elsewhere once it is packed
        if (input->buffer && !host.buft_is_host(input->buffer->buft)) return false;
        const ggml_tensor* ids = op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr;
        if (ids ? ids->type != GGML_TYPE_I32 || (ids->buffer && !host.buft_is_host(ids->buffer->buft)) : op->src[0]->ne[2] != 1)
            return false;
        return packable(op->src[0]) && input->type == GGML_TYPE_F32 && input->nb[0] == sizeof(float) &&
               op->type == GGML_TYPE_F32;
    }

    ggml::cpu::tensor_traits* get_tensor_traits(const ggml_tensor* op) override {
        if (op->op == GGML_OP_FLASH_ATTN_EXT) return attends ? &attend : nullptr;
        return is_ours(op) && packable(op->src[0]) ? &product : nullptr;  // what is not packed is stored as in the file
    }
};

ggml_backend_buffer_type* buffer_type() {
    static Packed packed;
    static ggml_backend_buffer_type type{
        {[](ggml_backend_buffer_type_t) { return "SPECLLAMA"; }, alloc_buffer,
         [](ggml_backend_buffer_type_t) { return alignment; }, nullptr, get_alloc_size, nullptr},
        host.cpu,
        &packed,
    };
    return &type;
}

}  // namespace

}  // namespace speck

using namespace speck;

// Adds the buffer type to ggml-cpu's list, in front. Returns the name of the instruction set, or null with `*reason` set.
SPECK_EXPORT const char* specllama_kernels_attach(const Host* from, const char** reason) {
    *reason = nullptr;
    if (path) return path->name;
    host = *from;
    // The version is the first field of a registry.
    if (*(const int*)host.registry(host.cpu) != expected_backend_api) {
        *reason = "llama.cpp has another interface between its libraries";
        return nullptr;
    }
    // sizeof(ggml_object), which precedes each tensor, is 32.
    if (host.tensor_overhead() != 32 + sizeof(ggml_tensor) || strcmp(host.op_name(GGML_OP_MUL_MAT), "MUL_MAT") ||
        strcmp(host.op_name(GGML_OP_FLASH_ATTN_EXT), "FLASH_ATTN_EXT")) {
        *reason = "llama.cpp is of another version than the headers the kernels were compiled with";
        return nullptr;
    }
    const Path* chosen = path_of_this_cpu(nullptr);
    if (!chosen) {
        *reason = missing_instructions;
        return nullptr;
    }
    for (int t = 0; t < GGML_TYPE_COUNT; t++)
        for (int i = 0; i < chosen->n_types; i++)
            if (const char* name = host.type_name((ggml_type)t); name && !strcmp(name, chosen->types[i].name)) {
                const Type& type = chosen->types[i];
                const int64_t size = host.block_size((ggml_type)t);  // 1 for floating-point types
                if (type.block % size == 0 && host.type_size((ggml_type)t) * (type.block / size) == type.file_bytes)
                    type_of[t] = &type;
            }
    path = chosen;
    auto& all = host.extra_buffer_types();
    all.insert(all.begin(), buffer_type());
    return path->name;
}

// The weights of models that this thread loads from now on are packed by so many threads; 0: they are not packed.
// `drafts`: those models are drafts, whose logits may be coarse where they are low. `mapped`: the files are mapped.
SPECK_EXPORT void specllama_kernels_enable(int threads, int drafts, int mapped) {
    pack_threads = threads;
    coarse_heads = drafts != 0;
    is_mapped = mapped != 0;
}

// The types that are packed, each with its packed bytes as a share of the file's: "f16 1.0000 q4_K 1.0278 ...".
SPECK_EXPORT const char* specllama_kernels_types() {
    static std::string text;
    text.clear();
    for (const Type* type : type_of) {
        if (!type) continue;
        char share[16];
        snprintf(share, sizeof share, " %.4f ", (double)type->packed_bytes / (double)(path->rows * type->file_bytes));
        text += type->name + std::string(share);
    }
    return text.c_str();
}

// How many weights were packed so far.
SPECK_EXPORT int64_t specllama_kernels_packed() { return n_packed; }
