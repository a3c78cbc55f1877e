// linear_proj/w8a16_static, decode band: M = 1 to 16 rows, row-invariant, each weight read once.
//
// One tensor-core form serves every M: 16 weight rows (a row group) on the row side of the MMA, tokens on its 8 columns, two
// column tiles for M > 8. A token's column meets the same weights in the same order whatever M is, so its bits do not
// depend on the other rows. K is split over the blocks of a cluster and the warps of a block, by N and K alone; each warp
// takes every fourth 32-wide tile of its slice, and the partial sums are added in the order of slice and warp.
//
// What differs between forms is only what does not show in the bits: how many row groups share one fetch of the
// activations, and how many loads a lane has under way.
#include "w8a16_static.h"

#include <cuda_runtime.h>

#include "cluster.cuh"
#include "convert.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace {

constexpr int WARPS = 4;    // warps of a block: how many ways it splits its slice of K
constexpr int GROUP = 16;   // output features of a row group
constexpr int TILE_K = 32;  // k of one 16-byte load of a lane: two MMA steps
constexpr int COLUMNS = 8;  // tokens of a column tile

// One tile of weights (16 bytes a lane: row g in x and y, row g + 8 in z and w) times 8 activations of each of the lane's
// columns. The weights are converted once for all column tiles.
template <int ColumnTiles>
__device__ __forceinline__ void multiply(float (&sum)[ColumnTiles][4], const uint4 &w, const uint4 (&x)[ColumnTiles]) {
    const uint32_t first[4] = {bf16x2_from_int8<0>(w.x), bf16x2_from_int8<0>(w.z), bf16x2_from_int8<1>(w.x),
                               bf16x2_from_int8<1>(w.z)};
    const uint32_t second[4] = {bf16x2_from_int8<0>(w.y), bf16x2_from_int8<0>(w.w), bf16x2_from_int8<1>(w.y),
                                bf16x2_from_int8<1>(w.w)};
#pragma unroll
    for (int c = 0; c < ColumnTiles; c++) {
        mma_m16n8k16(sum[c], first, x[c].x, x[c].y);
        mma_m16n8k16(sum[c], second, x[c].z, x[c].w);
    }
}

struct Operands {
    const uint4 *weights;  // [ceil(N / 16), ceil(K / 32), 32 lanes] of 16 INT8
    const float *scales;   // [N]
    const float *bias;     // [N], or null
    int64_t N, K;
    int M;
    int slice_bits;  // log2 of the blocks of a cluster
};

// x: [M, K]; y: [M, N]; M <= 8 * ColumnTiles. A cluster owns `Groups` row groups, its block of rank r the r-th slice of K.
template <typename T, int Groups, int InFlight, int ColumnTiles, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32) project(const Operands op, const T *__restrict__ x, T *__restrict__ y) {
    extern __shared__ float partial[];  // [slices * WARPS][M][16 * Groups / slices]
    cluster_arrive_relaxed();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int slices = 1 << op.slice_bits, rank = blockIdx.x & (slices - 1);
    const int64_t first_group = static_cast<int64_t>(blockIdx.x >> op.slice_bits) * Groups;
    const int64_t last_group = (op.N - 1) / GROUP;
    const int64_t tiles = (op.K + TILE_K - 1) / TILE_K;
    const int64_t begin = (tiles * rank) >> op.slice_bits, end = (tiles * (rank + 1)) >> op.slice_bits;

    const uint4 *rows[Groups];  // past the last group its weights are read again, and their sums left out
#pragma unroll
    for (int r = 0; r < Groups; r++) rows[r] = op.weights + min(first_group + r, last_group) * tiles * 32 + lane;

    float sum[Groups][ColumnTiles][4] = {};
    for (int64_t first = begin + warp; first < end; first += WARPS * InFlight) {
        uint4 w[InFlight][Groups], in[InFlight][ColumnTiles];
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int r = 0; r < Groups; r++) {
                const int64_t tile = first + i * WARPS;
                w[i][r] = tile < end ? load_streaming(rows[r] + tile * 32) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++) {
                const int64_t tile = first + i * WARPS;
                const int m = c * COLUMNS + g;
                in[i][c] = m < op.M && tile < end ? load_row8<Aligned>(x + m * op.K, tile * TILE_K + t * 8, op.K)
                                                  : make_uint4(0, 0, 0, 0);
            }
        // No load moves down past here, so all of a step are under way together.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int r = 0; r < Groups; r++) multiply<ColumnTiles>(sum[r], w[i][r], in[i]);
    }

    // Feature f is finished by rank f % slices. The lane holds tokens 2t and 2t + 1 of features g and g + 8.
    const int finishes = (GROUP * Groups) >> op.slice_bits;
    float *mine = partial + (rank * WARPS + warp) * op.M * finishes;
    cluster_wait();
