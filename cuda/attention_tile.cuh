// What a block of the band does with one tile of positions: scores, weights, outputs.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "attention_combine.cuh"
#include "attention_elements.cuh"
#include "attention_layout.cuh"
#include "attention_products.cuh"

namespace attention::band {
namespace {

// A lane's place in tensor-core steps.
struct Lane {
    // The compiler has to know that a warp is of one team.
    int team = __shfl_sync(~0u, threadIdx.x / TEAM_THREADS, 0);
    int warp = threadIdx.x / 32 % WARPS;
    int g = threadIdx.x % 32 / 4;
    int t = threadIdx.x % 4;
};

// Waits for the threads of a team, or of all that multiply.
__device__ __forceinline__ void team_sync(int team) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(1 + team), "n"(TEAM_THREADS) : "memory");
}
// Waits for a team, and returns whether any of its threads has said yes.
__device__ __forceinline__ bool team_any(int team, bool yes) {
    uint32_t any;
    asm volatile(
        "{ .reg .pred own, all; setp.ne.u32 own, %3, 0;\n"
        "barrier.cta.red.or.pred all, %1, %2, own; selp.u32 %0, 1, 0, all; }"
        : "=r"(any)
        : "r"(1 + team), "n"(TEAM_THREADS), "r"(static_cast<uint32_t>(yes))
        : "memory");
    return any != 0;
}
__device__ __forceinline__ void teams_sync() {
    asm volatile("barrier.cta.sync %0, %1;" ::"n"(1 + TEAMS), "n"(TEAMS * TEAM_THREADS) : "memory");
}

// The heads of a KV head, which are the columns of a row.
struct Group {
    int size;
    int inverse = (65535 + size) / size;

    // For columns below 64 and groups of at most 16, this is the quotient.
    __device__ int row(int column) const { return column * inverse >> 16; }
};

// What the rows of a run see.
struct Sight {
    int64_t first;  // the position of the first row, which sees it and all before
    Group group;

    __device__ bool whole(int64_t tile_start) const { return tile_start + TILE - 1 <= first; }
    __device__ bool sees(int column, int64_t position) const { return position <= first + group.row(column); }

    // The same, of which nothing is computed before: the rows of all columns would take a register each.
    __device__ Sight here() const {
        Sight same = *this;
        asm volatile("" : "+r"(same.group.inverse));
        return same;
    }
};

// What columns 2t and 2t + 1 of each column tile have summed up so far.
template <typename Layout>
struct Sums {
    static constexpr int TILES = Layout::TILES;
    static constexpr int RUN = Layout::HEAD_DIM / 32;  // elements of head_dim that a lane has, in a run
    static constexpr int M_TILES = RUN / 2;

    float out[M_TILES][TILES * 4];  // elements 2j and 2j + 1 of the run: [j][4n + c] and [j][4n + 2 + c] of column c
    float base[TILES][2];           // the score that weights are relative to; the lowest number where none is seen yet
    float total[TILES][2];          // weight of this lane's positions

    __device__ Sums() {
#pragma unroll
        for (int i = 0; i < TILES * 4; i++) {
#pragma unroll
            for (int j = 0; j < M_TILES; j++) out[j][i] = 0.0f;
            base[i / 4][i % 2] = -FLT_MAX;
            total[i / 4][i % 2] = 0.0f;
        }
    }

    __device__ void add(const float (&weight)[TILES][2]) {
#pragma unroll
        for (int i = 0; i < TILES * 2; i++) total[i / 2][i % 2] = __fadd_rn(total[i / 2][i % 2], weight[i / 2][i % 2]);
    }
};

// The transpose of an 8 x 8 matrix of 16-bit elements, of which lane 4g + t holds elements 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose(uint32_t matrix) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(matrix));
    return matrix;
}

