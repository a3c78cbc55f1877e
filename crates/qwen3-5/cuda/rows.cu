// Row by row: embedding, norms, rotation, activations. No row meets another.
//
// A call of a few rows is all latency: one load of everything, one reduction, one store. What no kernel writes is loaded before the
// wait for the kernel before.
#include "rows.h"

#include <cmath>

#include "bf16x8.cuh"
#include "launch.cuh"

namespace {

using bf16x8::Floats;
using bf16x8::WIDTH;

constexpr int WARP = 32;
constexpr int THREADS = 256;

// A block has one row.
__global__ void __launch_bounds__(THREADS) embed(qwen3_5_embed_call call) {
    let_next_start();
    wait_for_previous();
    const int64_t row = blockIdx.x;
    const int64_t token = call.tokens[row];
    const bool known = token >= 0 && token < call.vocab;
    const int64_t vectors = call.hidden / WIDTH;
    const uint4 nan = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
    for (int64_t i = threadIdx.x; i < vectors; i += THREADS)
        bf16x8::store(call.out, row * vectors + i, known ? bf16x8::load(call.table, token * vectors + i) : nan);
}

constexpr int NORM_THREADS = 1024;
constexpr int NORM_VECTORS = 3;  // the most a thread has

// The sum over a block, the same bits in every thread: of each warp, then of the warps in their order.
__device__ float block_sum(float value) {
    __shared__ float sums[NORM_THREADS / WARP];
    const int warps = static_cast<int>(blockDim.x) / WARP;
    value = bf16x8::warp_sum(value);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    return bf16x8::warp_sum(lane < warps ? sums[lane] : 0.0f);
}

__device__ float sum_of_squares(const Floats &in) {
    float sum = 0.0f;
#pragma unroll
    for (float value : in.value) sum += value * value;
    return sum;
}

__device__ void store_rounded(float *out, int64_t index, const Floats &in) { bf16x8::store_floats(out, index, in); }
__device__ void store_rounded(__nv_bfloat16 *out, int64_t index, const Floats &in) {
    bf16x8::store(out, index, bf16x8::pack(in));
}

// A block has one row, which stays in its registers. A thread has every blockDim.x-th vector, up to `Vectors` of them.
template <typename Out, int Vectors>
__global__ void __launch_bounds__(NORM_THREADS) norm(qwen3_5_norm_call call) {
    let_next_start();
    const int64_t row = blockIdx.x;
    const int vectors = static_cast<int>(call.hidden / WIDTH);
    const auto index = [](int i) { return static_cast<int>(threadIdx.x + i * blockDim.x); };
    Floats scale[Vectors];
#pragma unroll
    for (int i = 0; i < Vectors; i++)
        if (index(i) < vectors) scale[i] = bf16x8::load_floats(call.scale, index(i));
    wait_for_previous();

    uint4 bits[Vectors], update[Vectors];
#pragma unroll
    for (int i = 0; i < Vectors; i++) {
        if (index(i) >= vectors) continue;
        bits[i] = bf16x8::load(call.x, row * vectors + index(i));
        if (call.update != nullptr) update[i] = bf16x8::load(call.update, row * vectors + index(i));
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Vectors; i++) {
        if (index(i) >= vectors) continue;
        if (call.update != nullptr) {
            Floats added = bf16x8::unpack(bits[i]);
            const Floats more = bf16x8::unpack(update[i]);
#pragma unroll
            for (int j = 0; j < WIDTH; j++) added.value[j] += more.value[j];
            bits[i] = bf16x8::pack(added);
            bf16x8::store(call.x, row * vectors + index(i), bits[i]);
        }
        sum += sum_of_squares(bf16x8::unpack(bits[i]));
    }
    const float inverse = rsqrtf(block_sum(sum) / static_cast<float>(call.hidden) + call.eps);
#pragma unroll
    for (int i = 0; i < Vectors; i++) {
        if (index(i) >= vectors) continue;
        Floats out = bf16x8::unpack(bits[i]);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) out.value[j] = out.value[j] * inverse * scale[i].value[j];
        store_rounded(static_cast<Out *>(call.out), row * vectors + index(i), out);
    }
}

// A thread has one vector of all there are.
__global__ void __launch_bounds__(THREADS) silu_mul(qwen3_5_silu_mul_call call) {
    let_next_start();
    wait_for_previous();
    const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    if (index >= call.rows * call.width / WIDTH) return;
    const uint4 gate = bf16x8::load(call.gate, index), up = bf16x8::load(call.up, index);
    bf16x8::store(call.out, index, bf16x8::silu_mul(gate, up));
}

