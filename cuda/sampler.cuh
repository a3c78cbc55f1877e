// The numbers of decode_loop::Sampler, over one row of logits, by one cluster: the largest logit, cuts by rank and by mass, a draw.
//
// Every warp has a run of consecutive ids, so that sums by rising id are sums over blocks, then warps. Sums are of integers and
// maxima of unique numbers: their order does not matter. Logits come from memory once, and out of L1 after that.
#pragma once

#include <cstdint>

#include "cluster.cuh"

namespace sampler {
namespace {

constexpr int WARPS = 32;
constexpr int THREADS = 32 * WARPS;
constexpr int MAX_BLOCKS = 8;  // of a cluster
constexpr int VECTOR = 4 * 32;  // logits that a warp loads at a time
constexpr int DIGIT_BITS = 11;
constexpr int DIGITS = 1 << DIGIT_BITS;
constexpr int GROUPS = DIGITS / 32;  // of digits that lie beside each other
static_assert(DIGITS == 2 * THREADS && GROUPS == 64, "a thread has two digits, a lane two groups");

struct Shared {
    uint64_t of_blocks[3][MAX_BLOCKS];  // what each block of the cluster has brought to a reduction
    uint64_t of_warps[WARPS];           // likewise, in this block
    uint32_t low[DIGITS];               // the mass of each digit, of this block
    uint32_t high[DIGITS];
    uint64_t of_groups[MAX_BLOCKS][GROUPS];  // the mass of each group, of every block
    uint64_t of_digits[MAX_BLOCKS][32];      // the mass of the digits of one group, of every block
    uint64_t left;
    uint32_t digit;
};

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
__device__ __forceinline__ int block() { return blockIdx.x; }  // the grid is one cluster
__device__ __forceinline__ int blocks() { return gridDim.x; }

// Reads what lies where `local` would be in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t load_from_rank(const uint32_t *local, int rank) {
#if HAS_CLUSTERS
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    uint32_t remote, value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    return value;
#else
    return *local;
#endif
}

__device__ __forceinline__ void store_to_rank(uint64_t *local, int rank, uint64_t value) {
    uint32_t *halves = reinterpret_cast<uint32_t *>(local);
    ::store_to_rank(halves, rank, static_cast<uint32_t>(value));
    ::store_to_rank(halves + 1, rank, static_cast<uint32_t>(value >> 32));
}

// Logits as integers of the same order: -0 is 0, NaN is above all, and no logit is 0.
constexpr uint32_t NAN_KEY = 0xffffffff;

__device__ __forceinline__ uint32_t key_of(float logit) {
    const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    return isnan(logit) ? NAN_KEY : bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
}

__device__ __forceinline__ float logit_of(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000 : 0xffffffff));
}

struct Larger {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

struct Sum {
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};

// Measures of a logit, by its key.
struct Count {
    __device__ uint32_t operator()(uint32_t) const { return 1; }
};

// round(2^31 * 2^((logit - max) * scale)), in the steps of decode_loop's `weight`.
struct Weight {
    float max, scale;

    __device__ uint32_t operator()(uint32_t key) const {
        const float exponent = __fmul_rn(__fsub_rn(logit_of(key), max), scale);
        if (exponent < -32.5f) return 0;
        const float whole = rintf(exponent), fraction = __fsub_rn(exponent, whole);
        float power = 0.0001540353f;
        power = __fmaf_rn(power, fraction, 0.0013333558f);
        power = __fmaf_rn(power, fraction, 0.009618129f);
        power = __fmaf_rn(power, fraction, 0.05550411f);
        power = __fmaf_rn(power, fraction, 0.2402265f);
        power = __fmaf_rn(power, fraction, 0.6931472f);
        power = __fmaf_rn(power, fraction, 1.0f);
        const float two_to = __uint_as_float(static_cast<uint32_t>(127 + 31 + static_cast<int>(whole)) << 23);
        return __float2uint_rn(__fmul_rn(power, two_to));
    }
};

template <typename Combine>
__device__ __forceinline__ uint64_t warp_reduce(uint64_t value, Combine combine) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// The sum of the values of all lanes up to this one.
__device__ __forceinline__ uint64_t warp_scan(uint64_t value) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t below = __shfl_up_sync(~0u, value, distance);
        value += lane() >= distance ? below : 0;
    }
    return value;
}

