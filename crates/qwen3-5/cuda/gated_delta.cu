// The mixer of a gated-delta layer: which kernel a shape takes.
#include "gated_delta.cuh"

namespace {

using gated_delta::Call;

constexpr int MAX_CLUSTER = 8;       // of any device
constexpr int PROMPT_ROWS = 32;      // of a chunk
constexpr int MAX_SHARED = 200 << 10;

struct Kernel {
    void (*function)(Call, int);
    int keys, columns, lanes, threads;
    int64_t (*bytes)(int, int);
};

template <int Keys, int Columns, int Lanes = 8>
constexpr Kernel kernel() {
    return {gated_delta::gated_delta<Keys, Columns, Lanes>, Keys, Columns, Lanes, gated_delta::Block<Keys, Columns, Lanes>::THREADS,
            gated_delta::Shared<Keys, Columns>::bytes};
}

// By keys, then by columns: a shape takes the first one that fits, so the largest cluster.
const Kernel KERNELS[] = {kernel<64, 32>(),  kernel<64, 64>(),  kernel<64, 128>(),  kernel<128, 32>(),
                          kernel<128, 64>(), kernel<128, 128>(), kernel<256, 32>(), kernel<256, 64>(), kernel<256, 128, 16>()};

int cluster(const Kernel &kernel, const Call &call) {
    return call.heads / call.key_heads * ((call.value_dim + kernel.columns - 1) / kernel.columns);
}

const Kernel *choose(const Call &call) {
    for (const Kernel &kernel : KERNELS)
        if (call.key_dim <= kernel.keys && cluster(kernel, call) <= MAX_CLUSTER) return &kernel;
    return nullptr;
}

bool takes(const Call &call) {
    const auto dim = [](int32_t dim) { return dim >= 16 && dim <= 256 && dim % 16 == 0; };
    const bool heads = call.key_heads >= 1 && call.heads >= 1 && call.heads % call.key_heads == 0;
    const int64_t written = call.keep ? call.rows : 1;
    return call.rows >= 1 && heads && dim(call.key_dim) && dim(call.value_dim) && call.taps >= 2 && call.taps <= 8 &&
           written <= call.slots && (!call.keep || call.rows <= QWEN3_5_DELTA_KEPT_ROWS);
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
    const Kernel *kernel = choose(*call);
    if (!kernel) return cudaErrorInvalidValue;
    int capacity = static_cast<int>(call->rows < PROMPT_ROWS ? call->rows : PROMPT_ROWS);
    if (capacity > 1) capacity = (capacity + 3) / 4 * 4;
    Launch launch = {};
    launch.cluster = cluster(*kernel, *call);
    launch.blocks = static_cast<int64_t>(call->key_heads) * launch.cluster;
    launch.threads = kernel->threads;
    launch.shared = static_cast<size_t>(kernel->bytes(call->taps, capacity));
    launch.overlap = call->overlap != 0;
    launch.stream = stream;
    return launch_kernel(launch, kernel->function, *call, capacity);
}