// A thread has one vector of all there are.
__global__ void __launch_bounds__(THREADS) output_gate(qwen3_5_output_gate_call call) {
    let_next_start();
    const int64_t vectors = call.head_dim / WIDTH;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
    // Vector v of head h of all rows is index h * vectors + v; its gate is in the second half of a head twice as long.
    const int64_t gate_index = index + (index / vectors + 1) * vectors;
    wait_for_previous();
    if (index >= call.rows * call.heads * vectors) return;
    const uint4 value_bits = bf16x8::load(call.values, index);
    const Floats gate = bf16x8::unpack(bf16x8::load(call.q_and_gate, gate_index));
    Floats out = bf16x8::unpack(value_bits);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out.value[i] *= bf16x8::sigmoid(gate.value[i]);
    bf16x8::store(call.out, index, bf16x8::pack(out));
}

constexpr int MAX_HEAD_DIM = 512;
constexpr int HEAD_VECTORS = MAX_HEAD_DIM / WIDTH / WARP;  // the most a lane has
constexpr int HEADS = 4;                                   // of a block: one a warp

// Rotates point i of a head: elements i and pairs + i.
//
// The angle is the host's own, bit for bit: a position below 2^24 is exact in FP32, and its product with the frequency is rounded
// once, here as there. FP32 is as much as the models were trained with; what counts is that both sides round the same angle.
// sincosf reduces angles of any size to FP32's precision, which its fast form does not.
__device__ void rotate(float *head, int i, int pairs, float position, float frequency) {
    float sin, cos;
    sincosf(__fmul_rn(position, frequency), &sin, &cos);
    const float x = head[i], y = head[pairs + i];
    head[i] = x * cos - y * sin;
    head[pairs + i] = y * cos + x * sin;
}

// A warp has one head of one row: queries first, then keys. Points of a head lie in different lanes, so it is kept in shared
// memory.
__global__ void __launch_bounds__(HEADS *WARP) qk_norm_rope(qwen3_5_qk_norm_rope_call call) {
    __shared__ float shared[HEADS][MAX_HEAD_DIM];
    let_next_start();
    const int warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int all_heads = call.heads + call.kv_heads, vectors = call.head_dim / WIDTH;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * HEADS + warp;
    const int64_t row = index / all_heads;
    const int head = static_cast<int>(index - row * all_heads), kv_head = head - call.heads;
    const bool is_query = kv_head < 0;
    float *const normed = shared[warp];

    Floats scale[HEAD_VECTORS];
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++)
        if (lane + i * WARP < vectors) scale[i] = bf16x8::load_floats(is_query ? call.q_scale : call.k_scale, lane + i * WARP);
    const float first_frequency = lane < call.pairs ? call.frequencies[lane] : 0.0f;
    wait_for_previous();
    if (row >= call.rows) return;

    const void *from = is_query ? call.q_and_gate : call.k;
    const int64_t from_head = is_query ? 2 * (row * call.heads + head) : row * call.kv_heads + kv_head;
    const float position = static_cast<float>(call.position[0] + row);
    Floats x[HEAD_VECTORS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++) {
        if (lane + i * WARP >= vectors) continue;
        x[i] = bf16x8::unpack(bf16x8::load(from, from_head * vectors + lane + i * WARP));
        sum += sum_of_squares(x[i]);
    }
    const float inverse = rsqrtf(bf16x8::warp_sum(sum) / static_cast<float>(call.head_dim) + call.eps);
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++) {
        if (lane + i * WARP >= vectors) continue;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) x[i].value[j] = x[i].value[j] * inverse * scale[i].value[j];
        bf16x8::store_floats(normed, lane + i * WARP, x[i]);
    }
    __syncwarp();
    if (lane < call.pairs) rotate(normed, lane, call.pairs, position, first_frequency);
    for (int i = lane + WARP; i < call.pairs; i += WARP) rotate(normed, i, call.pairs, position, call.frequencies[i]);
    __syncwarp();
    void *to = is_query ? call.q_out : call.k_out;
    const int64_t to_head = is_query ? row * call.heads + head : row * call.kv_heads + kv_head;
    for (int i = lane; i < vectors; i += WARP)
        bf16x8::store(to, to_head * vectors + i, bf16x8::pack(bf16x8::load_floats(normed, i)));
}

