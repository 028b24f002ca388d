// NF4: two 4-bit codes a byte, the first in the high bits, for the quantiles of a normal distribution, and a scale for
// each block. Dettmers et al., "QLoRA", arXiv 2305.14314, appendix E.
#pragma once

#include "matrix/format.h"
#include "matrix/pack_floats.h"
#include "matrix/scales.h"

namespace eformer::EFORMER_ISA {

constexpr float kNf4Values[16] = {// clang-format off
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// clang-format on

struct Nf4 : FormatDefaults {
  static constexpr const char* kName = "nf4";
  static constexpr int kPlaneBits[] = {4};
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr bool kHighBitsFirst = true;
  static constexpr bool kFloatScales = true;
  static constexpr float kInt8Steps = 127;  // the sixteen values are rounded to multiples of 1 / 127
  static constexpr float Value(int code) { return kNf4Values[code]; }

  static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums);
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
  struct Panels;
};

// Sums a block in lane order in `block_sums`, then multiplies by its scales.
static inline void Nf4RowByPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                      float* sums) {
  alignas(64) float block_sums[kSliceColumns + kStripSize];
  const LoadedTable table = TableOf<Nf4>();
  for (int64_t k = k0; k < k1; k += m.block) {
    const int64_t end = (Min(k + m.block, k1) + 1) / 2;
    const float* scale = m.scale + k / m.block * m.cols + n0;
    for (int64_t r0 = k / 2; r0 < end; r0 += kByteRows) {
      const int rows = static_cast<int>(Min(kByteRows, end - r0));
      const bool starts = r0 == k / 2, ends = r0 + rows == end;
      const float* xs = x + 2 * r0;
      const uint8_t* first = m.planes[0] + r0 * m.cols + n0;
      ForEachStrip(first, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
        Strip sum = starts ? Strip{} : LoadStrip(block_sums + n);
        for (int r = 0; r < rows; ++r, codes += stride) {
          PrefetchAfter(codes, kByteRows * stride);
          const Bytes pairs = LoadBytes(codes);
          AddProduct(sum, LookUpHigh(table, pairs), Spread(xs[2 * r]));
          AddProduct(sum, LookUpLow(table, pairs), Spread(xs[2 * r + 1]));
        }
        if (!ends) return StoreStrip(block_sums + n, sum);
        float scales[kStripSize];
        const int64_t present = Min(kStripSize, n1 - n0 - n);
        if (present < kStripSize) std::memset(scales, 0, sizeof scales);
        std::memcpy(scales, scale + n, present * sizeof(float));
        Strip total = LoadStrip(sums + n);
        AddProduct(total, ToNatural(sum), LoadStrip(scales));
        StoreStrip(sums + n, total);
      });
    }
  }
}

// Sums even and odd columns apart, in lane order until the end.
static inline void Nf4RowByPackedColumns(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0,
                                         int64_t n1, float* sums) {
  alignas(64) float even[kSliceColumns / 2 + kStripSize] = {}, odd[kSliceColumns / 2 + kStripSize] = {};
  const LoadedTable table = TableOf<Nf4>();
  const int64_t row_bytes = m.RowBytes(2), bytes = (n1 - n0 + 1) / 2;
  const ScalePlaces places(m, n0 / 2, bytes);
  WithScales(m, places, [&](const auto& scales) {
    for (int64_t k = k0; k < k1; k += kByteRows) {
      const int rows = static_cast<int>(Min(kByteRows, k1 - k));
      const uint8_t* first = m.planes[0] + k * row_bytes + n0 / 2;
      ForEachStrip(first, row_bytes, rows, bytes, [&](const uint8_t* codes, int64_t stride, int64_t n) {
        Strip of_even = LoadStrip(even + n), of_odd = LoadStrip(odd + n);
        const auto of_strip = scales.Of(n0 / 2 + n);
        for (int r = 0; r < rows; ++r, codes += stride) {
          PrefetchAfter(codes, kByteRows * stride);
          const Bytes pairs = LoadBytes(codes);
          const auto factor = Times(of_strip.At(k + r), Spread(x[k + r]));
          AddProduct(of_even, LookUpHigh(table, pairs), factor);
          AddProduct(of_odd, LookUpLow(table, pairs), factor);
        }
        StoreStrip(even + n, of_even);
        StoreStrip(odd + n, of_odd);
      });
    }
  });
  for (int64_t n = 0; n < bytes; n += kStripSize) {
    StoreStrip(even + n, ToNatural(LoadStrip(even + n)));
    StoreStrip(odd + n, ToNatural(LoadStrip(odd + n)));
  }
  for (int64_t n = 0; n < n1 - n0; ++n) sums[n] = n % 2 ? odd[n / 2] : even[n / 2];
}

