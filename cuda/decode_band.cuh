// The decode band of a linear projection: M = 1 to 16 rows, row-invariant, each weight read once. One form for all weight
// formats, those that become BF16 in registers and those that the tensor core takes as they are.
//
// One tensor-core form serves every M: 16 weight rows (a row group) on the row side of the MMA, tokens on its 8 columns, two
// column tiles for M > 8. A token's column meets the same weights in the same order whatever M is, so its bits do not
// depend on the other rows. K is split over the blocks of a cluster into slices, and a slice over warps into four parts, by N and K
// alone: a part has every fourth tile of its slice. A sum adds the parts of a slice in order, then the slices in order.
//
// What differs between the kernels of a format is only what does not show in the bits: how many row groups share one fetch of
// the activations, in a warp's registers or in a block's cache, and how many loads a lane has under way.
//
// A launch projects the same rows by one matrix or by a few of one format, each with features and results of its own: a cluster
// belongs to one of them.
//
// A `Format` is passed to the kernel by value and has
//   TILE_K                     k of one weight fragment of a lane; a multiple of 32
//   Weights                    that fragment, in registers
//   prefetch(tile, line)       brings a line of 128 bytes of the fragments from a tile on into L2, for forms that look ahead
//   Cursor, at(tile, lane)     where a lane's fragments are, from a tile of 16 rows by TILE_K on; tiles of a row group lie one
//                              after another; load(tiles) loads the fragment so many tiles on, advance(tiles) moves
//   multiply(sum, w, x)        products of one tile with the activations of each column tile, into FP32 sums
//   finish(total, rows, m, n)  what becomes of the sum of row m and feature n
// and `Rows`, likewise, has
//   prepare(shape, begin, end, shared)  waits for the kernel before; activations begin to end of K will be asked for
//   open(blocks)               what one thread does before the blocks of a cluster know of each other
//   Cursor, at(m, k)           where a lane's activations are; load(at, tiles, vector, left) gives 16 bytes of them so many tiles
//                              on, eight numbers where they are BF16; advance(at, tiles) moves
// Lane 4g + t holds weight rows g and g + 8 and the TILE_K / 4 activations of column g from t * TILE_K / 4 on. Which k a slot of
// the MMA stands for is free as long as both sides agree, so each lane's k are consecutive. A column that no token has holds
// anything: its sums are left out.
//
// A format that the tensor core takes as it is has its k where the tensor core wants them: its rows translate what they are asked
// for. It says what it has in place of the usual `VECTORS`, and by `COMPILED` where there are its instructions.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <cuda_runtime.h>

#include "cluster.cuh"
#include "exchange.cuh"
#include "launch.cuh"
#include "load.cuh"
#include "mma.cuh"
#include "rows.cuh"

namespace decode_band {

constexpr int PARTS = 4;    // sums of a slice
constexpr int GROUP = 16;   // output features of a row group
constexpr int COLUMNS = 8;  // tokens of a column tile
constexpr int MAX_ROWS = 2 * COLUMNS;
constexpr int64_t MAX_TILES = (int64_t{1} << 32) / 32;  // of a matrix: a lane's fragments have 32-bit indexes

// Vectors of 16 bytes that a lane's activations of one tile take: where they are BF16, eight are in each.
template <typename Format>
constexpr int VECTORS = Format::TILE_K / 32;

// Whether the architecture being compiled for has the instructions of a format; where it lacks them the kernels are empty.
template <typename Format>
constexpr bool COMPILED = true;

// Whether a result becomes BF16 first, whatever type the rows have; where it does not, F32 rows get the FP32 sum as it is.
template <typename Format>
constexpr bool ROUNDED = true;

constexpr int MAX_MATRICES = 4;  // of a launch

// A matrix [N, K] of weights, and where the rows go that it makes.
template <typename Format, typename Out>
struct Matrix {
    Format format;
    Out *y;  // [M, N]
    int64_t N;
};

// The matrices of a launch: those past the last have clusters that no launch has.
template <typename Format, typename Out>
struct Matrices {
    Matrix<Format, Out> all[MAX_MATRICES];
    int count;
    int first[MAX_MATRICES];  // its first cluster
};

struct Shape {
    int64_t K;
    int M;
    int slice_bits;  // log2 of the blocks of a cluster
    int rows_bytes;  // of shared memory that the rows take
};

// Where a lane is in an array whose start the kernel was given: one register, where an address takes two. The assembly says
// nothing; it keeps the compiler from making an address of it that it then advances.
struct Index {
    uint32_t value;

