// The decode band of a linear projection: M = 1 to 16 rows, row-invariant, each weight read once. One form for all weight
// formats that become BF16 in registers.
//
// One tensor-core form serves every M: 16 weight rows (a row group) on the row side of the MMA, tokens on its 8 columns, two
// column tiles for M > 8. A token's column meets the same weights in the same order whatever M is, so its bits do not
// depend on the other rows. K is split over the blocks of a cluster and the warps of a block, by N and K alone; each warp
// takes every fourth tile of its slice, and the partial sums are added in the order of slice and warp.
//
// What differs between the kernels of a format is only what does not show in the bits: how many row groups share one fetch of
// the activations, and how many loads a lane has under way.
//
// A `Format` is passed to the kernel by value and has
//   TILE_K                     k of one weight fragment of a lane; a multiple of 32
//   Weights                    that fragment, in registers
//   load(tile, lane)           the fragment of a lane in a tile of 16 rows by TILE_K; tiles of a row group lie one after another
//   multiply(sum, w, x)        products of one tile with the activations of each column tile, into FP32 sums
//   finish(total, m, n)        what becomes of the sum of row m and feature n
// Lane 4g + t holds weight rows g and g + 8 and the TILE_K / 4 activations of column g from t * TILE_K / 4 on. Which k a slot of
// the MMA stands for is free as long as both sides agree, so each lane's k are consecutive.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>

#include "cluster.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace decode_band {

constexpr int WARPS = 4;    // warps of a block: how many ways it splits its slice of K
constexpr int GROUP = 16;   // output features of a row group
constexpr int COLUMNS = 8;  // tokens of a column tile
constexpr int MAX_ROWS = 2 * COLUMNS;
constexpr int MAX_SLICES = 8;

struct Shape {
    int64_t N, K;
    int M;
    int slice_bits;  // log2 of the blocks of a cluster
};

// x: [M, K]; y: [M, N]; M <= 8 * ColumnTiles. A cluster owns `Groups` row groups, its block of rank r the r-th slice of K.
template <typename Format, typename In, typename Out, int Groups, int InFlight, int ColumnTiles, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
    project(const Format format, const Shape shape, const In *__restrict__ x, Out *__restrict__ y) {
    constexpr int LANE_K = Format::TILE_K / 4, VECTORS = LANE_K / 8;
    extern __shared__ float partial[];  // [slices * WARPS][M][16 * Groups / slices]
    cluster_arrive_relaxed();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int slices = 1 << shape.slice_bits, rank = blockIdx.x & (slices - 1);
    const int64_t first_group = static_cast<int64_t>(blockIdx.x >> shape.slice_bits) * Groups;
    const int64_t last_group = (shape.N - 1) / GROUP;
    const int64_t tiles = (shape.K + Format::TILE_K - 1) / Format::TILE_K;
    const int64_t begin = (tiles * rank) >> shape.slice_bits, end = (tiles * (rank + 1)) >> shape.slice_bits;

    int64_t rows[Groups];  // past the last group its weights are read again, and their sums left out
#pragma unroll
    for (int r = 0; r < Groups; r++) rows[r] = min(first_group + r, last_group) * tiles;

    float sum[Groups][ColumnTiles][4] = {};
    for (int64_t first = begin + warp; first < end; first += WARPS * InFlight) {
        typename Format::Weights w[InFlight][Groups];
        uint4 in[InFlight][ColumnTiles][VECTORS];
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int r = 0; r < Groups; r++) {
                const int64_t tile = first + i * WARPS;
                w[i][r] = tile < end ? format.load(rows[r] + tile, lane) : typename Format::Weights{};
            }
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    const int64_t tile = first + i * WARPS, k = tile * Format::TILE_K + t * LANE_K + v * 8;
                    const int m = c * COLUMNS + g;
                    in[i][c][v] = m < shape.M && tile < end ? load_row8<Aligned>(x + m * shape.K, k, shape.K)
                                                            : make_uint4(0, 0, 0, 0);
                }
        // No load moves down past here, so all of a step are under way together.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < InFlight; i++)
#pragma unroll
            for (int r = 0; r < Groups; r++) format.multiply(sum[r], w[i][r], in[i]);
    }

    // Feature f is finished by rank f % slices. The lane holds tokens 2t and 2t + 1 of features g and g + 8.
    const int finishes = (GROUP * Groups) >> shape.slice_bits;
    float *mine = partial + (rank * WARPS + warp) * shape.M * finishes;
    cluster_wait();
