// Rows of values as the matrix means them: codes decoded, scaled and offset, rounded in the order that the oracle has.
#pragma once

#include "matrix/decode.h"
#include "matrix/prefetch.h"
#include "matrix/scales.h"

namespace eformer::EFORMER_ISA {

EFORMER_INLINE Strip SpreadStrip(float number) {
  Strip strip;
  for (Vec& v : strip.v) v = Spread(number);
  return strip;
}

// How values less kCentre become those of the matrix, but for their scales.
struct ValueRule {
  float shift;  // kCentre, less what the matrix subtracts
  bool zeros, offsets;

  template <class Format>
  static ValueRule Of(const Matrix& m) {
    const bool has = Format::kScales == ScaleKind::kPerBlock && m.offsets.entries != nullptr;
    const float centre = Format::kScales == ScaleKind::kPerBlock ? m.centre : 0;
    return {Format::kCentre - centre, has && m.offsets_are_zeros, has && !m.offsets_are_zeros};
  }

  EFORMER_INLINE Strip Scaled(Strip values, const Strip& scales, const Strip& others) const {
    if (shift != 0) values = Plus(values, SpreadStrip(shift));
    if (zeros) values = Minus(values, others);
    values = Times(values, scales);
    return offsets ? Plus(Rounded(values), others) : values;
  }
};

// Spreads the numbers of blocks over the 64 columns from `c` on; `numbers` are of the block of column `c` and following.
EFORMER_INLINE void SpreadBlocks(const float* numbers, int64_t block, int64_t c, int64_t present, float* to) {
  for (int64_t i = 0, end = Min(present, block - c % block); i < present; ++numbers, end = Min(present, end + block)) {
    for (; i < end; ++i) to[i] = *numbers;
  }
}

// The numbers of the blocks that 64 columns of a row are in, from column `c` on; zeros behind those that are present.
EFORMER_NOINLINE static void NumbersOfRun(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t c,
                                          int64_t present, float* to) {
  float found[kRunValues];
  std::memset(to, 0, kRunValues * sizeof(float));
  if (m.packed_axis == 0) {
    std::memcpy(to, NumbersAt(m, all, row / m.block, c, present, found), present * sizeof(float));
  } else {
    const int64_t first = c / m.block, last = (c + present - 1) / m.block;
    SpreadBlocks(NumbersAt(m, all, row, first, last - first + 1, found), m.block, c, present, to);
  }
}

// Writes 64 values of a row from column `c` on, a multiple of 8; only `present` of them are in the matrix. Right for
// every place and block.
template <class Format>
EFORMER_NOINLINE static void DecodeRun(const Matrix& m, const Decoder<Format>& decoder, int64_t row, int64_t c,
                                       int64_t present, float* values) {
  present = Min(present, kRunValues);
  Bytes codes[2] = {};
  AddPlanes<Format>(m, row, c, present, codes);
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes);
  alignas(64) float scales[kRunValues], offsets[kRunValues] = {};
  const ValueRule rule = ValueRule::Of<Format>(m);
  if constexpr (Format::kScales == ScaleKind::kPerBlock) {
    NumbersOfRun(m, m.scales, row, c, present, scales);
    if (m.offsets.entries != nullptr) NumbersOfRun(m, m.offsets, row, c, present, offsets);
  } else {
    for (int64_t i = 0; i < kRunValues; ++i) {
      const bool is_there = m.scale != nullptr && i < present;
      scales[i] = is_there ? m.scale[row * m.scale_row_step + (c + i) * m.scale_col_step] : 1;
    }
  }
  Strip found[2];
  decoder.OfBytes(bytes, found);
  for (int half = 0; half < 2; ++half) {
    const int at = half * kStripSize;
    StoreStrip(values + at, rule.Scaled(found[half], LoadStrip(scales + at), LoadStrip(offsets + at)));
  }
}

// Numbers of blocks along the columns, as float32: where they are stored, or read once for several rows.
class RowsOfNumbers {
 public:
  // For the blocks of the columns n0 to n1.
  RowsOfNumbers(const Matrix& m, const BlockNumbers& all, int64_t n0, int64_t n1, int64_t max_rows)
      : m_(m),
        all_(all),
        exist_(m.packed_axis == 1 && all.entries != nullptr),
        in_place_(all.type == Number::kFloat32 && all.factors == nullptr),
        first_(exist_ ? n0 / m.block : 0),
        blocks_(exist_ ? CeilDiv(Min(n1, m.cols), m.block) - first_ : 0),
        buffer_(in_place_ ? 0 : max_rows * blocks_) {}

