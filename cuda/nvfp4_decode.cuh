// NVFP4 times NVFP4 in the decode band: the quantiser of rows, and the kernels that take them from it or quantise their own.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

#include "decode_band.cuh"
#include "launch.cuh"
#include "nvfp4_rows.cuh"
#include "nvfp4_weights.cuh"

namespace nvfp4_decode {
namespace {

using namespace nvfp4;
using decode_band::Activations;
using decode_band::Form;
using decode_band::Tail;

// Vectors of a row, up to whole tiles.
__host__ __device__ inline int64_t vectors(int64_t k) {
    return (k + PackedWeights::TILE_K - 1) / PackedWeights::TILE_K * (PackedWeights::TILE_K / Vector::LENGTH);
}

// Where the quantiser leaves a vector: in the order of B fragments, so that a warp's load is 512 bytes in a row.
// [ceil(K / 64)][column tiles of 8 rows][2 halves of a block][8 rows][4 blocks of a tile].
__device__ __forceinline__ int64_t fragment_index(int64_t m, int64_t vector, int column_tiles) {
    const int64_t tile = vector / 8, t = vector / 2 % 4, half = vector % 2;
    return ((tile * column_tiles + m / 8) * 2 + half) * 32 + m % 8 * 4 + t;
}

// Half a block; the thread beside has the other half.
__device__ __forceinline__ uint4 quantise_half(const Vector &in, float global, float reciprocal) {
    uint32_t largest = in.largest_magnitude();
    largest = max(largest, __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1u), largest, 1));
    return BlockScale::of(largest, global, reciprocal).quantise(in);
}

// How the quantiser leaves a vector of row m: as BF16.
struct Bf16Fragments {
    __device__ static void store(uint4 *quantised, int64_t m, int64_t vector, int column_tiles, const Vector &in, float global,
                                 float reciprocal) {
        quantised[fragment_index(m, vector, column_tiles)] = quantise_half(in, global, reciprocal);
    }
};

// A row that a block looks through. A thread holds `Held` of its vectors, and reads those of a longer row again.
template <typename Rows, int Held>
struct WholeRow {
    const Rows &rows;
    const int64_t m;
    Vector factors[Held];
    uint4 held[Held];

    // Loads what no kernel writes.
    __device__ WholeRow(const Rows &rows, int64_t m) : rows(rows), m(m) {
#pragma unroll
        for (int i = 0; i < Held; i++) factors[i] = rows.factors(vector(i));
    }

    __device__ static int64_t vector(int i) { return threadIdx.x + i * static_cast<int64_t>(blockDim.x); }

    // Loads the row; its largest magnitude.
    __device__ uint32_t load() {
#pragma unroll
        for (int i = 0; i < Held; i++) held[i] = rows.bits(m, vector(i));
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < Held; i++) largest = max(largest, rows.balanced(held[i], factors[i]).largest_magnitude());
#pragma unroll 1
        for (int64_t v = vector(Held); v < vectors(rows.K); v += blockDim.x)
            largest = max(largest, rows.balanced(rows.bits(m, v), rows.factors(v)).largest_magnitude());
        return largest_of_block(largest);
    }

    // Gives the vectors `from` to `last`, which are whole tiles, to `use`.
    template <typename Use>
    __device__ void each(int64_t from, int64_t last, Use use) const {
#pragma unroll
        for (int i = 0; i < Held; i++)
            if (vector(i) >= from && vector(i) < last) use(vector(i), rows.balanced(held[i], factors[i]));
#pragma unroll 1
        for (int64_t v = vector(Held); v < last; v += blockDim.x)
            if (v >= from) use(v, rows.balanced(rows.bits(m, v), rows.factors(v)));
    }
};

constexpr int QUANTISERS = 4;  // blocks of a row
constexpr int64_t LONG_ROW = 8192;  // of which a thread of them has three vectors, not two
constexpr int MAX_QUANTISER_THREADS = 768;