    __device__ void advance(int by) {
        value += by;
        asm volatile("" : "+r"(value));
    }
};

// Rows in global memory, as they are. With `Whole`, K is a multiple of TILE_K and rows start on 16 bytes.
template <typename T, int TILE_K, bool Whole>
struct GlobalRows {
    const T *x;  // [M, K]
    int M;
    int64_t K;

    __device__ static void open(int) {}
    __device__ void prepare(const Shape &, int64_t, int64_t, char *) { wait_for_previous(); }

    using Cursor = const T *;
    // A token past the last is the first again.
    __device__ Cursor at(int m, int64_t k) const { return x + (m < M ? m : 0) * K + k; }
    // `left` activations are left of the row; zeros past its end.
    __device__ static uint4 load(Cursor at, int tiles, int vector, int64_t left) {
        return load_row8<Whole>(at + tiles * TILE_K + vector * 8, left);
    }
    __device__ static void advance(Cursor &at, int tiles) { at += tiles * TILE_K; }
};

// What a warp does with the tiles that its last step lacks: skipping them needs fewer registers, zeros for their activations no
// branches.
enum class Tail { Skip, Zero };

// When a warp loads activations: with the weights of the step, or, to need fewer registers, each tile's when its weights have come.
enum class Activations { Early, Late };

// What distinguishes the kernels of a format, and does not show in the bits. A block has PARTS * NWarps warps, each with Groups
// row groups; a step of a warp is InFlight tiles of each. MinBlocks is how many blocks a multiprocessor is to hold, or 0: then
// the assembler looks for few registers by itself, which it does not when told 1. Ahead is how many tiles of each row group are
// brought into L2 before the kernel before is over, past those of the first step.
template <int NWarps, int Groups, int InFlight, Tail Last, Activations When = Activations::Early, int MinBlocks = 0,
          int Ahead = 0>
struct Form {
    static constexpr int N_WARPS = NWarps, GROUPS = Groups, IN_FLIGHT = InFlight, MIN_BLOCKS = MinBlocks, AHEAD = Ahead;
    static constexpr int THREADS = PARTS * NWarps * 32, FEATURES = GROUP * NWarps * Groups, STEP = InFlight * PARTS;
    static constexpr bool ZERO = Last == Tail::Zero, LATE = When == Activations::Late;
    static_assert(Ahead * 4 <= PARTS * 32, "one line a lane");
    static_assert(!ZERO || !LATE, "a tile without activations is skipped");
};

// M <= 8 * ColumnTiles. A block's warps split its slice of K into parts and its features among the rest of them. A cluster owns
// the features of one block, its block of rank r the r-th slice of K.
template <typename Form, typename Format, typename Rows, typename Out, int ColumnTiles>
__global__ void __launch_bounds__(Form::THREADS, Form::MIN_BLOCKS)
    project(const __grid_constant__ Matrices<Format, Out> matrices, const Shape shape, Rows rows) {
    if constexpr (!COMPILED<Format>) return;
    constexpr int TILE_K = Format::TILE_K, LANE_K = TILE_K / 4;
    constexpr int GROUPS = Form::GROUPS, IN_FLIGHT = Form::IN_FLIGHT, FEATURES = Form::FEATURES;
    extern __shared__ __align__(16) char shared[];  // what `rows` wants, then sums
    __shared__ Exchange sums;
    let_next_start();
    const int slices = 1 << shape.slice_bits, rank = blockIdx.x & (slices - 1);
    if (threadIdx.x == 0) {
        sums.open(slices, FEATURES * shape.M);
        rows.open(slices);
    }
    cluster_arrive_relaxed();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS, n_warp = warp / PARTS;
    const int g = lane / 4, t = lane % 4;
    const int cluster = blockIdx.x >> shape.slice_bits;
    int which = 0;
#pragma unroll
    for (int i = 1; i < MAX_MATRICES; i++) which += cluster >= matrices.first[i];
    const Matrix<Format, Out> &matrix = matrices.all[which];
    const Format &format = matrix.format;
    const int64_t block_group = static_cast<int64_t>(cluster - matrices.first[which]) * (Form::N_WARPS * GROUPS);
    const int64_t last_group = (matrix.N - 1) / GROUP;
    const int64_t tiles = (shape.K + TILE_K - 1) / TILE_K;
    const int begin = static_cast<int>((tiles * rank) >> shape.slice_bits);
    const int end = static_cast<int>((tiles * (rank + 1)) >> shape.slice_bits);
    const int first = begin + part;

    typename Format::Cursor weights[GROUPS];  // past the last group its weights are read again, and their sums left out
#pragma unroll
    for (int r = 0; r < GROUPS; r++)
        weights[r] = format.at(min(block_group + n_warp * GROUPS + r, last_group) * tiles + first, lane);

    typename Format::Weights w[IN_FLIGHT][GROUPS] = {};  // a tile that the slice lacks leaves what was there
    const auto load_weights = [&](int tile) {
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
#pragma unroll
            for (int r = 0; r < GROUPS; r++) {
                if (tile + i * PARTS < end) w[i][r] = weights[r].load(i * PARTS);
            }
#pragma unroll
        for (int r = 0; r < GROUPS; r++) weights[r].advance(Form::STEP);
    };
    // Weights do not wait for the kernel before: the bus is busy while that one ends.
    load_weights(first);
    if constexpr (Form::AHEAD > 0) {
        constexpr int LINES = 4;  // of 128 bytes in a tile's fragments
        const int from = begin + Form::STEP, line = part * 32 + lane;
#pragma unroll 1
        for (int r = 0; r < GROUPS; r++) {
            const int64_t group = min(block_group + n_warp * GROUPS + r, last_group);
            if (line < min(Form::AHEAD, end - from) * LINES) format.prefetch(group * tiles + from, line);
        }
    }
    rows.prepare(shape, static_cast<int64_t>(begin) * TILE_K, static_cast<int64_t>(end) * TILE_K, shared);

    float sum[GROUPS][ColumnTiles][4] = {};
    typename Rows::Cursor x[ColumnTiles];
#pragma unroll
    for (int c = 0; c < ColumnTiles; c++)
        x[c] = rows.at(c * COLUMNS + g, static_cast<int64_t>(first) * TILE_K + t * LANE_K);

#pragma unroll 1
    for (int tile = first; tile < end; tile += Form::STEP) {
        uint4 in[IN_FLIGHT][ColumnTiles][VECTORS<Format>];
        const auto load_rows = [&](int i) {
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
                for (int v = 0; v < VECTORS<Format>; v++) {
                    const int64_t left = shape.K - static_cast<int64_t>(tile + i * PARTS) * TILE_K - t * LANE_K - v * 8;
                    in[i][c][v] = rows.load(x[c], i * PARTS, v, left);
                }
        };
        // A branch for a whole step, though it makes a second copy of the loads: nothing that waits for weights moves up past where
        // its arms meet, and zeros are written in the last step alone.
        if (!Form::LATE && tile + (IN_FLIGHT - 1) * PARTS < end) {
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) load_rows(i);
        } else if (!Form::LATE) {
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++) {
                if (tile + i * PARTS < end) load_rows(i);
                else if (Form::ZERO) memset(in[i], 0, sizeof(in[i]));
            }
        }
        // No load moves down past here, so all of a step are under way together.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            if (!Form::ZERO && tile + i * PARTS >= end) break;
            if (Form::LATE) load_rows(i);
#pragma unroll
            for (int r = 0; r < GROUPS; r++) format.multiply(sum[r], w[i][r], in[i]);
        }
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++) rows.advance(x[c], Form::STEP);
        load_weights(tile + Form::STEP);
    }

    // The block's sum of its slice, parts in order, goes to the block of the cluster that finishes the feature: each finishes
    // FEATURES / slices in a row. The lane holds tokens 2t and 2t + 1 of features g and g + 8.
    float *parts = reinterpret_cast<float *>(shared + shape.rows_bytes);  // [PARTS][M][FEATURES]
    float *whole = parts + PARTS * shape.M * FEATURES;                    // [slices][M][FEATURES / slices]
