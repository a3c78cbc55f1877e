// Sparse experts in their plain form: the router's choice, and matrix-vector products over the chosen experts' weights.
//
// Every row goes by itself, so no row meets another. Rows that chose the same expert find its weights in L2: blocks that work on
// the same features of all rows run side by side.
#include "experts.h"

#include <cmath>

#include "bf16x8.cuh"
#include "launch.cuh"

namespace {

using bf16x8::Floats;
using bf16x8::WIDTH;

constexpr int WARP = 32;
constexpr int WARPS = 8;  // of a block; widths are multiples of it, so that every warp has a feature
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_TOP_K = 16;
constexpr unsigned ALL = 0xffffffffu;

__device__ float warp_max(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, lanes));
    return value;
}

// What orders probabilities as they do, and all NaN as one: at least 1, so that 0 is less than any. It is kept invertible.
__device__ uint32_t key_of(float probability) { return (isnan(probability) ? 0x7fffffffu : __float_as_uint(probability)) + 1; }
__device__ float probability_of(uint32_t key) { return __uint_as_float(key - 1); }

constexpr int ROUTED_ROWS = 4;  // of a block: one a warp

// A warp has one row; a lane the experts lane, 32 + lane, ...
template <int PerLane>
__global__ void __launch_bounds__(ROUTED_ROWS *WARP) route(qwen3_5_route_call call) {
    let_next_start();
    wait_for_previous();
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * ROUTED_ROWS + threadIdx.x / WARP;
    if (row >= call.rows) return;

    float logits[PerLane];
    float largest = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
        const int id = lane + i * WARP;
        logits[i] = id < call.experts ? call.logits[row * call.experts + id] : -INFINITY;
        largest = fmaxf(largest, logits[i]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < PerLane; i++) {
        logits[i] = expf(logits[i] - largest);
        sum += logits[i];
    }
    sum = bf16x8::warp_sum(sum);
    uint32_t keys[PerLane];
#pragma unroll
    for (int i = 0; i < PerLane; i++) keys[i] = lane + i * WARP < call.experts ? key_of(logits[i] / sum) : 0;

    // Lane s keeps the expert of slot s.
    int chosen = 0;
    float probability = 0.0f, total = 0.0f;
    for (int slot = 0; slot < call.top_k; slot++) {
        uint32_t best = 0, id = UINT32_MAX;
#pragma unroll
        for (int i = 0; i < PerLane; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(ALL, best);
#pragma unroll
        for (int i = PerLane - 1; i >= 0; i--)
            if (keys[i] == best) id = lane + i * WARP;
        id = __reduce_min_sync(ALL, id);
#pragma unroll
        for (int i = 0; i < PerLane; i++)
            if (id == lane + i * WARP) keys[i] = 0;
        total += probability_of(best);
        if (lane == slot) {
            chosen = static_cast<int>(id);
            probability = probability_of(best);
        }
    }
    if (lane >= call.top_k) return;
    call.ids[row * call.top_k + lane] = chosen;
    call.weights[row * call.top_k + lane] = probability / total;
}

// Adds the products of eight weights and eight activations, in their order.
__device__ float dot(const uint4 &weights, const Floats &x, float sum) {
    const Floats w = bf16x8::unpack(weights);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum = fmaf(w.value[i], x.value[i], sum);
    return sum;
}

constexpr int GATE_UP_LOADS = 4;  // a lane has under way of each of the two rows of weights

// A warp has one feature of one slot of one row: two rows of the bank.
__global__ void __launch_bounds__(WARPS *WARP, 4) gate_up(qwen3_5_experts_gate_up_call call) {
    // In this order: see qwen3_5_experts_down_call.
    wait_for_previous();
    let_next_start();
    const uint32_t slots = static_cast<uint32_t>(call.rows * call.top_k);
    const uint32_t slot = blockIdx.x % slots;
    const int64_t row = slot / static_cast<uint32_t>(call.top_k);
    const int64_t feature = static_cast<int64_t>(blockIdx.x / slots) * WARPS + threadIdx.x / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP, vectors = call.hidden / WIDTH;
    const int64_t expert = call.ids[slot];
    float gate = 0.0f, up = 0.0f;
    if (expert >= 0 && expert < call.experts) {
        const uint4 *x = static_cast<const uint4 *>(call.x) + row * vectors;
        const uint4 *gates = static_cast<const uint4 *>(call.bank) + (expert * 2 * call.intermediate + feature) * vectors;
        const uint4 *ups = gates + static_cast<int64_t>(call.intermediate) * vectors;
        for (int first = lane; first < vectors; first += GATE_UP_LOADS * WARP) {
            uint4 gate_bits[GATE_UP_LOADS], up_bits[GATE_UP_LOADS];
#pragma unroll
            for (int i = 0; i < GATE_UP_LOADS; i++) {
                const int at = first + i * WARP;
                if (at >= vectors) continue;
                gate_bits[i] = load_streaming(gates + at);
                up_bits[i] = load_streaming(ups + at);
            }
#pragma unroll
            for (int i = 0; i < GATE_UP_LOADS; i++) {
                const int at = first + i * WARP;
                if (at >= vectors) continue;
                const Floats eight = bf16x8::unpack(load_cached(x + at));
                gate = dot(gate_bits[i], eight, gate);
                up = dot(up_bits[i], eight, up);
            }
        }
    }
    gate = bf16x8::warp_sum(gate);
    up = bf16x8::warp_sum(up);
    if (lane == 0)
        static_cast<__nv_bfloat16 *>(call.act)[static_cast<int64_t>(slot) * call.intermediate + feature] =
            __float2bfloat16_rn(gate * bf16x8::sigmoid(gate) * up);
}

// A row's slots by rising expert: lane r has the r-th of them. Slots without an expert come last, as expert `experts` with
// weight 0.
struct Slot {
    int slot;
    int expert;
    float weight;
};

__device__ Slot sort_slots(const qwen3_5_experts_down_call &call, int64_t row, int lane) {
    int expert = call.experts;
    float weight = 0.0f;
    if (lane < call.top_k) {
        expert = __ldcg(call.ids + row * call.top_k + lane);
        weight = __ldcg(call.weights + row * call.top_k + lane);
    }
    if (expert < 0 || expert >= call.experts) {
        expert = call.experts;
        weight = 0.0f;
    }
    int rank = 0, slot = lane;  // of a lane past the slots: itself, which has no expert
    for (int other = 0; other < call.top_k; other++) {
        const int theirs = __shfl_sync(ALL, expert, other);
        rank += theirs < expert || (theirs == expert && other < lane);
    }
    for (int other = 0; other < call.top_k; other++)
        if (__shfl_sync(ALL, rank, other) == lane) slot = other;
    return {slot, __shfl_sync(ALL, expert, slot), __shfl_sync(ALL, weight, slot)};
}

constexpr int DOWN_LOADS = 8;  // of weights that a lane has under way
constexpr int DOWN_ACTS = 4;   // of activations

// A warp has one feature of one row: a row of weights of each of its experts, in pieces of Chunks x 32 vectors. The first of these
// are under way before the kernel before is over.
template <int Chunks>
__global__ void __launch_bounds__(WARPS *WARP, 3) down(qwen3_5_experts_down_call call) {
    constexpr int SLOTS = DOWN_LOADS / Chunks, SLOTS_OF_X = DOWN_ACTS / Chunks, PIECE = Chunks * WARP;
    let_next_start();
    const uint32_t rows = static_cast<uint32_t>(call.rows);
    const int64_t row = blockIdx.x % rows;
    const int64_t feature = static_cast<int64_t>(blockIdx.x / rows) * WARPS + threadIdx.x / WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP, vectors = call.intermediate / WIDTH;
    const int64_t expert_vectors = static_cast<int64_t>(call.hidden) * vectors;
    const uint4 *const bank = static_cast<const uint4 *>(call.bank) + feature * vectors;
    const uint4 *const act = static_cast<const uint4 *>(call.act) + row * call.top_k * vectors;
    const Slot sorted = sort_slots(call, row, lane);

    // A vector that is not there is zeros, of the weights and of the activations.
    const auto is_there = [&](int expert, int column) { return expert < call.experts && column < vectors; };
    uint4 weights[SLOTS][Chunks];
    const auto load = [&](int piece, int first) {
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            const int expert = __shfl_sync(ALL, sorted.expert, first + i);
            const uint4 *from = bank + expert * expert_vectors + piece + lane;
#pragma unroll
            for (int c = 0; c < Chunks; c++) {
                weights[i][c] = {};
                if (is_there(expert, piece + lane + c * WARP)) weights[i][c] = load_streaming(from + c * WARP);
            }
        }
    };
    load(0, 0);
    wait_for_previous();
    const int64_t at = row * call.hidden + feature;
    const float shared = __bfloat162float(static_cast<const __nv_bfloat16 *>(call.shared)[at]);
    const float shared_gate = call.shared_gate[row];

    float sum = 0.0f;
    for (int piece = 0; piece < vectors; piece += PIECE) {
        for (int first = 0; first < call.top_k; first += SLOTS) {
            if (piece > 0 || first > 0) load(piece, first);
#pragma unroll
            for (int of_x = 0; of_x < SLOTS; of_x += SLOTS_OF_X) {
                uint4 x[SLOTS_OF_X][Chunks];
#pragma unroll
                for (int i = 0; i < SLOTS_OF_X; i++) {
                    const int expert = __shfl_sync(ALL, sorted.expert, first + of_x + i);
                    const int slot = __shfl_sync(ALL, sorted.slot, first + of_x + i);
#pragma unroll
                    for (int c = 0; c < Chunks; c++) {
                        const int column = piece + lane + c * WARP;
                        x[i][c] = {};
                        if (is_there(expert, column)) x[i][c] = load_cached(act + slot * vectors + column);
                    }
                }
#pragma unroll
                for (int i = 0; i < SLOTS_OF_X; i++) {
                    float product = 0.0f;
#pragma unroll
                    for (int c = 0; c < Chunks; c++) product = dot(weights[of_x + i][c], bf16x8::unpack(x[i][c]), product);
                    sum += __shfl_sync(ALL, sorted.weight, first + of_x + i) * product;
                }
            }
        }
    }
    sum = bf16x8::warp_sum(sum);
    if (lane == 0)
        static_cast<__nv_bfloat16 *>(call.out)[at] = __float2bfloat16_rn(bf16x8::sigmoid(shared_gate) * shared + sum);
}