inline void Nf4::RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                           float* sums) {
  (m.packed_axis == 0 ? Nf4RowByPackedRows : Nf4RowByPackedColumns)(m, x, k0, k1, n0, n1, sums);
}

// For blocks of whole strips, with x in the order of lookups. A block is multiplied by its scale once.
static inline void Nf4DotsOfLongBlocks(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const LoadedTable table = TableOf<Nf4>();
  const int64_t row_bytes = m.RowBytes(2), scales = m.BlockScaleStride();
  for (int64_t n = n0; n < n1; ++n) {
    const float* scale = m.scale + n * scales;
    Strip sum{}, block_sum{};
    int64_t block_end = m.block / 2;  // in bytes
    ForEachBytes(m.planes[0] + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      if (c == block_end) {
        AddProduct(sum, block_sum, Spread(*scale++));
        block_sum = Strip{};
        block_end += m.block / 2;
      }
      const Bytes pairs = LoadBytes(codes);
      AddProduct(block_sum, LookUpHigh(table, pairs), LoadStrip(x + 2 * c));
      AddProduct(block_sum, LookUpLow(table, pairs), LoadStrip(x + 2 * c + kStripSize));
    });
    y[n] = Sum(sum) + Sum(block_sum) * *scale;  // sum first: an infinite scale times an empty lane would be NaN
  }
}

// The same for blocks of any length, with scales of scales.h.
template <class Scales>
static inline void Nf4DotsOfAnyBlocks(const Matrix& m, const Scales& scales, const float* x, int64_t n0, int64_t n1,
                                      float* y) {
  const LoadedTable table = TableOf<Nf4>();
  const int64_t row_bytes = m.RowBytes(2);
  for (int64_t n = n0; n < n1; ++n) {
    Strip sum{};
    float rest = 0;
    ForEachBytes(m.planes[0] + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      const Bytes pairs = LoadBytes(codes);
      Strip unscaled{};
      AddProduct(unscaled, LookUpHigh(table, pairs), LoadStrip(x + 2 * c));
      AddProduct(unscaled, LookUpLow(table, pairs), LoadStrip(x + 2 * c + kStripSize));
      const auto factors = scales.Of(c).At(n);
      if (c + kStripSize <= row_bytes) return AddProduct(sum, unscaled, factors);
      float last[kStripSize];  // with empty lanes, which are left out for the reason above
      StoreStrip(last, ToNatural(Times(unscaled, factors)));
      for (int64_t i = 0; i < row_bytes - c; ++i) rest += last[i];
    });
    y[n] = Sum(sum) + rest;
  }
}

static inline void Nf4DotsOfPackedColumns(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const int64_t row_bytes = m.RowBytes(2);
  const Floats ordered((row_bytes + kStripSize) * 2);
  for (int64_t c = 0; c < row_bytes; c += kStripSize) {
    float even[kStripSize], odd[kStripSize];
    for (int i = 0; i < kStripSize; ++i) {
      even[i] = 2 * (c + i) < m.cols ? x[2 * (c + i)] : 0;
      odd[i] = 2 * (c + i) + 1 < m.cols ? x[2 * (c + i) + 1] : 0;
    }
    StoreStrip(&ordered.values[2 * c], FromNatural(LoadStrip(even)));
    StoreStrip(&ordered.values[2 * c + kStripSize], FromNatural(LoadStrip(odd)));
  }
  if (HasLongBlocks(m)) return Nf4DotsOfLongBlocks(m, ordered.values, n0, n1, y);
  const ScalePlaces places(m, 0, row_bytes);
  WithScales(m, places, [&](const auto& scales) { Nf4DotsOfAnyBlocks(m, scales, ordered.values, n0, n1, y); });
}

// Two dot products at a time, with x times the scales of their block of rows.
static inline void Nf4DotsOfPackedRows(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const LoadedTable table = TableOf<Nf4>();
  const Floats scaled(m.cols + kStripSize);
  for (int64_t start = n0; start < n1; start += m.block) {
    const float* scale = m.scale + start / m.block * m.cols;
    for (int64_t c = 0; c < m.cols; ++c) scaled.values[c] = x[c] * scale[c];
    std::memset(scaled.values + m.cols, 0, kStripSize * sizeof(float));
    for (int64_t c = 0; c < m.cols; c += kStripSize) {
      StoreStrip(&scaled.values[c], FromNatural(LoadStrip(&scaled.values[c])));
    }
    const int64_t end = Min(start + m.block, n1);
    for (int64_t n = start; n < end; n += 2) {
      Strip first{}, second{};
      ForEachBytes(m.planes[0] + n / 2 * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
        const Bytes pairs = LoadBytes(codes);
        const Strip xs = LoadStrip(&scaled.values[c]);
        AddProduct(first, LookUpHigh(table, pairs), xs);
        AddProduct(second, LookUpLow(table, pairs), xs);
      });
      y[n] = Sum(first);
      if (n + 1 < end) y[n + 1] = Sum(second);
    }
  }
}

