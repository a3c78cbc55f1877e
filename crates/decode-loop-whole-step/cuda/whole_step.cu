// What follows the logits of a step: one cluster chooses the next token and says whether the text goes on.
#include "whole_step.h"

#include "cluster.cuh"
#include "launch.cuh"
#include "sampler.cuh"

namespace {

__global__ void begin(whole_step_request request, whole_step_state *state) {
    wait_for_previous();
    *state = {request, 0, 0};
}

// Appends a token, or why there is none, and goes on or ends. By one thread of the cluster, last. `before` is the state until now
// and `position` that of the token: what was read early is not waited for again.
__device__ void finish(const whole_step_choose_call &call, const whole_step_state &before, int64_t position, uint32_t why,
                       uint32_t id) {
    const uint64_t made = before.made + 1;
    call.state->made = made;
    *reinterpret_cast<volatile uint64_t *>(call.ring + (made - 1) % call.ring_len) =
        made << 32 | why << WHOLE_STEP_ID_BITS | id;
    const bool stops = call.stop[id / 32] >> id % 32 & 1;
    if (why != WHOLE_STEP_TOKEN || stops || made >= before.request.max_new) {
        call.state->over = 1;
        return;
    }
    *call.token = static_cast<int32_t>(id);
    *call.position = static_cast<int32_t>(position);
}

__device__ __forceinline__ uint32_t why_none(float largest) {
    if (isnan(largest)) return WHOLE_STEP_NAN;
    return largest > 0 ? WHOLE_STEP_INFINITE : WHOLE_STEP_MINUS_INFINITE;
}

__global__ void __launch_bounds__(sampler::THREADS) choose(whole_step_choose_call call) {
    __shared__ sampler::Shared shared;
    cluster_arrive_relaxed();
    wait_for_previous();
    let_next_start();
    const whole_step_state state = *call.state;
    const int64_t position = static_cast<int64_t>(*call.position) + call.advance;
    // The logits are on their way before it is known whether they are asked for.
    const sampler::Logits logits(call.logits, static_cast<int>(call.vocab));
    uint64_t best = logits.best();
    cluster_wait();
    if (state.over) return;

    const whole_step_request &request = state.request;
    best = sampler::cluster_reduce(shared, 0, best, sampler::Larger());
    const float largest = sampler::logit_of(best >> 32);
    const bool greedy = request.scale == 0;
    if (greedy || !isfinite(largest)) {
        const bool none = isnan(largest) || !greedy;
        const uint32_t id = ~static_cast<uint32_t>(best), why = none ? why_none(largest) : WHOLE_STEP_TOKEN;
        if (sampler::block() == 0 && threadIdx.x == 0) finish(call, state, position, why, id);
        return;
    }
    const sampler::Weight weight{largest, request.scale};
    uint32_t cut = 1;  // at or below the key of any logit
    if (request.top_k > 0 && request.top_k < call.vocab) {
        cut = sampler::find_cut(shared, logits, sampler::Count(), cut, request.top_k - 1);
    }
    if (request.top_p > 0) {
        const uint64_t mass = sampler::cluster_reduce(shared, 1, logits.mass(weight, cut), sampler::Sum());
        cut = sampler::find_cut(shared, logits, weight, cut, __umul64hi(request.top_p, mass));
    }
    const uint64_t total = sampler::cluster_reduce(shared, 2, logits.mass(weight, cut), sampler::Sum());
    uint64_t left = __umul64hi(sampler::philox(position, request.seed), total);
    if (!sampler::holds(shared, 2, left)) return;
    const int drawn = logits.find(weight, cut, left);
    if (drawn >= 0) finish(call, state, position, WHOLE_STEP_TOKEN, static_cast<uint32_t>(drawn));
}

}  // namespace

extern "C" int whole_step_prepare(void) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, begin);
    return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, choose);
}

extern "C" int whole_step_begin(const whole_step_request *request, whole_step_state *state, cudaStream_t stream) {
    return launch_kernel({.blocks = 1, .threads = 1, .stream = stream}, begin, *request, state);
}

extern "C" int whole_step_choose(const whole_step_choose_call *call, cudaStream_t stream) {
    if (call->vocab < 1 || call->vocab > 1 << WHOLE_STEP_ID_BITS || call->ring_len < 1) return cudaErrorInvalidValue;
    const int cluster = call->clusters != 0 ? sampler::MAX_BLOCKS : 1;
    return launch_kernel({.blocks = cluster,
                          .threads = sampler::THREADS,
                          .cluster = cluster,
                          .overlap = call->overlap != 0,
                          .stream = stream},
                         choose, *call);
}

extern "C" const char *whole_step_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