#pragma unroll
    for (int r = 0; r < Groups; r++)
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int feature = r * GROUP + g + i / 2 * 8, m = c * COLUMNS + t * 2 + i % 2;
                float *local = mine + m * finishes + (feature >> shape.slice_bits);
                if (m < shape.M) store_to_rank(local, feature & (slices - 1), sum[r][c][i]);
            }
    cluster_sync();

    for (int index = threadIdx.x; index < finishes * shape.M; index += WARPS * 32) {
        const int feature = index % finishes, m = index / finishes;
        const int64_t n = first_group * GROUP + (feature << shape.slice_bits) + rank;
        if (n >= shape.N) continue;
        float total = partial[index];
        for (int part = 1; part < slices * WARPS; part++)
            total = __fadd_rn(total, partial[part * shape.M * finishes + index]);
        y[m * shape.N + n] = from_bf16<Out>(__float2bfloat16_rn(format.finish(total, m, n)));
    }
}

template <typename Format, typename In, typename Out>
struct Kernel {
    void (*function)(Format, Shape, const In *, Out *);
    int groups;
};

template <typename Format, typename In, typename Out, int Groups, int InFlight, int ColumnTiles, bool Aligned = true>
Kernel<Format, In, Out> make_kernel() {
    return {project<Format, In, Out, Groups, InFlight, ColumnTiles, Aligned>, Groups};
}

// 792 blocks are six for each of an H200's 132 multiprocessors.
inline int64_t waves(int64_t n, int slices) { return (n + GROUP - 1) / GROUP * slices / 792; }

// The fastest of the kernels that were measured, by how many blocks there would be with one row group each. With few, one
// group gives every multiprocessor work; with more, two or three make one wave of resident blocks out of them; with very many,
// the last wave does not matter and one group has the least overhead. Two column tiles need more registers, so fewer loads.
template <typename Format, typename In, typename Out>
Kernel<Format, In, Out> choose(int64_t m, int64_t n, int64_t k, int slices) {
    const bool wide = m > COLUMNS;
    // Unaligned rows are rare and slow by nature: one kernel serves them.
    if (k % 8 != 0)
        return wide ? make_kernel<Format, In, Out, 1, 4, 2, false>() : make_kernel<Format, In, Out, 1, 4, 1, false>();
    switch (waves(n, slices)) {
        case 0: return wide ? make_kernel<Format, In, Out, 1, 4, 2>() : make_kernel<Format, In, Out, 1, 6, 1>();
        case 1: return wide ? make_kernel<Format, In, Out, 2, 2, 2>() : make_kernel<Format, In, Out, 2, 4, 1>();
        case 2: return wide ? make_kernel<Format, In, Out, 3, 1, 2>() : make_kernel<Format, In, Out, 3, 2, 1>();
        default: return wide ? make_kernel<Format, In, Out, 3, 1, 2>() : make_kernel<Format, In, Out, 1, 4, 1>();
    }
}

// Whether a call is one that the kernels take.
inline bool takes(int64_t m, int64_t n, int64_t k, int slices) {
    const bool cut = slices >= 1 && slices <= MAX_SLICES && (slices & (slices - 1)) == 0;
    return m >= 1 && m <= MAX_ROWS && n >= 1 && k >= 1 && cut;
}

template <typename Format, typename In, typename Out>
cudaError_t launch(const Format &format, const In *x, Out *y, int64_t m, int64_t n, int64_t k, int slices,
                   cudaStream_t stream) {
    const Kernel<Format, In, Out> kernel = choose<Format, In, Out>(m, n, k, slices);
    const int64_t features = GROUP * kernel.groups;
    const int64_t blocks = (n + features - 1) / features * slices;

    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(slices);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(WARPS * 32);
    config.dynamicSmemBytes = WARPS * features * m * sizeof(float);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = slices > 1 ? 1 : 0;
    const Shape shape = {n, k, static_cast<int>(m), __builtin_ctz(slices)};
    return cudaLaunchKernelEx(&config, kernel.function, format, shape, x, y);
}

// Loads every kernel that `choose` may choose into the current context.
template <typename Format, typename In, typename Out>
cudaError_t prepare() {
    for (int64_t m : {1, MAX_ROWS})
        for (int64_t k : {1, 8})
            for (int64_t wave : {0, 1, 2, 3}) {
                cudaFuncAttributes attributes;
                const auto kernel = choose<Format, In, Out>(m, wave * 792 * GROUP, k, 1);
                const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel.function);
                if (error != cudaSuccess) return error;
            }
    return cudaSuccess;
}

}  // namespace decode_band