#pragma unroll
    for (int r = 0; r < Groups; r++)
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int feature = r * GROUP + g + i / 2 * 8, m = c * COLUMNS + t * 2 + i % 2;
                float *local = mine + m * finishes + (feature >> op.slice_bits);
                if (m < op.M) store_to_rank(local, feature & (slices - 1), sum[r][c][i]);
            }
    cluster_sync();

    for (int index = threadIdx.x; index < finishes * op.M; index += WARPS * 32) {
        const int feature = index % finishes, m = index / finishes;
        const int64_t n = first_group * GROUP + (feature << op.slice_bits) + rank;
        if (n >= op.N) continue;
        float total = partial[index];
        for (int part = 1; part < slices * WARPS; part++)
            total = __fadd_rn(total, partial[part * op.M * finishes + index]);
        total = __fmul_rn(op.scales[n], total);
        if (op.bias != nullptr) total = __fadd_rn(total, op.bias[n]);
        y[m * op.N + n] = from_bf16<T>(__float2bfloat16_rn(total));
    }
}

template <typename T>
struct Form {
    void (*kernel)(Operands, const T *, T *);
    int groups;
};

template <typename T, int Groups, int InFlight, int ColumnTiles, bool Aligned = true>
Form<T> make_form() {
    return {project<T, Groups, InFlight, ColumnTiles, Aligned>, Groups};
}

// The fastest of the forms that were measured, by how many blocks there would be with one row group each. With few, one group
// gives every multiprocessor work; with more, two or three make one wave of resident blocks out of them; with very many, the
// last wave does not matter and one group has the least overhead. Two column tiles need more registers, so fewer loads.
// 792 blocks are six for each of an H200's 132 multiprocessors.
template <typename T>
Form<T> form(int64_t m, int64_t n, int64_t k, int slices) {
    const bool wide = m > COLUMNS;
    // Unaligned rows are rare and slow by nature: one form serves them.
    if (k % 8 != 0) return wide ? make_form<T, 1, 4, 2, false>() : make_form<T, 1, 4, 1, false>();
    const int64_t waves = (n + GROUP - 1) / GROUP * slices / 792;
    switch (waves) {
        case 0: return wide ? make_form<T, 1, 4, 2>() : make_form<T, 1, 6, 1>();
        case 1: return wide ? make_form<T, 2, 2, 2>() : make_form<T, 2, 4, 1>();
        case 2: return wide ? make_form<T, 3, 1, 2>() : make_form<T, 3, 2, 1>();
        default: return wide ? make_form<T, 3, 1, 2>() : make_form<T, 1, 4, 1>();
    }
}

template <typename T>
cudaError_t launch(const w8a16_static_call &call, cudaStream_t stream) {
    const Form<T> chosen = form<T>(call.m, call.n, call.k, call.slices);
    const int64_t features = GROUP * chosen.groups;
    const int64_t blocks = (call.n + features - 1) / features * call.slices;

    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(call.slices);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(WARPS * 32);
    config.dynamicSmemBytes = WARPS * features * call.m * sizeof(float);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = call.slices > 1 ? 1 : 0;

    const Operands op = {static_cast<const uint4 *>(call.weights), call.scales, call.bias, call.n, call.k,
                         static_cast<int>(call.m), __builtin_ctz(call.slices)};
    return cudaLaunchKernelEx(&config, chosen.kernel, op, static_cast<const T *>(call.x), static_cast<T *>(call.y));
}

template <typename T>
cudaError_t prepare() {
    for (int64_t m : {1, 16})
        for (int64_t k : {1, 8})
            for (int64_t waves : {0, 1, 2, 3}) {
                cudaFuncAttributes attributes;
                const Form<T> each = form<T>(m, waves * 792 * GROUP, k, 1);
                const cudaError_t error = cudaFuncGetAttributes(&attributes, each.kernel);
                if (error != cudaSuccess) return error;
            }
    return cudaSuccess;
}

}  // namespace

extern "C" int w8a16_static_prepare(void) {
    for (cudaError_t error : {prepare<float>(), prepare<__half>(), prepare<__nv_bfloat16>()})
        if (error != cudaSuccess) return error;
    return cudaSuccess;
}

extern "C" int w8a16_static_project(const w8a16_static_call *call, cudaStream_t stream) {
    const bool rows = call->m >= 1 && call->m <= 2 * COLUMNS;
    const bool slices = call->slices >= 1 && call->slices <= 8 && GROUP % call->slices == 0;
    if (!rows || !slices || call->n < 1 || call->k < 1) return cudaErrorInvalidValue;
    switch (call->dtype) {
        case W8A16_STATIC_F32: return launch<float>(*call, stream);
        case W8A16_STATIC_F16: return launch<__half>(*call, stream);
        case W8A16_STATIC_BF16: return launch<__nv_bfloat16>(*call, stream);
        default: return cudaErrorInvalidValue;
    }
}

extern "C" const char *w8a16_static_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
