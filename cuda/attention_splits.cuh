// How positions are cut into splits, each attended to by a block of its own.
//
// Splits are spaced like floating-point numbers: so many to an octave, one unit long before the second octave and twice as long in
// each octave after it. A split's range depends on its index alone, so a longer context moves no boundary; a short context is cut
// finely enough to fill the device, and a long one coarsely enough that adding up its splits costs little.
#pragma once

#include <cstdint>

namespace attention::band {
namespace {

struct Splits {
    int unit_shift;    // a unit is 2^unit_shift positions
    int octave_shift;  // 2^octave_shift splits to an octave

    // Fewer KV heads need more splits to fill a device. Finer octaves serve one row of a long context sooner, and cost many rows
    // more in adding up.
    __host__ __device__ static Splits of(int kv_heads) { return kv_heads >= 4 ? Splits{6, 5} : Splits{6, 6}; }

    // The first position of a split, and so the end of the one before.
    __host__ __device__ int64_t start(int split) const {
        const int octave = split >> octave_shift;
        if (octave < 2) return static_cast<int64_t>(split) << unit_shift;
        const int64_t step = (1 << octave_shift) + (split & ((1 << octave_shift) - 1));
        return step << (octave - 1 + unit_shift);
    }

    // Splits that `positions` positions reach into.
    __host__ __device__ int count(int64_t positions) const {
        if (positions <= 0) return 0;
        const int64_t unit = (positions - 1) >> unit_shift;
        int octave = 0;
        while (unit >> (octave + octave_shift + 1) > 0) octave++;
        return (octave << octave_shift) + static_cast<int>(unit >> octave) + 1;
    }
};

}  // namespace
}  // namespace attention::band