// Combines a value of every thread of the cluster. Each slot serves once, as a block may still read it when others are far ahead.
template <typename Combine>
__device__ uint64_t cluster_reduce(Shared &shared, int slot, uint64_t value, Combine combine) {
    value = warp_reduce(value, combine);
    if (lane() == 0) shared.of_warps[warp()] = value;
    __syncthreads();
    if (warp() == 0) {
        value = warp_reduce(shared.of_warps[lane()], combine);
        if (lane() < blocks()) store_to_rank(&shared.of_blocks[slot][block()], lane(), value);
    }
    cluster_sync();
    value = shared.of_blocks[slot][0];
    for (int other = 1; other < blocks(); ++other) value = combine(value, shared.of_blocks[slot][other]);
    return value;
}

// The run of logits that this warp has.
class Logits {
public:
    __device__ Logits(const float *logits, int vocab) : logits(logits) {
        const int share = VECTOR * WARPS * blocks(), run = (vocab + share - 1) / share * VECTOR;
        begin = run * (block() * WARPS + warp());
        end = min(begin + run, vocab);
    }

    // The largest key above the complement of its id, so that the lowest id wins.
    __device__ uint64_t best() const {
        uint32_t best = 0, best_id = 0;
        each<8>([&](uint32_t key, int id) {
            if (key > best) best = key, best_id = id;
        });
        return static_cast<uint64_t>(best) << 32 | ~best_id;
    }

    // The measure of this lane's keys from `cut` on.
    template <typename Measure>
    __device__ uint64_t mass(Measure measure, uint32_t cut) const {
        uint64_t sum = 0;
        each<2>([&](uint32_t key, int) { sum += key >= cut ? measure(key) : 0; });
        return sum;
    }

    // The id at which the measure of the keys from `cut` on, summed from the start of the run, passes `left`: in the lane that has
    // it, and -1 in the others.
    template <typename Measure>
    __device__ int find(Measure measure, uint32_t cut, uint64_t left) const {
        for (int first = begin; first < end; first += VECTOR) {
            const int id = first + 4 * lane();
            const float4 vector = load(id);
            const float values[4] = {vector.x, vector.y, vector.z, vector.w};
            uint64_t upto[4], sum = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t key = id + i < end ? key_of(values[i]) : 0;
                sum += key >= cut ? measure(key) : 0;
                upto[i] = sum;
            }
            const uint64_t upto_lane = warp_scan(sum), all = __shfl_sync(~0u, upto_lane, 31);
            if (left < all) {
                // Wraps, and is then above all sums, where a lane before has the id.
                const uint64_t here = left - (upto_lane - sum);
                if (here >= sum) return -1;
                return id + (here >= upto[0]) + (here >= upto[1]) + (here >= upto[2]);
            }
            left -= all;
        }
        return -1;
    }

    // Visits the keys of this lane by rising id, with `BATCH` loads under way at a time.
    template <int BATCH, typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (int first = begin + 4 * lane(); first < end; first += BATCH * VECTOR) {
            float4 batch[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) batch[i] = load(first + i * VECTOR);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float values[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int id = first + i * VECTOR + j;
                    if (id < end) visit(key_of(values[j]), id);
                }
            }
        }
    }

private:
    // The logits from `id` on, zeros past the end.
    __device__ __forceinline__ float4 load(int id) const {
        if (id + 4 <= end) return *reinterpret_cast<const float4 *>(logits + id);
        float values[3] = {};
        for (int i = 0; i < 3 && id + i < end; ++i) values[i] = logits[id + i];
        return make_float4(values[0], values[1], values[2], 0.0f);
    }

    const float *logits;
    int begin, end;
};

// Of two masses a lane, the larger index first, the one at which their sum passes `target`: its index, and what is left of `target`
// there, to `shared`. By one warp; `upper` is the mass of index 2 * (31 - lane) + 1.
__device__ __forceinline__ void find_of_64(Shared &shared, uint64_t upper, uint64_t lower, uint64_t target) {
    const uint64_t sum = upper + lower, before = warp_scan(sum) - sum;
    if (target < before || target - before >= sum) return;
    const bool in_upper = target - before < upper;
    shared.digit = 2 * (31 - lane()) + in_upper;
    shared.left = target - before - (in_upper ? 0 : upper);
}