  void Take(int64_t row0, int64_t count) {
    if (!exist_ || row0 == first_row_) return;
    first_row_ = row0;
    stride_ = in_place_ ? m_.BlockScaleStride() : blocks_;
    rows_ = buffer_.values;
    if (in_place_) rows_ = static_cast<const float*>(all_.entries) + row0 * stride_ + first_;
    if (!in_place_) CopyNumbers(m_, all_, row0, count, first_, blocks_, buffer_.values);
  }

  // Those of row `k` of the taken ones, from the block of column `n` on.
  EFORMER_INLINE const float* Of(int64_t k, int64_t n) const { return rows_ + k * stride_ + n / m_.block - first_; }

 private:
  const Matrix& m_;
  const BlockNumbers& all_;
  const bool exist_, in_place_;
  const int64_t first_, blocks_;
  Floats buffer_;
  int64_t first_row_ = -1, stride_ = 0;
  const float* rows_ = nullptr;
};

// Decodes rows of a matrix, 64 columns at a time between the columns n0 and n1. Up to `max_rows` rows share what is
// read of scales.
template <class Format>
struct RowDecoder {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kUnit = UnitRows<Format>();

  const Matrix& m;
  const Decoder<Format> decoder;
  const ValueRule rule = ValueRule::Of<Format>(m);

  RowDecoder(const Matrix& m, int64_t n0, int64_t n1, int64_t max_rows)
      : m(m), decoder(m), scales(m, m.scales, n0, n1, max_rows), offsets(m, m.offsets, n0, n1, max_rows) {}

  // to[k * stride] = matrix[row0 + k, n : n + width], for `count` rows; behind the last column of the matrix may be
  // zeros, or nothing is written.
  void Decode(int64_t row0, int64_t count, int64_t n, int64_t width, const PrefetchDistances& ahead, float* to,
              int64_t stride) {
    const int64_t present = Min(width, m.cols - n);
    if (present < kRunValues) {
      for (int64_t k = 0; k < count; ++k) DecodeRun<Format>(m, decoder, row0 + k, n, present, to + k * stride);
    } else if (m.packed_axis == 0) {
      DecodeAcross(row0, count, n, ahead, to, stride);
    } else {
      DecodeAlong(row0, count, n, ahead, to, stride);
    }
  }

 private:
  RowsOfNumbers scales, offsets;

  void DecodeAcross(int64_t row0, int64_t count, int64_t n, const PrefetchDistances& ahead, float* to,
                    int64_t stride) const {
    const int64_t last = row0 + count;
    for (int64_t row = row0, end; row < last; row = end) {
      end = kInBlocks ? Min(last, (row / m.block + 1) * m.block) : last;
      alignas(64) float of_scales[kRunValues], of_offsets[kRunValues] = {};
      if constexpr (kInBlocks) {
        NumbersOfRun(m, m.scales, row, n, kRunValues, of_scales);
        if (rule.zeros || rule.offsets) NumbersOfRun(m, m.offsets, row, n, kRunValues, of_offsets);
      } else if (m.scale != nullptr && m.scale_row_step == 0) {
        for (int64_t i = 0; i < kRunValues; ++i) of_scales[i] = m.scale[(n + i) * m.scale_col_step];
      }
      const bool is_scaled = kInBlocks || (m.scale != nullptr && m.scale_row_step == 0);
      int64_t k = row;
      for (; k < end && (k % kUnit != 0 || k + kUnit > end); ++k) DecodeOne(k, n, to + (k - row0) * stride);
      for (; k + kUnit <= end; k += kUnit) {
        DecodeUnit(k, n, is_scaled, of_scales, of_offsets, ahead, to + (k - row0) * stride, stride);
      }
      for (; k < end; ++k) DecodeOne(k, n, to + (k - row0) * stride);
    }
  }

  void DecodeOne(int64_t row, int64_t n, float* to) const {
    DecodeRun<Format>(m, decoder, row, n, Min(kRunValues, m.cols - n), to);
  }