#pragma unroll
    for (int r = 0; r < GROUPS; r++)
#pragma unroll
        for (int c = 0; c < ColumnTiles; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int feature = (n_warp * GROUPS + r) * GROUP + g + i / 2 * 8, m = c * COLUMNS + t * 2 + i % 2;
                if (m < shape.M) parts[(part * shape.M + m) * FEATURES + feature] = sum[r][c][i];
            }
    __syncthreads();
    cluster_wait();
    const int finishes = FEATURES >> shape.slice_bits;  // a division by it is one by a constant
#pragma unroll 1
    for (unsigned index = threadIdx.x; index < static_cast<unsigned>(FEATURES * shape.M); index += Form::THREADS) {
        float total = parts[index];
#pragma unroll
        for (int p = 1; p < PARTS; p++) total = __fadd_rn(total, parts[p * shape.M * FEATURES + index]);
        const unsigned feature = index % FEATURES, m = index / FEATURES, owner = (feature << shape.slice_bits) / FEATURES;
        sums.send(slices, whole + (rank * shape.M + m) * finishes + feature - owner * finishes, owner, total);
    }
    sums.receive(slices);

    // Slices in order.
#pragma unroll 1
    for (unsigned index = threadIdx.x; index < static_cast<unsigned>(finishes * shape.M); index += Form::THREADS) {
        const unsigned m = (index << shape.slice_bits) / FEATURES, feature = (rank - m) * finishes + index;
        const int64_t n = block_group * GROUP + feature;
        if (n >= matrix.N) continue;
        float total = whole[index];
#pragma unroll 1
        for (int slice = 1; slice < slices; slice++)
            total = __fadd_rn(total, whole[slice * shape.M * finishes + index]);
        const float result = format.finish(total, rows, m, n);
        Out &y = matrix.y[m * matrix.N + n];
        if constexpr (ROUNDED<Format>) y = from_bf16<Out>(__float2bfloat16_rn(result));
        else y = from_float<Out>(result);
    }
}

