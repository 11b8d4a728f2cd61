// The parts of ggml's interface between its libraries that its installed headers leave out.
//
// Written down from llama.cpp as llama-cpp-python 0.3.36 builds it (GGML_BACKEND_API_VERSION 2). `attach` refuses any
// other version, and a self-test in a child process has computed with it before it is used.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

constexpr int expected_backend_api = 2;

extern "C" {

struct ggml_backend_buffer_type_i {
    const char* (*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor*);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void* context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void* (*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor*);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor*, uint8_t, size_t, size_t);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor*, const void*, size_t, size_t);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor*, void*, size_t, size_t);
    void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor*, const void*, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer_t, const ggml_tensor*, void*, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor*, ggml_tensor*);
    void (*clear)(ggml_backend_buffer_t, uint8_t);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void* context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct ggml_threadpool;

struct ggml_compute_params {
    int ith, nth;  // this thread, and how many compute together
    size_t wsize;
    void* wdata;
    ggml_threadpool* threadpool;
    bool use_ref;  // the plain versions of operations that have several
};

}  // extern "C"

// ggml-cpu asks each of these, in order, for every operation of a graph. The destructors come first in its tables of
// virtual functions, so they are declared here though nothing calls them.
namespace ggml::cpu {

struct tensor_traits {
    virtual ~tensor_traits() = default;
    virtual bool work_size(int n_threads, const ggml_tensor* op, size_t& size) = 0;
    virtual bool compute_forward(ggml_compute_params* params, ggml_tensor* op) = 0;
};

struct extra_buffer_type {
    virtual ~extra_buffer_type() = default;
    virtual bool supports_op(ggml_backend_dev_t device, const ggml_tensor* op) = 0;
    virtual tensor_traits* get_tensor_traits(const ggml_tensor* op) = 0;
};

}  // namespace ggml::cpu

namespace speck {

// Functions of the loaded ggml libraries. They are passed in, so that this library is bound to no copy of them.
struct Host {
    std::vector<ggml_backend_buffer_type_t>& (*extra_buffer_types)();
    void (*barrier)(ggml_threadpool*);
    void (*chunk_set)(ggml_threadpool*, int);
    int (*chunk_add)(ggml_threadpool*, int);
    ggml_backend_buffer_t (*buffer_init)(ggml_backend_buffer_type_t, ggml_backend_buffer_i, void*, size_t);
    bool (*buft_is_host)(ggml_backend_buffer_type_t);
    size_t (*tensor_overhead)();
    const char* (*type_name)(ggml_type);
    size_t (*type_size)(ggml_type);
    int64_t (*block_size)(ggml_type);
    const char* (*op_name)(ggml_op);
    ggml_backend_reg_t (*registry)(ggml_backend_dev_t);
    void (*flash_attention)(const ggml_compute_params*, ggml_tensor*);
    const ggml_type_traits* (*type_traits)(ggml_type);
    ggml_backend_dev_t cpu;
};

}  // namespace speck