bool fits(int64_t rows, int32_t experts, int32_t top_k) {
    return rows >= 0 && experts > 0 && top_k > 0 && top_k <= MAX_TOP_K;
}

bool is_width(int32_t width) { return width > 0 && width % WIDTH == 0; }

template <typename Call>
cudaError_t launch(void (*kernel)(Call), const Call &call, int64_t blocks, int warps, cudaStream_t stream) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    const bool overlap = call.overlap != 0;
    return launch_kernel({.blocks = blocks, .threads = warps * WARP, .overlap = overlap, .stream = stream}, kernel, call);
}

using Route = void (*)(qwen3_5_route_call);
using Down = void (*)(qwen3_5_experts_down_call);

const Route ROUTES[] = {route<8>, route<MAX_EXPERTS / WARP>};
const Down DOWNS[] = {down<1>, down<2>};

}  // namespace

extern "C" int qwen3_5_experts_prepare(void) {
    const void *kernels[] = {
        reinterpret_cast<const void *>(ROUTES[0]), reinterpret_cast<const void *>(ROUTES[1]),
        reinterpret_cast<const void *>(gate_up),   reinterpret_cast<const void *>(DOWNS[0]),
        reinterpret_cast<const void *>(DOWNS[1]),
    };
    for (const void *kernel : kernels) {
        cudaFuncAttributes attributes;
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
    }
    return cudaSuccess;
}

