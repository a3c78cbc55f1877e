// linear_proj/nvfp4_balance: the kernels of NVFP4 weights and activations, with a balance of the input channels.
#include "nvfp4_balance.h"

#include "nvfp4.cuh"

extern "C" int nvfp4_balance_prepare(void) { return nvfp4::prepare(); }

extern "C" int nvfp4_balance_project(const nvfp4_balance_call *call, cudaStream_t stream) {
    nvfp4::Call shared = {};
    shared.codes = call->codes;
    shared.scales = call->scales;
    shared.bias = call->bias;
    shared.inverse_balance = call->inverse_balance;
    shared.x = call->x;
    shared.y = call->y;
    shared.quantised = call->quantised;
    shared.globals = call->globals;
    shared.global = call->global;
    shared.m = call->m;
    shared.n = call->n;
    shared.k = call->k;
    shared.dtype = call->dtype;
    shared.slices = call->slices;
    shared.single_level = call->single_level;
    return nvfp4::project(shared, stream);
}

extern "C" const char *nvfp4_balance_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