// A kernel and what its launch must know of its form.
template <typename Format, typename Rows, typename Out>
struct Kernel {
    void (*function)(Matrices<Format, Out>, Shape, Rows);
    int threads, features, step;
};

template <typename Form, int ColumnTiles, typename Format, typename Rows, typename Out>
Kernel<Format, Rows, Out> kernel() {
    return {project<Form, Format, Rows, Out, ColumnTiles>, Form::THREADS, Form::FEATURES, Form::STEP};
}

// Whether a call is one that the kernels take.
inline bool takes(int64_t m, int64_t n, int64_t k) { return m >= 1 && m <= MAX_ROWS && n >= 1 && k >= 1; }

inline int64_t groups(int64_t n) { return (n + GROUP - 1) / GROUP; }

// Row groups of all matrices of a launch: what forms and slices are chosen by.
template <typename Format, typename Out>
int64_t groups(const Matrices<Format, Out> &matrices) {
    int64_t sum = 0;
    for (int i = 0; i < matrices.count; i++) sum += groups(matrices.all[i].N);
    return sum;
}

// Shared memory of at most what every architecture has.
constexpr int64_t MAX_SHARED = 96 << 10;

// Shared memory for a block that leaves a multiprocessor room for `most` of them and no more; at least what it is.
inline cudaError_t leave_room(int64_t most, int64_t *shared) {
    int device = 0, memory = 0, reserved = 0, limit = 0;
    cudaError_t error = cudaGetDevice(&device);
    const auto get = [&](int *value, cudaDeviceAttr what) {
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
    };
    get(&memory, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    get(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    get(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    constexpr int64_t UNIT = 128;  // in which shared memory is given out
    const int64_t wanted = (memory / (most + 1) - reserved) / UNIT * UNIT + UNIT;
    if (*shared < wanted) *shared = wanted < limit ? wanted : limit;
    return error;
}

// Keeps a multiprocessor from taking more blocks than its even share. Blocks that start while the kernel before still runs go
// wherever there is room, and a call would take as long as the multiprocessor that has the most of them. Where registers or
// threads leave no room for more, shared memory stays L1, for activations.
//
// In a short call, whose warps have all of their weights under way at once, it matters more that the next one's blocks start
// early: they get room for one beside the share, unless there are multiprocessors without a block.
template <typename Function>
cudaError_t share_evenly(Function *function, int threads, int64_t blocks, bool short_call, int64_t *shared) {
    int device = 0, multiprocessors = 1, room = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&room, function, threads, static_cast<size_t>(*shared));
    const int64_t share = (blocks + multiprocessors - 1) / multiprocessors, most = short_call && share > 1 ? share + 1 : share;
    return error != cudaSuccess || most >= room ? error : leave_room(most, shared);
}

// Gives each matrix its clusters; returns how many there are, or 0 where a matrix is too large for a lane's indexes.
template <typename Format, typename Out>
int64_t place(Matrices<Format, Out> &matrices, int features, int64_t k) {
    int64_t clusters = 0;
    for (int i = 0; i < MAX_MATRICES; i++) {
        matrices.first[i] = i < matrices.count ? static_cast<int>(clusters) : INT_MAX;
        if (i >= matrices.count) continue;
        const int64_t n = matrices.all[i].N;
        if (groups(n) * ((k + Format::TILE_K - 1) / Format::TILE_K) > MAX_TILES) return 0;
        clusters += (n + features - 1) / features;
    }
    return clusters;
}

// `rows_bytes` is what the rows take of shared memory.
template <typename Format, typename Rows, typename Out>
cudaError_t launch(const Kernel<Format, Rows, Out> &kernel, Matrices<Format, Out> matrices, const Rows &rows, int64_t rows_bytes,
                   int64_t m, int64_t k, int slices, bool overlap, cudaStream_t stream) {
    int64_t shared = rows_bytes + (PARTS + 1) * kernel.features * m * static_cast<int64_t>(sizeof(float));
    const int64_t blocks = place(matrices, kernel.features, k) * slices;
    if (shared > MAX_SHARED || blocks == 0) return cudaErrorInvalidValue;
    const bool short_call = (k + Format::TILE_K - 1) / Format::TILE_K <= static_cast<int64_t>(kernel.step) * slices;
    const cudaError_t error = share_evenly(kernel.function, kernel.threads, blocks, short_call, &shared);
    if (error != cudaSuccess) return error;
    Launch launch = {};
    launch.blocks = blocks;
    launch.threads = kernel.threads;
    launch.cluster = slices;
    launch.shared = static_cast<size_t>(shared);
    launch.overlap = overlap;
    launch.stream = stream;
    const Shape shape = {k, static_cast<int>(m), __builtin_ctz(slices), static_cast<int>(rows_bytes)};
    return launch_kernel(launch, kernel.function, matrices, shape, rows);
}

// Loads a kernel into the current context, and lets it have all of a block's shared memory.
template <typename Function>
cudaError_t load(Function *function) {
    int device = 0, most = 0;
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error == cudaSuccess) error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    const int dynamic = most - static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
}

}  // namespace decode_band