// `work` is how many blocks' or threads' worth there is; none is no launch.
template <typename Call>
cudaError_t launch(void (*kernel)(Call), const Call &call, int64_t work, int work_a_block, int threads, cudaStream_t stream) {
    if (work <= 0) return work == 0 ? cudaSuccess : cudaErrorInvalidValue;
    const int64_t blocks = (work + work_a_block - 1) / work_a_block;
    return launch_kernel({.blocks = blocks, .threads = threads, .overlap = call.overlap != 0, .stream = stream}, kernel, call);
}

bool fits(int64_t width, int64_t most) { return width > 0 && width <= most && width % WIDTH == 0; }

using Norm = void (*)(qwen3_5_norm_call);

template <typename Out>
Norm choose_norm(int vectors_a_thread) {
    switch (vectors_a_thread) {
        case 1: return norm<Out, 1>;
        case 2: return norm<Out, 2>;
        default: return norm<Out, NORM_VECTORS>;
    }
}

}  // namespace

extern "C" int qwen3_5_rows_prepare(void) {
    const void *kernels[] = {
        reinterpret_cast<const void *>(embed),
        reinterpret_cast<const void *>(silu_mul),
        reinterpret_cast<const void *>(output_gate),
        reinterpret_cast<const void *>(qk_norm_rope),
        reinterpret_cast<const void *>(choose_norm<float>(1)),
        reinterpret_cast<const void *>(choose_norm<float>(2)),
        reinterpret_cast<const void *>(choose_norm<float>(NORM_VECTORS)),
        reinterpret_cast<const void *>(choose_norm<__nv_bfloat16>(1)),
        reinterpret_cast<const void *>(choose_norm<__nv_bfloat16>(2)),
        reinterpret_cast<const void *>(choose_norm<__nv_bfloat16>(NORM_VECTORS)),
    };
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes;
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    }
    return cudaSuccess;
}

extern "C" int qwen3_5_embed(const qwen3_5_embed_call *call, cudaStream_t stream) {
    if (!fits(call->hidden, INT64_MAX)) return cudaErrorInvalidValue;
    return launch(embed, *call, call->rows, 1, THREADS, stream);
}

// The threads that a row is given depend on its width alone, and with them the order of its sum.
extern "C" int qwen3_5_norm(const qwen3_5_norm_call *call, cudaStream_t stream) {
    if (!fits(call->hidden, NORM_THREADS * NORM_VECTORS * WIDTH)) return cudaErrorInvalidValue;
    const int vectors = static_cast<int>(call->hidden / WIDTH);
    const int vectors_a_thread = vectors <= NORM_THREADS ? 1 : vectors <= 2 * NORM_THREADS ? 2 : NORM_VECTORS;
    const int warps = (vectors + vectors_a_thread * WARP - 1) / (vectors_a_thread * WARP);
    const Norm kernel = call->out_f32 ? choose_norm<float>(vectors_a_thread) : choose_norm<__nv_bfloat16>(vectors_a_thread);
    return launch(kernel, *call, call->rows, 1, warps * WARP, stream);
}

extern "C" int qwen3_5_silu_mul(const qwen3_5_silu_mul_call *call, cudaStream_t stream) {
    if (!fits(call->width, INT64_MAX)) return cudaErrorInvalidValue;
    return launch(silu_mul, *call, call->rows * call->width / WIDTH, THREADS, THREADS, stream);
}

extern "C" int qwen3_5_output_gate(const qwen3_5_output_gate_call *call, cudaStream_t stream) {
    if (!fits(call->head_dim, INT32_MAX) || call->heads <= 0) return cudaErrorInvalidValue;
    return launch(output_gate, *call, call->rows * call->heads * call->head_dim / WIDTH, THREADS, THREADS, stream);
}

extern "C" int qwen3_5_qk_norm_rope(const qwen3_5_qk_norm_rope_call *call, cudaStream_t stream) {
    if (!fits(call->head_dim, MAX_HEAD_DIM) || call->heads <= 0 || call->kv_heads <= 0) return cudaErrorInvalidValue;
    if (call->pairs < 0 || 2 * call->pairs > call->head_dim) return cudaErrorInvalidValue;
    return launch(qk_norm_rope, *call, call->rows * (call->heads + call->kv_heads), HEADS, HEADS * WARP, stream);
}

extern "C" const char *qwen3_5_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