// Quantises rows: to quantised, by fragments, and globals [M]. Each block looks through all of its row and quantises a part of it:
// that takes less time than to exchange what they find. Blocks past the end of the row are zeros.
template <typename Fragments, typename Rows, int Held>
__global__ void __launch_bounds__(MAX_QUANTISER_THREADS)
    quantise(const Rows rows, int column_tiles, uint4 *__restrict__ quantised, float *__restrict__ globals) {
    if constexpr (!decode_band::COMPILED<Fragments>) return;
    const int64_t m = blockIdx.x / QUANTISERS, tiles = vectors(rows.K) / 8;
    const int part = blockIdx.x % QUANTISERS;
    WholeRow<Rows, Held> row(rows, m);
    wait_for_previous();
    // Not before: the projection would start, and load weights, while the kernel that writes the rows still runs.
    let_next_start();
    const float global = rows.global(row.load()), reciprocal = __frcp_rn(global);
    if (part == 0 && threadIdx.x == 0) globals[m] = global;
    row.each(tiles * part / QUANTISERS * 8, tiles * (part + 1) / QUANTISERS * 8, [&](int64_t v, const Vector &in) {
        Fragments::store(quantised, m, v, column_tiles, in, global, reciprocal);
    });
}

// Rows that the quantiser has left.
template <int ColumnTiles>
struct QuantisedRows {
    const uint4 *x;        // as fragment_index says
    const float *globals;  // [M]

    __device__ static void open(int) {}
    __device__ void prepare(const decode_band::Shape &, int64_t, int64_t, char *) { wait_for_previous(); }

    using Cursor = const uint4 *;
    __device__ Cursor at(int m, int64_t k) const { return x + fragment_index(m, k / Vector::LENGTH, ColumnTiles); }
    __device__ static uint4 load(Cursor at, int tiles, int half, int64_t) {
        return load_cached(at + (tiles * ColumnTiles * 2 + half) * 32);
    }
    __device__ static void advance(Cursor &at, int tiles) { at += tiles * ColumnTiles * 64; }
    __device__ float global(int m) const { return globals[m]; }
};

// One row, quantised in the kernel that multiplies it: each block looks through all of it, and has its slice in shared memory. For one
// row that is less work than to wait for another kernel, or for the other blocks of a cluster.
template <typename Rows, int Held>
struct OwnRow {
    Rows rows;
    const uint4 *slice = nullptr;  // in shared memory, from vector `from` on
    int64_t from = 0;
    float scale = 0.0f;

    // Of shared memory: a slice is never longer than its share of K and one tile more.
    static int64_t bytes(int64_t k, int slices) {
        const int64_t tiles = vectors(k) / 8;
        return ((tiles + slices - 1) / slices + 1) * 8 * static_cast<int64_t>(sizeof(uint4));
    }

    __device__ static void open(int) {}

    __device__ void prepare(const decode_band::Shape &, int64_t begin, int64_t end, char *shared) {
        uint4 *own = reinterpret_cast<uint4 *>(shared);
        from = begin / Vector::LENGTH;
        WholeRow<Rows, Held> row(rows, 0);
        wait_for_previous();
        scale = rows.global(row.load());
        const float reciprocal = __frcp_rn(scale);
        row.each(from, end / Vector::LENGTH,
                 [&](int64_t v, const Vector &in) { own[v - from] = quantise_half(in, scale, reciprocal); });
        slice = own;
        __syncthreads();
    }

    using Cursor = const uint4 *;
    __device__ Cursor at(int, int64_t k) const { return slice + (k / Vector::LENGTH - from); }
    __device__ static uint4 load(Cursor at, int tiles, int half, int64_t) { return at[tiles * 8 + half]; }
    __device__ static void advance(Cursor &at, int tiles) { at += tiles * 8; }
    __device__ float global(int) const { return scale; }
};

struct Format : PackedWeights {
    float global;

    // A tile has four lines of codes and half a line of scales.
    __device__ void prefetch(int64_t tile, int line) const {
        prefetch_line(codes + tile * 32 + line * 8);
        if (line % 8 == 0) prefetch_line(scales + tile * 32 + line * 8);
    }

    struct Cursor {
        const uint4 *codes;
        const unsigned short *scales;
        decode_band::Index fragment;

        __device__ Weights load(int tiles) const {
            const uint32_t index = fragment.value + tiles * 32;
            return {load_streaming(codes + index), load_streaming(scales + index)};
        }
        __device__ void advance(int tiles) { fragment.advance(tiles * 32); }
    };
    __device__ Cursor at(int64_t tile, int lane) const { return {codes, scales, {static_cast<uint32_t>(tile * 32 + lane)}}; }