// Brings the query vectors of a KV head's group into shared memory, `columns` of them from row `first_row` on; columns past the
// last are zeros.
template <typename Layout>
__device__ __forceinline__ void load_queries(char *shared, const Queries &queries, int64_t first_row, int columns, int head,
                                             const Group &group, float log2_scale) {
    constexpr int VECTORS = Layout::TILES * COLUMNS / (TEAMS * WARPS);  // of a warp
    const int warp = threadIdx.x / 32 % (TEAMS * WARPS), eighth = threadIdx.x % 32;
    const int64_t first = (first_row * queries.heads + head * group.size) * Layout::HEAD_DIM;
    const uint4 *from = reinterpret_cast<const uint4 *>(queries.queries + first) + eighth;
    uint4 elements[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = warp + i * TEAMS * WARPS;
        const int vector = column + group.row(column) * (queries.heads - group.size);
        elements[i] = uint4{};
        if (column < columns && eighth < Layout::HEAD_DIM / 8) elements[i] = from[vector * (Layout::HEAD_DIM / 8)];
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int column = warp + i * TEAMS * WARPS;
        float factor;
        const uint4 query = Operands<typename Layout::Element>::queries(elements[i], factor);
        if (eighth == 0) reinterpret_cast<float *>(shared + Layout::FACTORS)[column] = log2_scale * factor;
        if (eighth >= Layout::HEAD_DIM / 8) continue;
        const uint32_t pairs[4] = {query.x, query.y, query.z, query.w};
#pragma unroll
        for (int pair = 0; pair < 4; pair++)
            *reinterpret_cast<uint32_t *>(shared + Layout::query(column, eighth, pair)) = pairs[pair];
    }
}

// Scores of a tile: lane 4g + t has positions g and g + 8 of its warp's 16, columns 2t and 2t + 1. What a column does not see
// scores minus infinity.
template <typename Layout>
__device__ __forceinline__ void find_scores(float (&score)[Layout::TILES * 4], const char *shared, const char *keys,
                                            int64_t tile_start, const Sight &sight, const Lane &lane) {
    using Products = Products<typename Layout::Element, Layout::TILES>;
#pragma unroll
    for (float &s : score) s = 0.0f;
    // One step's keys come while the products of the step before are under way.
    constexpr int STEPS = Layout::CHUNKS / 4;
    uint32_t chunk[2][2][4], a[2][Layout::STEPS][4];
    const auto load = [&](int s) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int position = 16 * lane.warp + lane.g + 8 * half;
            *reinterpret_cast<uint4 *>(chunk[s % 2][half]) =
                *reinterpret_cast<const uint4 *>(keys + Layout::key(position, 4 * s + lane.t));
        }
    };
    load(0);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s + 1 < STEPS) load(s + 1);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < Layout::STEPS; i++)
                Operands<typename Layout::Element>::keys(chunk[s % 2][half], i, a[s % 2][i][half], a[s % 2][i][half + 2]);
        begin_products();
#pragma unroll
        for (int i = 0; i < Layout::STEPS; i++) {
            const int step = s * Layout::STEPS + i;
            Products::multiply(score, a[s % 2][i], Products::right(shared + Layout::query_atoms(step), step % 4));
        }
        end_products();
        wait_for_products<1>();
    }
    wait_for_products<0>();

    const float *factors = reinterpret_cast<const float *>(shared + Layout::FACTORS);
#pragma unroll
    for (int i = 0; i < Layout::TILES * 4; i++)
        score[i] = __fmul_rn(score[i], factors[i / 4 * COLUMNS + 2 * lane.t + i % 2]);
    if (sight.whole(tile_start)) return;
    const Sight here = sight.here();
#pragma unroll
    for (int i = 0; i < Layout::TILES * 4; i++)
        if (!here.sees(i / 4 * COLUMNS + 2 * lane.t + i % 2, tile_start + 16 * lane.warp + lane.g + i / 2 % 2 * 8))
            score[i] = -INFINITY;
}

// The weights of a tile are relative to a score that is at most this much (of powers of two) below the largest so far. So few tiles
// after the first have to find their largest, and to shrink what has been summed up.
constexpr float HEADROOM = 8.0f;

// Where the largest of a column's scores is past its headroom, weights are relative to that from here on. What has been summed up
// shrinks to match; before the first tile there is nothing.
template <typename Layout>
__device__ __forceinline__ void raise(Sums<Layout> &sums, const float (&score)[Layout::TILES * 4], char *shared, bool first,
                                      const Lane &lane) {
    float *per_warp = Layout::per_warp(shared, lane.team);
#pragma unroll
    for (int n = 0; n < Layout::TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float largest = fmaxf(score[4 * n + c], score[4 * n + 2 + c]);
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
            if (lane.g == 0) per_warp[(lane.warp * Layout::TILES + n) * COLUMNS + 2 * lane.t + c] = largest;
        }
    team_sync(lane.team);
    float shrink[Layout::TILES][2];
#pragma unroll
    for (int n = 0; n < Layout::TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float largest = -INFINITY;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                largest = fmaxf(largest, per_warp[(w * Layout::TILES + n) * COLUMNS + 2 * lane.t + c]);
            float &base = sums.base[n][c];
            const float raised = __fadd_rn(largest, -base) > HEADROOM ? largest : base;
            shrink[n][c] = exp2_fast(__fadd_rn(base, -raised));
            base = raised;
        }
    if (first) return;
#pragma unroll
    for (int i = 0; i < Layout::TILES * 4; i++) {
        const float by = shrink[i / 4][i % 2];
        if (i % 4 < 2) sums.total[i / 4][i % 2] = __fmul_rn(sums.total[i / 4][i % 2], by);
#pragma unroll
        for (int j = 0; j < sums.M_TILES; j++) sums.out[j][i] = __fmul_rn(sums.out[j][i], by);
    }
}