extern "C" int qwen3_5_route(const qwen3_5_route_call *call, cudaStream_t stream) {
    if (!fits(call->rows, call->experts, call->top_k)) return cudaErrorInvalidValue;
    if (call->experts > MAX_EXPERTS || call->top_k > call->experts) return cudaErrorInvalidValue;
    const Route kernel = ROUTES[call->experts > 8 * WARP];
    return launch(kernel, *call, (call->rows + ROUTED_ROWS - 1) / ROUTED_ROWS, ROUTED_ROWS, stream);
}

extern "C" int qwen3_5_experts_gate_up(const qwen3_5_experts_gate_up_call *call, cudaStream_t stream) {
    if (!fits(call->rows, call->experts, call->top_k)) return cudaErrorInvalidValue;
    if (!is_width(call->hidden) || !is_width(call->intermediate)) return cudaErrorInvalidValue;
    return launch(gate_up, *call, call->rows * call->top_k * (call->intermediate / WARPS), WARPS, stream);
}

// The order of a sum depends on the width alone.
extern "C" int qwen3_5_experts_down(const qwen3_5_experts_down_call *call, cudaStream_t stream) {
    if (!fits(call->rows, call->experts, call->top_k)) return cudaErrorInvalidValue;
    if (!is_width(call->hidden) || !is_width(call->intermediate)) return cudaErrorInvalidValue;
    const Down kernel = DOWNS[call->intermediate > WIDTH * WARP];
    return launch(kernel, *call, call->rows * (call->hidden / WARPS), WARPS, stream);
}
