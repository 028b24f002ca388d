// One row of x rounded to int8 times a matrix, contracted along its rows: four rows of bytes are read side by side,
// from left to right over a stripe of columns, while the sums of a block wait in L1.
#pragma once

#include <initializer_list>

#include "int8_panels.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kStripeColumns = 4096;

template <class Format, bool kPacked>
struct Int8Stripe {
  static constexpr int kPlaces = kPacked ? kValuesPerByte<Format> : 1;
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  typedef StripDotsOf<Format> Dots;

  const Matrix m;
  const Int8X& x;
  const int64_t n, width;                    // the first column, and the number of columns
  alignas(64) int32_t sums[kStripeColumns];  // of a block; columns are in the order of panels
  alignas(64) float totals[kStripeColumns];  // from here on, columns are in order
  alignas(64) float scales[kStripeColumns];  // of a block
  alignas(64) float offsets[kStripeColumns];
  alignas(64) Bytes nan[kStripeColumns / 8];  // bits of columns, in the order of panels

  Int8Stripe(const Matrix& m, const Int8X& x, int64_t n, int64_t width) : m(m), x(x), n(n), width(width) {
    const int64_t padded = CeilDiv(width, kPanelColumns) * kPanelColumns;
    std::memset(totals, 0, padded * sizeof(float));
    for (float* floats : {scales, offsets}) std::memset(floats + width, 0, (padded - width) * sizeof(float));
    if (Int8Codes<Format>::kHasNaN) std::memset(nan, 0, padded * sizeof(uint32_t));
  }

  // Adds x[k : k + block] @ matrix[k : k + block].
  void AddBlock(int64_t k, bool has_offsets) {
    const int64_t first = k / kPlaces, rows = Min(x.block / kPlaces, CeilDiv(m.rows, kPlaces) - first);
    const int32_t start = -BiasOf<Format>(m) * x.sums[k / x.block];
    for (int64_t r = 0; r < rows; r += 4) {
      const int8_t* four = x.values + k + r * kPlaces;
      const int64_t whole = width / kPanelColumns * kPanelColumns;
      for (int64_t c = 0; c < whole; c += kPanelColumns)
        AddFour<true>(first + r, Min(4, rows - r), c, four, r == 0, start);
      if (whole < width) AddFour<false>(first + r, Min(4, rows - r), whole, four, r == 0, start);
    }
    const float step = x.steps[k / x.block], sum = step * static_cast<float>(x.sums[k / x.block]);
    for (int64_t c = 0; c < width; c += kStripSize) Scale(c, step, sum, has_offsets);
  }

  // Reads the scales of a block of the matrix; true if it has offsets.
  bool TakeScales(int64_t block) {
    const float* scale = ScalesAt(m, block, n, width, scales);
    const float* offset = OffsetsAt(m, block, n, width, CentreOf<Format>(m), scale, offsets);
    if (scale != scales) std::memcpy(scales, scale, width * sizeof(float));
    if (offset != nullptr && offset != offsets) std::memcpy(offsets, offset, width * sizeof(float));
    return offset != nullptr;
  }

  void Write(float* y) const {
    std::memcpy(y, totals, width * sizeof(float));
    if constexpr (Int8Codes<Format>::kHasNaN) {
      for (int64_t c = 0; c < CeilDiv(width, 32) * 32; ++c) {
        const int64_t column = c / 32 * 32 + kFourColumns[c % 32 / 4] + c % 4;
        uint32_t bits;
        std::memcpy(&bits, reinterpret_cast<const char*>(nan) + 4 * c, sizeof bits);
        if (bits != 0 && column < width) y[column] = __builtin_nanf("");
      }
    }
  }

 private:
  // Adds four rows of bytes, or fewer, times 4 * kPlaces values of x, for 64 columns.
  template <bool kWhole>
  EFORMER_INLINE void AddFour(int64_t row, int64_t count, int64_t c, const int8_t* four, bool starts, int32_t start) {
    Bytes rows[2][4] = {};
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (j >= count) break;
      if constexpr (kPacked) {
        const uint8_t* from = m.planes[0] + (row + j) * m.cols + n + c;
        __builtin_prefetch(from + 4 * m.cols);
#pragma GCC unroll 2
        for (int s = 0; s < 2; ++s) {
          rows[s][j] =
              kWhole ? LoadBytes(from + s * kStripSize) : LoadSome(from + s * kStripSize, width - c - s * kStripSize);
        }
      } else {
        Bytes codes[2] = {};
        AddPlanes<Format>(m, row + j, n + c, kWhole ? kPanelColumns : width - c, codes);
        rows[0][j] = codes[0];
        rows[1][j] = codes[1];
      }
    }
    for (int s = 0; s < 2; ++s) {
      Bytes quads[4];
      QuadsOfRows(rows[s], quads);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const int64_t at = c + s * kStripSize + 8 * i;
        const Bytes flipped = FlipPacked<Format, kPlaces>(quads[i]);
        if constexpr (Int8Codes<Format>::kHasNaN) nan[at / 8] |= FindNaN(flipped);
        typename Dots::Sum sum{};
        ForEachPlace<kPlaces>([&](auto place) {
          int32_t values;
          std::memcpy(&values, four + 4 * place, sizeof values);
          sum = Dots::Add(sum, Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped)), values - StripInts{});
        });
        const StripInts before = starts ? start - StripInts{} : LoadVector<StripInts>(sums + at);
        StoreVector(sums + at, before + Dots::Widen(sum));
      }
    }
  }

  EFORMER_INLINE void Scale(int64_t c, float step, float x_sum, bool has_offsets) {
    float found[kStripSize];
    for (int i = 0; i < 4; ++i) {
      const StripReals reals = ToStripReals(LoadVector<StripInts>(sums + c + 8 * i));
      for (int half = 0; half < 2; ++half) {
        std::memcpy(found + kFourColumns[2 * i + half], reinterpret_cast<const char*>(&reals) + 16 * half, 16);
      }
    }
    const Vec unit = Spread(step / Format::kInt8Steps);
    for (int i = 0; i < kStripSize; i += kLanes) {
      Vec total = Load(totals + c + i);
      total += Load(found + i) * (kInBlocks ? unit * Load(scales + c + i) : unit);
      if (has_offsets) total += Load(offsets + c + i) * x_sum;
      Store(totals + c + i, total);
    }
  }
};

// As Kernels::int8_matmul says.
template <class Format, bool kPacked>
static void Int8RowMatmulOf(const Matrix& m, const Int8X& x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += kStripeColumns) {
    Int8Stripe<Format, kPacked> stripe(m, x, n, Min(kStripeColumns, n1 - n));
    bool has_offsets = false;
    for (int64_t k = k0; k < k1; k += x.block) {
      if constexpr (Format::kScales == ScaleKind::kPerBlock) {
        if (k == k0 || k % m.block == 0) has_offsets = stripe.TakeScales(k / m.block);
      }
      stripe.AddBlock(k, has_offsets);
    }
    stripe.Write(y + n);
  }
}

}  // namespace eformer::EFORMER_ISA