// Leaves the weights of scores in shared memory, and in `fresh` the sums of a lane's. Returns whether a score is past its headroom.
template <typename Layout>
__device__ __forceinline__ bool weigh(float (&fresh)[Layout::TILES][2], const Sums<Layout> &sums,
                                      const float (&score)[Layout::TILES * 4], char *weights, const Lane &lane) {
    using Operands = Operands<typename Layout::Element>;
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < Layout::TILES; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float first = __fadd_rn(score[4 * n + 2 * half], -sums.base[n][0]);
            const float second = __fadd_rn(score[4 * n + 2 * half + 1], -sums.base[n][1]);
            most = fmaxf(most, fmaxf(first, second));
            const uint32_t pair = Operands::weights(exp2_fast(first), exp2_fast(second));
            const float2 rounded = Operands::to_floats(pair);
            fresh[n][0] = half == 0 ? rounded.x : __fadd_rn(fresh[n][0], rounded.x);
            fresh[n][1] = half == 0 ? rounded.y : __fadd_rn(fresh[n][1], rounded.y);
            char *to = weights + Layout::weight(COLUMNS * n + lane.g, 16 * lane.warp + 8 * half + 2 * lane.t);
            *reinterpret_cast<uint32_t *>(to) = transpose(pair);
        }
    }
    return most > HEADROOM;
}

// A lane's run of a value, in words.
template <int WORDS>
__device__ __forceinline__ void load_run(uint32_t (&run)[WORDS], const char *from, int bytes) {
    if (bytes == 2) run[0] = *reinterpret_cast<const unsigned short *>(from);
    if (bytes == 4) run[0] = *reinterpret_cast<const uint32_t *>(from);
    if constexpr (WORDS == 2) *reinterpret_cast<uint2 *>(run) = *reinterpret_cast<const uint2 *>(from);
    if constexpr (WORDS == 4) *reinterpret_cast<uint4 *>(run) = *reinterpret_cast<const uint4 *>(from);
}

// Makes zeros of what is not finite, and returns whether there was such.
template <typename Operands, int WORDS>
__device__ __forceinline__ bool leave_out(uint32_t (&run)[4][WORDS]) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) any |= Operands::not_finite(run[i / WORDS][i % WORDS]);
    if (any == 0) return false;
#pragma unroll
    for (int i = 0; i < 4 * WORDS; i++) {
        uint32_t &word = run[i / WORDS][i % WORDS];
        word &= ~((Operands::not_finite(word) >> (Operands::BITS - 1)) * ((1u << Operands::BITS) - 1));
    }
    return true;
}

// Adds the tile's values by their weights. A value that is not finite would spoil a row that does not see it even with a weight of
// zero: where there are such rows, it is left out of the products, and added to the columns that see it.
template <typename Layout>
__device__ __forceinline__ void add_values(Sums<Layout> &sums, const char *weights, const char *values, int64_t tile_start,
                                           const Sight &sight, const Lane &lane) {
    using Element = typename Layout::Element;
    using Products = Products<Element, Layout::TILES>;
    constexpr int RUN_BYTES = sums.RUN * sizeof(Element);
    constexpr int WORDS = RUN_BYTES < 4 ? 1 : RUN_BYTES / 4;
    const int byte = lane.warp * (Layout::ROW / WARPS) + lane.g * RUN_BYTES;
    const bool whole = sight.whole(tile_start);
    bool left_out = false;
    uint32_t run[2][4][WORDS], a[2][sums.M_TILES][4];
    const auto position = [&](int step, int i) { return 16 * step + 2 * lane.t + i % 2 + i / 2 * 8; };
    const auto load = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            load_run(run[step % 2][i], values + Layout::value(position(step, i), byte / 16) + byte % 16, RUN_BYTES);
    };
    load(0);