  EFORMER_INLINE void DecodeUnit(int64_t row, int64_t n, bool is_scaled, const float* of_scales,
                                 const float* of_offsets, const PrefetchDistances& ahead, float* to,
                                 int64_t stride) const {
    PlanePlaces<Format> places;
    PlacesAcross<Format>(m, row, n, places);
    const int64_t cols = m.cols;
    const Decoder<Format> local = decoder;  // copies stay in registers: stores of values cannot change them
    const ValueRule local_rule = rule;
    for (int plane = 0; plane < kPlanes<Format>; ++plane) {
      const int64_t rows = kUnit * Format::kPlaneBits[plane] / 8;
      for (int64_t i = 0; i < rows; ++i) ahead.Prefetch(places[plane] + i * cols, row / kUnit * rows + i);
    }
    for (int half = 0; half < 2; ++half) {
      const Strip scale = LoadStrip(of_scales + half * kStripSize), offset = LoadStrip(of_offsets + half * kStripSize);
      ForEach<kUnit>([&](auto i) {
        Strip values = local.template Across<i>(places, cols);
        if (is_scaled) values = local_rule.Scaled(values, scale, offset);
        if constexpr (!kInBlocks) {
          if (!is_scaled && m.scale != nullptr) values = Times(values, BroadcastScales(row + i, n + half * kStripSize));
        }
        StoreStrip(to + i * stride + half * kStripSize, values);
      });
      for (const uint8_t*& place : places) place += kStripSize;
    }
  }

  Strip BroadcastScales(int64_t row, int64_t c) const {
    const float* scale = m.scale + row * m.scale_row_step + c * m.scale_col_step;
    return m.scale_col_step == 0 ? SpreadStrip(*scale) : LoadStrip(scale);
  }

  void DecodeAlong(int64_t row0, int64_t count, int64_t n, const PrefetchDistances& ahead, float* to, int64_t stride) {
    scales.Take(row0, count);
    offsets.Take(row0, count);
    const Decoder<Format> local = decoder;
    const ValueRule local_rule = rule;
    const bool has_others = rule.zeros || rule.offsets;
    for (int64_t k = 0; k < count; ++k, to += stride) {
      PlanePlaces<Format> places;
      PlacesAlong<Format>(m, row0 + k, n, places);
      ahead.Prefetch(places[0], k);
      Strip scale[2], other[2] = {};
      if constexpr (kInBlocks) {
        StripsOf(scales.Of(k, n), n, scale);
        if (has_others) StripsOf(offsets.Of(k, n), n, other);
      } else {
        for (int half = 0; half < 2 && m.scale != nullptr; ++half) {
          scale[half] = BroadcastScales(row0 + k, n + half * kStripSize);
        }
      }
      ForEach<2>([&](auto half) {
        Strip values = local.template Along<half>(places);
        if (kInBlocks || m.scale != nullptr) values = local_rule.Scaled(values, scale[half], other[half]);
        StoreStrip(to + half * kStripSize, values);
      });
    }
  }

  // The numbers of 64 columns from `n` on, given those of their blocks.
  EFORMER_INLINE void StripsOf(const float* numbers, int64_t n, Strip (&to)[2]) const {
    if (m.block % kRunValues == 0) {
      to[0] = to[1] = SpreadStrip(*numbers);
    } else if (m.block % kLanes == 0 && n % m.block == 0) {
      for (int i = 0; i < kRunVectors; ++i) to[i / kStripVecs].v[i % kStripVecs] = Spread(numbers[i * kLanes / m.block]);
    } else {
      alignas(64) float spread[kRunValues];
      SpreadBlocks(numbers, m.block, n, kRunValues, spread);
      for (int half = 0; half < 2; ++half) to[half] = LoadStrip(spread + half * kStripSize);
    }
  }
};

// As Kernels::decode says.
template <class Format>
static void DecodeRows(const Matrix& m, int64_t r0, int64_t r1, float* values) {
  constexpr int64_t kAtOnce = 64;
  RowDecoder<Format> rows(m, 0, m.cols, kAtOnce);
  alignas(64) float rest[kRunValues];
  for (int64_t row = r0; row < r1; row += kAtOnce) {
    const int64_t count = Min(kAtOnce, r1 - row);
    float* to = values + (row - r0) * m.cols;
    int64_t n = 0;
    for (; n + kRunValues <= m.cols; n += kRunValues) {
      rows.Decode(row, count, n, kRunValues, PrefetchDistances(), to + n, m.cols);
    }
    for (int64_t k = 0; k < count && n < m.cols; ++k) {
      DecodeRun<Format>(m, rows.decoder, row + k, n, m.cols - n, rest);
      std::memcpy(to + k * m.cols + n, rest, (m.cols - n) * sizeof(float));
    }
  }
}

}  // namespace eformer::EFORMER_ISA