// The digit at which the masses of all blocks, summed from the largest digit on, pass `target`; and what is left of `target` there.
// Blocks exchange the masses of groups of digits first, then those of one group.
__device__ void find_digit(Shared &shared, uint64_t target) {
    const int mine = 2 * threadIdx.x;
    uint64_t group = 0;
    for (int i = mine; i < mine + 2; ++i) group += static_cast<uint64_t>(shared.high[i]) << 32 | shared.low[i];
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) group += __shfl_xor_sync(~0u, group, distance);
    // Every lane of a half warp has the sum, so each can tell one block.
    if (lane() % 16 < blocks()) store_to_rank(&shared.of_groups[block()][mine / 32], lane() % 16, group);
    cluster_sync();

    if (warp() == 0) {
        const int lower = 2 * (31 - lane());
        uint64_t masses[2] = {};
        for (int other = 0; other < blocks(); ++other) {
            for (int i = 0; i < 2; ++i) masses[i] += shared.of_groups[other][lower + i];
        }
        find_of_64(shared, masses[1], masses[0], target);
    }
    __syncthreads();
    const int first = shared.digit * 32;
    target = shared.left;
    if (warp() < blocks()) {
        const uint64_t high = load_from_rank(&shared.high[first + lane()], warp());
        shared.of_digits[warp()][lane()] = high << 32 | load_from_rank(&shared.low[first + lane()], warp());
    }
    __syncthreads();
    if (warp() == 0) {
        uint64_t mass = 0;
        for (int other = 0; other < blocks(); ++other) mass += shared.of_digits[other][31 - lane()];
        const uint64_t before = warp_scan(mass) - mass;
        if (target >= before && target - before < mass) {
            shared.digit = first + 31 - lane();
            shared.left = target - before;
        }
    }
    cluster_sync();  // also lets the digits go, which others have read
}

// The largest key such that the measure of the keys from it on, of those from `floor` on, exceeds `target`; found digit by digit.
template <typename Measure>
__device__ uint32_t find_cut(Shared &shared, const Logits &logits, Measure measure, uint32_t floor, uint64_t target) {
    uint32_t cut = 0;
    for (int known = 32; known > 0;) {  // bits of the key from here on
        const int shift = known > DIGIT_BITS ? known - DIGIT_BITS : 0;
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) shared.low[i] = shared.high[i] = 0;
        __syncthreads();
        logits.each<2>([&](uint32_t key, int) {
            if (key < floor || static_cast<uint64_t>(key ^ cut) >> known != 0) return;
            const uint32_t digit = key >> shift & (DIGITS - 1), mass = measure(key);
            const uint32_t before = atomicAdd(&shared.low[digit], mass);
            if (before + mass < before) atomicAdd(&shared.high[digit], 1);
        });
        __syncthreads();
        find_digit(shared, target);
        cut |= shared.digit << shift;
        target = shared.left;
        known = shift;
    }
    return cut;
}

// Takes off `left` what blocks and warps before this warp brought to a slot's reduction; says whether the rest is less than what
// this warp brought.
__device__ __forceinline__ bool holds(const Shared &shared, int slot, uint64_t &left) {
    for (int other = 0; other < block(); ++other) left -= shared.of_blocks[slot][other];
    for (int other = 0; other < warp(); ++other) left -= shared.of_warps[other];
    return left < shared.of_warps[warp()];
}

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011): the first 64 bits of its block for a counter.
__device__ __forceinline__ uint64_t philox(uint64_t counter, uint64_t seed) {
    uint32_t a = counter, b = counter >> 32, c = 0, d = 0, left = seed, right = seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = 0xd2511f53ull * a, second = 0xcd9e8d57ull * c;
        a = static_cast<uint32_t>(second >> 32) ^ b ^ left;
        b = second;
        c = static_cast<uint32_t>(first >> 32) ^ d ^ right;
        d = first;
        left += 0x9e3779b9;
        right += 0xbb67ae85;
    }
    return static_cast<uint64_t>(b) << 32 | a;
}

}  // namespace
}  // namespace sampler