    template <int ColumnTiles>
    __device__ void multiply(float (&sum)[ColumnTiles][4], const Weights &w, const uint4 (&x)[ColumnTiles][2]) const {
        uint32_t a[4][4];
        fragments(w, a);
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int c = 0; c < ColumnTiles; c++) {
                const uint4 &part = x[c][step / 2];
                mma_m16n8k16(sum[c], a[step], step % 2 == 0 ? part.x : part.z, step % 2 == 0 ? part.y : part.w);
            }
    }

    // The two global scales are multiplied in FP64: a product of two small ones may be below FP32's range where the result is
    // not. One rounding to FP32.
    template <typename Rows>
    __device__ float finish(float total, const Rows &rows, int m, int64_t n) const {
        const double scale = static_cast<double>(global) * rows.global(m);
        const float scaled = static_cast<float>(scale * (static_cast<double>(total) * FRAGMENT_UNDO));
        return bias == nullptr ? scaled : __fadd_rn(scaled, bias[n]);
    }
};

// Into how many slices K is cut: more where the row groups alone give too few blocks to keep the memory bus busy. By them alone, so
// that the order of a sum does not depend on M.
inline int slices(int64_t groups) {
    return groups <= 64 ? 8 : groups <= 512 ? 4 : groups <= 1188 ? 2 : 1;
}

// A kernel for one row that quantises it itself.
template <typename Rows, int Held>
using OwnKernel = decode_band::Kernel<Format, OwnRow<Rows, Held>, typename Rows::Element>;

// Calls `use` with the fastest kernel for one row of those that were measured on an H200: few blocks of many features, one a
// multiprocessor, so that few quantise the row, and threads enough to hold it. With very many blocks even that is too much, and the
// quantiser does it.
template <typename Rows, typename Use>
cudaError_t with_own(int64_t groups, int64_t k, Use use) {
    const auto kernel = [&](auto form, auto held) {
        constexpr int HELD = decltype(held)::value;
        return use(OwnKernel<Rows, HELD>(
            decode_band::kernel<decltype(form), 1, Format, OwnRow<Rows, HELD>, typename Rows::Element>()));
    };
    using std::integral_constant;
    if (groups <= 64) return kernel(Form<2, 1, 3, Tail::Skip>(), integral_constant<int, 3>());
    if (groups <= 512)
        return k <= 6144 ? kernel(Form<3, 2, 1, Tail::Skip, Activations::Early, 0, 8>(), integral_constant<int, 2>())
                         : kernel(Form<6, 2, 1, Tail::Skip, Activations::Early, 0, 8>(), integral_constant<int, 3>());
    if (groups <= 792) return kernel(Form<6, 2, 1, Tail::Skip>(), integral_constant<int, 1>());
    if (groups <= 1056) return kernel(Form<8, 2, 1, Tail::Skip>(), integral_constant<int, 1>());
    return kernel(Form<6, 3, 1, Tail::Skip, Activations::Early, 0, 8>(), integral_constant<int, 1>());
}

// Whether that is the way for this call: its slice fits beside the sums.
template <typename Rows>
bool own_row(int64_t m, int64_t groups, int64_t k, int slices) {
    return m == 1 && groups <= 2376 && OwnRow<Rows, 1>::bytes(k, slices) <= decode_band::MAX_SHARED / 2;
}

template <typename Rows, int Held>
cudaError_t launch_own(const OwnKernel<Rows, Held> &kernel, const decode_band::Matrices<Format, typename Rows::Element> &matrices,
                       const Rows &rows, int slices, bool overlap, cudaStream_t stream) {
    OwnRow<Rows, Held> own;
    own.rows = rows;
    const int64_t bytes = OwnRow<Rows, Held>::bytes(rows.K, slices);
    return decode_band::launch(kernel, matrices, own, bytes, 1, rows.K, slices, overlap, stream);
}

// The fastest forms of those that were measured on an H200.
template <typename T>
auto choose_narrow(int64_t groups) {
    const auto kernel = [](auto form) { return decode_band::kernel<decltype(form), 1, Format, QuantisedRows<1>, T>(); };
    if (groups <= 64) return kernel(Form<1, 1, 3, Tail::Skip>());
    if (groups <= 512) return kernel(Form<3, 2, 1, Tail::Skip, Activations::Early, 0, 8>());
    return groups <= 2048 ? kernel(Form<3, 2, 1, Tail::Skip>()) : kernel(Form<2, 3, 1, Tail::Skip>());
}