inline void Nf4::RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  (m.packed_axis == 0 ? Nf4DotsOfPackedRows : Nf4DotsOfPackedColumns)(m, x, n0, n1, y);
}

// For few rows of x, values stay in lane order, and scales of blocks of rows, or of those of the transpose, wait for
// the sums. For more rows, nothing is gained by decoding faster.
struct Nf4::Panels {
  enum Kind { kPlain, kRows, kTransposed, kColumns };

  DecodedPanels<Nf4> plain;
  const Matrix& m;
  Kind kind;
  ScalePlaces places;
  alignas(64) float scales[kPanelColumns];

  Panels(const Matrix& m, int64_t count, int64_t n0, int64_t n1)
      : plain(m, count, n0, n1),
        m(m),
        kind(KindOf(m, count)),
        places(m, n0 / 2, kind == kColumns ? CeilDiv(n1 - n0, 2) : 0) {}

  static Kind KindOf(const Matrix& m, int64_t count) {
    if (count > kFewRows) return kPlain;
    if (m.contracted_axis == 0 && m.packed_axis == 1) return kColumns;
    if (m.contracted_axis != m.packed_axis || m.block < 32 || m.block % 8 != 0) return kPlain;
    return m.contracted_axis == 0 ? kRows : kTransposed;
  }

  int64_t End(int64_t k, int64_t end) const {
    return kind == kRows || kind == kTransposed ? Min(end, (k / m.block + 1) * m.block) : end;
  }

  const float* Decode(int64_t k0, int64_t depth, int64_t n, int64_t width, const PrefetchDistances& ahead,
                      float* panel) {
    if (kind == kPlain) return plain.Decode(k0, depth, n, width, ahead, panel);
    if (kind == kRows) return DecodeRows(m, k0, depth, n, ahead, panel);
    if (kind == kTransposed) {
      const TransposedCodes<Nf4> codes(m, k0, depth, n, width);
      return DecodeRows(codes.matrix, 0, depth, 0, PrefetchDistances(), panel);
    }
    DecodeColumns(k0, depth, n, ahead, panel);
    return nullptr;
  }

  bool IsNatural() const { return kind == kPlain; }

  void ToNatural(const float* values, float* to) const {
    if (kind == kColumns) return StorePairs(values, values + kStripSize, to);
    for (int i = 0; i < kPanelColumns; i += kStripSize) {
      StoreStrip(to + i, EFORMER_ISA::ToNatural(LoadStrip(values + i)));
    }
  }

 private:
  const float* DecodeRows(const Matrix& m, int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead,
                          float* panel) {
    const LoadedTable table = plain.table;
    const uint8_t* codes = m.planes[0] + k0 / 2 * m.cols + n;
    for (int64_t k = 0; k < depth; k += 2, codes += m.cols, panel += 2 * kPanelStride) {
      ahead.Prefetch(codes, k / 2);
      for (int64_t i = 0; i < kPanelColumns; i += kStripSize) {
        const Bytes pairs = LoadSome(codes + i, m.cols - n - i);
        StoreStrip(panel + i, LookUpHigh(table, pairs));
        StoreStrip(panel + i + kPanelStride, LookUpLow(table, pairs));
      }
    }
    const int64_t present = Min(kPanelColumns, m.cols - n);
    if (present < kPanelColumns) std::memset(scales, 0, sizeof scales);
    std::memcpy(scales, m.scale + k0 / m.block * m.cols + n, present * sizeof(float));
    for (int i = 0; i < kPanelColumns; i += kStripSize) StoreStrip(scales + i, FromNatural(LoadStrip(scales + i)));
    return scales;
  }

  // Even columns, then odd ones.
  void DecodeColumns(int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead, float* panel) {
    const LoadedTable table = plain.table;
    const int64_t row_bytes = m.RowBytes(2);
    const uint8_t* codes = m.planes[0] + k0 * row_bytes + n / 2;
    WithScales(m, places, [&](const auto& found) {
      const auto of_strip = found.Of(n / 2);
      for (int64_t k = 0; k < depth; ++k) {
        ahead.Prefetch(codes + k * row_bytes, k);
        const Bytes pairs = LoadSome(codes + k * row_bytes, row_bytes - n / 2);
        const auto factors = of_strip.At(k0 + k);
        StoreStrip(panel + k * kPanelStride, Times(LookUpHigh(table, pairs), factors));
        StoreStrip(panel + k * kPanelStride + kStripSize, Times(LookUpLow(table, pairs), factors));
      }
    });
  }
};

}  // namespace eformer::EFORMER_ISA