#pragma unroll
    for (int step = 0; step < TILE / 16; step++) {
        if (step + 1 < TILE / 16) load(step + 1);
        uint32_t(&of_step)[4][WORDS] = run[step % 2];
        if (!whole) left_out |= leave_out<Operands<Element>>(of_step);
#pragma unroll
        for (int j = 0; j < sums.M_TILES; j++) {
            Operands<Element>::values(of_step[0], of_step[1], j, a[step % 2][j][0], a[step % 2][j][1]);
            Operands<Element>::values(of_step[2], of_step[3], j, a[step % 2][j][2], a[step % 2][j][3]);
        }
        begin_products();
        const auto right = Products::right(weights, step);
#pragma unroll
        for (int j = 0; j < sums.M_TILES; j++) Products::multiply(sums.out[j], a[step % 2][j], right);
        end_products();
        wait_for_products<1>();
    }
    wait_for_products<0>();
    if (!__any_sync(~0u, left_out)) return;

    for (int position = 0; position < TILE; position++) {
        const Sight here = sight.here();
        const char *from = values + Layout::value(position, byte / 16) + byte % 16;
#pragma unroll
        for (int element = 0; element < sums.RUN; element++) {
            const float value = Operands<Element>::value(from + element * sizeof(Element));
            if (isfinite(value)) continue;
#pragma unroll
            for (int i = 0; i < Layout::TILES * 2; i++) {
                const int column = i / 2 * COLUMNS + 2 * lane.t + i % 2;
                float &sum = sums.out[element / 2][i / 2 * 4 + element % 2 * 2 + i % 2];
                if (here.sees(column, tile_start + position))
                    sum = __fmaf_rn(Operands<Element>::weight(weights + Layout::weight(column, position)), value, sum);
            }
        }
    }
}

// Adds up the sums of the teams, in shared memory, and leaves them for the second kernel; `first_column` is that of the head.
template <typename Layout>
__device__ __forceinline__ void leave(const Sums<Layout> &sums, char *shared, const Scratch &scratch, int64_t first_column,
                                      int columns, const Lane &lane) {
    constexpr int VECTOR = sums.RUN < 4 ? sums.RUN : 4;
    using Vector = std::conditional_t<VECTOR == 4, float4, float2>;
    float *bases = reinterpret_cast<float *>(shared + Layout::BASES);
    // All tiles have been read, and queries and weights.
    teams_sync();
#pragma unroll
    for (int i = 0; i < Layout::TILES * 2; i++) {
        const int column = i / 2 * COLUMNS + 2 * lane.t + i % 2;
        float total = sums.total[i / 2][i % 2];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, lanes));
        if (lane.g == 0) {
            Layout::per_warp(shared, lane.team)[lane.warp * Layout::TILES * COLUMNS + column] = total;
            bases[lane.team * Layout::TILES * COLUMNS + column] = sums.base[i / 2][i % 2];
        }
        float run[sums.RUN];
#pragma unroll
        for (int j = 0; j < sums.RUN; j++) run[j] = sums.out[j / 2][i / 2 * 4 + j % 2 * 2 + i % 2];
#pragma unroll
        for (int j = 0; j < sums.RUN; j += VECTOR)
            *reinterpret_cast<Vector *>(shared + Layout::sum(lane.team, column, (lane.warp * 8 + lane.g) * sums.RUN + j)) =
                *reinterpret_cast<const Vector *>(run + j);
    }
    teams_sync();
    if (threadIdx.x < columns) {
        float base = bases[threadIdx.x], total = 0.0f;
#pragma unroll
        for (int team = 1; team < TEAMS; team++) base = fmaxf(base, bases[team * Layout::TILES * COLUMNS + threadIdx.x]);
#pragma unroll
        for (int team = 0; team < TEAMS; team++) {
            float *per_warp = Layout::per_warp(shared, team) + threadIdx.x;
            float of_team = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) of_team = __fadd_rn(of_team, per_warp[w * Layout::TILES * COLUMNS]);
            const float shrink = exp2_fast(__fadd_rn(bases[team * Layout::TILES * COLUMNS + threadIdx.x], -base));
            total = __fmaf_rn(of_team, shrink, total);
            *per_warp = shrink;
        }
        scratch.weights[first_column + threadIdx.x] = make_float2(base, total);
    }
    teams_sync();
    for (int column = threadIdx.x / 32; column < columns; column += TEAMS * WARPS) {
        float *to = scratch.outputs + (first_column + column) * Layout::HEAD_DIM;
        for (int d = threadIdx.x % 32 * 4; d < Layout::HEAD_DIM; d += 32 * 4) {
            float4 sum = {};
#pragma unroll
            for (int team = 0; team < TEAMS; team++)
                add(sum, Layout::per_warp(shared, team)[column],
                    *reinterpret_cast<const float4 *>(shared + Layout::sum(team, column, d)));
            *reinterpret_cast<float4 *>(to + d) = sum;
        }
    }
}

}  // namespace
}  // namespace attention::band