template <typename T>
auto choose_wide(int64_t groups) {
    const auto kernel = [](auto form) { return decode_band::kernel<decltype(form), 2, Format, QuantisedRows<2>, T>(); };
    if (groups <= 64) return kernel(Form<1, 1, 3, Tail::Skip>());
    if (groups <= 960) return kernel(Form<3, 2, 1, Tail::Skip>());
    return groups <= 2048 ? kernel(Form<2, 3, 1, Tail::Skip, Activations::Late>())
                          : kernel(Form<1, 4, 1, Tail::Skip, Activations::Late>());
}

// What a call needs of scratch memory, aligned to 16 bytes: the quantised rows, then their globals.
struct Scratch {
    uint4 *rows;
    float *globals;

    static int64_t row_bytes(int64_t k) { return decode_band::MAX_ROWS * vectors(k) * static_cast<int64_t>(sizeof(uint4)); }
    static int64_t bytes(int64_t k) { return row_bytes(k) + decode_band::MAX_ROWS * static_cast<int64_t>(sizeof(float)); }
    Scratch(void *memory, int64_t k)
        : rows(static_cast<uint4 *>(memory)),
          globals(reinterpret_cast<float *>(static_cast<char *>(memory) + row_bytes(k))) {}
};

// Queues the quantiser.
template <typename Fragments, typename Rows>
cudaError_t launch_quantiser(const Rows &rows, const Scratch &scratch, int64_t m, int column_tiles, bool overlap,
                             cudaStream_t stream) {
    const bool is_long = rows.K > LONG_ROW;
    const int64_t threads = (vectors(rows.K) / (is_long ? 3 : 2) + 31) / 32 * 32;
    Launch launch = {};
    launch.blocks = m * QUANTISERS;
    launch.threads = static_cast<int>(threads < MAX_QUANTISER_THREADS ? threads : MAX_QUANTISER_THREADS);
    launch.overlap = overlap;
    launch.stream = stream;
    return launch_kernel(launch, is_long ? quantise<Fragments, Rows, 3> : quantise<Fragments, Rows, 2>, rows, column_tiles, scratch.rows,
                         scratch.globals);
}

// Loads it into the current context.
template <typename Fragments, typename Rows>
cudaError_t prepare_quantiser() {
    const cudaError_t error = decode_band::load(quantise<Fragments, Rows, 2>);
    return error != cudaSuccess ? error : decode_band::load(quantise<Fragments, Rows, 3>);
}

// Queues the quantiser, where there is one, and the projection of x [M, K] by all matrices, M up to 16, K a multiple of 16.
template <typename Rows>
cudaError_t launch(const decode_band::Matrices<Format, typename Rows::Element> &matrices, const Rows &rows, const Scratch &scratch,
                   int64_t m, bool clusters, bool overlap, cudaStream_t stream) {
    using T = typename Rows::Element;
    const int64_t k = rows.K, groups = decode_band::groups(matrices);
    const int cut = clusters ? slices(groups) : 1;
    if (own_row<Rows>(m, groups, k, cut))
        return with_own<Rows>(groups, k, [&](const auto &kernel) { return launch_own(kernel, matrices, rows, cut, overlap, stream); });
    const int column_tiles = m > decode_band::COLUMNS ? 2 : 1;
    const cudaError_t error = launch_quantiser<Bf16Fragments>(rows, scratch, m, column_tiles, overlap, stream);
    if (error != cudaSuccess) return error;
    if (column_tiles == 2) {
        const QuantisedRows<2> quantised = {scratch.rows, scratch.globals};
        return decode_band::launch(choose_wide<T>(groups), matrices, quantised, 0, m, k, cut, overlap, stream);
    }
    const QuantisedRows<1> quantised = {scratch.rows, scratch.globals};
    return decode_band::launch(choose_narrow<T>(groups), matrices, quantised, 0, m, k, cut, overlap, stream);
}

// Loads every kernel that `launch` may choose into the current context.
template <typename Rows>
cudaError_t prepare() {
    using T = typename Rows::Element;
    cudaError_t error = prepare_quantiser<Bf16Fragments, Rows>();
    for (int64_t groups : {1, 65, 513, 793, 961, 2049}) {
        for (int64_t k : {64, 16384})
            if (error == cudaSuccess)
                error = with_own<Rows>(groups, k, [](const auto &kernel) { return decode_band::load(kernel.function); });
        if (error == cudaSuccess) error = decode_band::load(choose_narrow<T>(groups).function);
        if (error == cudaSuccess) error = decode_band::load(choose_wide<T>(groups).function);
    }
    return error;
}

}  // namespace
}  // namespace nvfp4_decode
