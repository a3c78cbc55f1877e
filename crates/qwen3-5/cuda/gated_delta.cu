// The mixer of a gated-delta layer: which kernel a shape takes.
#include "gated_delta.cuh"

#include <algorithm>

namespace {

using gated_delta::Call;

// Blocks of a cluster: as many as any device takes, and two where `st.async` is to find one.
constexpr int MIN_CLUSTER = 2, MAX_CLUSTER = 8;
constexpr int MAX_KEY_HEADS = 1 << 15;  // so that the channels of a row are counted in 32 bits
constexpr int COLUMNS = 64;             // of a block
constexpr int CHUNK = 64;               // rows of a chunk, where shared memory has room for them
constexpr int MAX_SHARED = 200 << 10;
// More than half of a multiprocessor's, for a block of its own each. Blocks start while the kernel before ends, and would go two by
// two to the multiprocessors that are free first.
constexpr int MIN_SHARED = 116 << 10;

struct Kernel {
    void (*function)(Call, int);
    int keys, threads;
    bool usual;
    int64_t (*bytes)(int, int);
};

template <int Keys, bool Usual>
constexpr Kernel kernel() {
    return {gated_delta::gated_delta<Keys, COLUMNS, Usual>, Keys, gated_delta::Block<Keys, COLUMNS, Usual>::THREADS, Usual,
            gated_delta::Shared<Keys, COLUMNS>::bytes};
}

// A shape takes the first one that fits.
const Kernel KERNELS[] = {kernel<128, true>(), kernel<64, false>(), kernel<128, false>(), kernel<256, false>()};

// The blocks of a key head.
int cluster(const Call &call) { return call.heads / call.key_heads * ((call.value_dim + COLUMNS - 1) / COLUMNS); }

bool fits(const Kernel &kernel, const Call &call) {
    if (!kernel.usual) return call.key_dim <= kernel.keys;
    return call.key_dim == kernel.keys && call.value_dim == gated_delta::USUAL_VALUES && call.taps == gated_delta::USUAL_TAPS;
}

bool takes(const Call &call) {
    const auto dim = [](int32_t dim) { return dim >= 16 && dim <= 256 && dim % 16 == 0; };
    const bool key_heads = call.key_heads >= 1 && call.key_heads <= MAX_KEY_HEADS;
    const bool heads = key_heads && call.heads >= 1 && call.heads % call.key_heads == 0;
    const int64_t written = call.keep ? call.rows : 1;
    return call.rows >= 1 && heads && dim(call.key_dim) && dim(call.value_dim) && call.taps >= 2 && call.taps <= 8 &&
           cluster(call) >= MIN_CLUSTER && cluster(call) <= MAX_CLUSTER && written <= call.slots &&
           (!call.keep || call.rows <= QWEN3_5_DELTA_KEPT_ROWS);
}

// Rows of a chunk: all of few.
int capacity(const Kernel &kernel, const Call &call) {
    if (call.rows <= QWEN3_5_DELTA_KEPT_ROWS) return static_cast<int>(call.rows);
    int rows = CHUNK;
    while (kernel.bytes(call.taps, rows) > MAX_SHARED) rows /= 2;
    return rows;
}

}  // namespace

extern "C" int qwen3_5_gated_delta_prepare(void) {
    for (const Kernel &kernel : KERNELS) {
        const cudaError_t error =
            cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED);
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

extern "C" int qwen3_5_gated_delta(const qwen3_5_gated_delta_call *call, cudaStream_t stream) {
    if (!takes(*call)) return cudaErrorInvalidValue;
    for (const Kernel &kernel : KERNELS) {
        if (!fits(kernel, *call)) continue;
        const int rows = capacity(kernel, *call);
        Launch launch = {};
        launch.cluster = cluster(*call);
        launch.blocks = static_cast<int64_t>(call->key_heads) * launch.cluster;
        launch.threads = kernel.threads;
        launch.shared = static_cast<size_t>(std::max<int64_t>(kernel.bytes(call->taps, rows), MIN_SHARED));
        launch.overlap = call->overlap != 0;
        launch.stream = stream;
        return launch_kernel(launch, kernel.function, *call, rows);
    }
    return cudaErrorInvalidValue;
}
