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

// What is done with values, less the centre of the matrix, besides scaling them.
struct ValueRule {
  bool zeros, offsets;

  bool OnlyScales() const { return !zeros && !offsets; }

  template <class Format>
  static ValueRule Of(const Matrix& m) {
    const bool has = Format::kScales == ScaleKind::kPerBlock && m.offsets.entries != nullptr;
    return {has && m.offsets_are_zeros, has && !m.offsets_are_zeros};
  }

  EFORMER_INLINE Strip Scaled(Strip values, const Strip& scales, const Strip& others) const {
    if (zeros) values = Minus(values, others);
    values = Times(values, scales);
    return offsets ? Plus(Rounded(values), others) : values;
  }
};

// Spreads the numbers of blocks over the 64 columns from `c` on; `numbers` are of the block of column `c` and
// following.
EFORMER_INLINE void SpreadBlocks(const float* numbers, int64_t block, int64_t c, int64_t present, float* to) {
  for (int64_t i = 0, end = Min(present, block - c % block); i < present; ++numbers, end = Min(present, end + block)) {
    for (; i < end; ++i) to[i] = *numbers;
  }
}

// Values as the oracle has them before their scales.
template <class Format>
EFORMER_INLINE Decoder<Format> ExactDecoder(const Matrix& m) {
  return Decoder<Format>(m, Format::kScales == ScaleKind::kPerBlock ? m.centre : 0);
}

// The scales (or offsets) of 64 columns of a row from column `c` on, one for each column; zeros beyond `present`.
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

// Writes 64 values of a row from column `c` on, a multiple of 8, with an ExactDecoder; only `present` of them are in
// the matrix. Right for every place and block.
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

// Numbers of blocks along the columns, read once for several rows: where they are stored, if that is as float32 and not
// at the end, or copied. kLanes more can be read of each row.
class RowsOfNumbers {
 public:
  // For the blocks of the columns n0 to n1.
  EFORMER_NOINLINE RowsOfNumbers(const Matrix& m, const BlockNumbers& all, int64_t n0, int64_t n1, int64_t max_rows)
      : m_(m),
        all_(all),
        exist_(m.packed_axis == 1 && all.entries != nullptr),
        first_(exist_ ? n0 / m.block : 0),
        blocks_(exist_ ? CeilDiv(Min(n1, m.cols), m.block) - first_ : 0),
        buffer_(max_rows * blocks_ + kLanes) {}

  EFORMER_NOINLINE void Take(int64_t row0, int64_t count) {
    if (!exist_ || row0 == first_row_) return;
    first_row_ = row0;
    stride_ = m_.BlockScaleStride();
    const int64_t from = row0 * stride_ + first_;
    rows_ = static_cast<const float*>(all_.entries) + from;
    if (all_.IsPlain() && from + count * stride_ + kLanes <= m_.rows * stride_ + all_.behind) return;
    CopyNumbers(m_, all_, row0, count, first_, blocks_, buffer_.values);
    rows_ = buffer_.values;
    stride_ = blocks_;
  }

  // Those of row `k` of the taken ones, from the block of the first column on.
  EFORMER_INLINE const float* Row(int64_t k) const { return rows_ + k * stride_; }

 private:
  const Matrix& m_;
  const BlockNumbers& all_;
  const bool exist_;
  const int64_t first_, blocks_;
  const Floats buffer_;
  int64_t first_row_ = -1, stride_ = 0;
  const float* rows_ = nullptr;
};

// The blocks of a run of 64 columns from `n` on, counted from that of column n0.
struct BlocksOfRun {
  int64_t first[kRunVectors];  // of each vector
  Places places[kRunVectors];  // the block of each lane, from that one on

  EFORMER_NOINLINE BlocksOfRun(const Matrix& m, int64_t n, int64_t n0) {
    int64_t block = n / m.block - n0 / m.block, left = m.block - n % m.block;
    for (int v = 0; v < kRunVectors; ++v) {
      first[v] = block;
      for (int i = 0; i < kLanes; ++i) {
        places[v][i] = static_cast<int32_t>(block - first[v]);
        if (--left == 0) ++block, left = m.block;
      }
    }
  }

  // Their numbers for each column. kLong: each strip is in one block.
  template <bool kLong>
  EFORMER_INLINE void Strips(const float* numbers, Strip (&to)[2]) const {
    for (int v = 0; v < kRunVectors; ++v) {
      Vec& each = to[v / kStripVecs].v[v % kStripVecs];
      each = kLong ? Spread(numbers[first[v]]) : Pick(Load(numbers + first[v]), places[v]);
    }
  }
};

// Decodes rows of a matrix, 64 columns at a time between the columns n0 and n1. Up to `max_rows` rows share what is
// read of scales.
template <class Format>
struct RowDecoder {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kUnit = UnitRows<Format>();

  const Matrix& m;
  const int64_t n0;
  const Decoder<Format> decoder;
  const ValueRule rule = ValueRule::Of<Format>(m);

  RowDecoder(const Matrix& m, int64_t n0, int64_t n1, int64_t max_rows)
      : m(m),
        n0(n0),
        decoder(ExactDecoder<Format>(m)),
        scales(m, m.scales, n0, n1, max_rows),
        offsets(m, m.offsets, n0, n1, max_rows) {}

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

  // What is done with values after decoding them.
  enum Then { kNothing, kScale, kAll };

  void DecodeAcross(int64_t row0, int64_t count, int64_t n, const PrefetchDistances& ahead, float* to,
                    int64_t stride) const {
    const int64_t last = row0 + count;
    for (int64_t row = row0, end; row < last; row = end) {
      end = kInBlocks ? Min(last, (row / m.block + 1) * m.block) : last;
      alignas(64) float of_scales[kRunValues], of_offsets[kRunValues] = {};
      const bool is_shared = m.scale != nullptr && m.scale_row_step == 0;
      if constexpr (kInBlocks) {
        NumbersOfRun(m, m.scales, row, n, kRunValues, of_scales);
        if (rule.zeros || rule.offsets) NumbersOfRun(m, m.offsets, row, n, kRunValues, of_offsets);
      } else if (is_shared) {
        for (int64_t i = 0; i < kRunValues; ++i) of_scales[i] = m.scale[(n + i) * m.scale_col_step];
      }
      const int64_t first = Min(end, CeilDiv(row, kUnit) * kUnit), after = Max(first, end / kUnit * kUnit);
      float* const units = to + (first - row0) * stride;
      if constexpr (kInBlocks) {
        rule.OnlyScales() ? DecodeUnits<kScale>(first, after, n, of_scales, of_offsets, ahead, units, stride)
                          : DecodeUnits<kAll>(first, after, n, of_scales, of_offsets, ahead, units, stride);
      } else {
        is_shared ? DecodeUnits<kScale>(first, after, n, of_scales, of_offsets, ahead, units, stride)
                  : DecodeUnits<kNothing>(first, after, n, of_scales, of_offsets, ahead, units, stride);
        for (int64_t k = first; k < after && m.scale != nullptr && !is_shared; ++k) {
          for (int i = 0; i < kRunValues; i += kStripSize) {
            float* values = to + (k - row0) * stride + i;
            StoreStrip(values, Times(LoadStrip(values), BroadcastScales(k, n + i)));
          }
        }
      }
      for (int64_t k = row; k < first; ++k) DecodeRun<Format>(m, decoder, k, n, kRunValues, to + (k - row0) * stride);
      for (int64_t k = after; k < end; ++k) DecodeRun<Format>(m, decoder, k, n, kRunValues, to + (k - row0) * stride);
    }
  }

  // Whole units, from row `first` to `after`.
  template <Then kThen>
  EFORMER_NOINLINE void DecodeUnits(int64_t first, int64_t after, int64_t n, const float* of_scales,
                                    const float* of_offsets, const PrefetchDistances& ahead, float* to,
                                    int64_t stride) const {
    PlanePlaces<Format> places;
    PlacesAcross<Format>(m, first, n, places);
    const int64_t cols = m.cols;
    const Decoder<Format> local = decoder;  // copies stay in registers: stores of values cannot change them
    const ValueRule local_rule = rule;
    const Strip scales[2] = {LoadStrip(of_scales), LoadStrip(of_scales + kStripSize)};
    for (int64_t row = first; row < after; row += kUnit, to += kUnit * stride) {
      for (int plane = 0; plane < kPlanes<Format>; ++plane) {
        const int rows = kUnit * Format::kPlaneBits[plane] / 8;
        for (int i = 0; i < rows; ++i) ahead.Prefetch(places[plane] + i * cols, row / kUnit * rows + i);
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        PlanePlaces<Format> at;
        for (int plane = 0; plane < kPlanes<Format>; ++plane) at[plane] = places[plane] + half * kStripSize;
        ForEach<kUnit>([&](auto i) EFORMER_INLINED {
          Strip values = local.template Across<i>(at, cols);
          if constexpr (kThen == kScale) values = Times(values, scales[half]);
          if constexpr (kThen == kAll) {
            values = local_rule.Scaled(values, scales[half], LoadStrip(of_offsets + half * kStripSize));
          }
          StoreStrip(to + i * stride + half * kStripSize, values);
        });
      }
      for (int plane = 0; plane < kPlanes<Format>; ++plane) {
        places[plane] += kUnit * Format::kPlaneBits[plane] / 8 * cols;
      }
    }
  }

  Strip BroadcastScales(int64_t row, int64_t c) const {
    const float* scale = m.scale + row * m.scale_row_step + c * m.scale_col_step;
    return m.scale_col_step == 0 ? SpreadStrip(*scale) : LoadStrip(scale);
  }

  void DecodeAlong(int64_t row0, int64_t count, int64_t n, const PrefetchDistances& ahead, float* to, int64_t stride) {
    scales.Take(row0, count);
    offsets.Take(row0, count);
    if constexpr (kInBlocks) {
      const bool is_long = m.block % kStripSize == 0;
      if (rule.OnlyScales() && is_long) return DecodeRowsAlong<kScale, true>(row0, count, n, ahead, to, stride);
      if (rule.OnlyScales()) return DecodeRowsAlong<kScale, false>(row0, count, n, ahead, to, stride);
      if (is_long) return DecodeRowsAlong<kAll, true>(row0, count, n, ahead, to, stride);
      DecodeRowsAlong<kAll, false>(row0, count, n, ahead, to, stride);
    } else {
      if (m.scale == nullptr) return DecodeRowsAlong<kNothing, false>(row0, count, n, ahead, to, stride);
      DecodeRowsAlong<kScale, false>(row0, count, n, ahead, to, stride);
    }
  }

  // kLong: a strip is in one block.
  template <Then kThen, bool kLong>
  EFORMER_NOINLINE void DecodeRowsAlong(int64_t row0, int64_t count, int64_t n, const PrefetchDistances& ahead,
                                        float* to, int64_t stride) const {
    const Decoder<Format> local = decoder;
    const ValueRule local_rule = rule;
    PlanePlaces<Format> places;
    PlacesAlong<Format>(m, row0, n, places);
    const bool has_others = rule.zeros || rule.offsets;
    const BlocksOfRun blocks(m, n, n0);
    for (int64_t k = 0; k < count; ++k, to += stride) {
      ahead.Prefetch(places[0], k);
      Strip scale[2] = {}, other[2] = {};
      if constexpr (kInBlocks) {
        blocks.template Strips<kLong>(scales.Row(k), scale);
        if (kThen == kAll && has_others) blocks.template Strips<kLong>(offsets.Row(k), other);
      } else if constexpr (kThen == kScale) {
        for (int half = 0; half < 2; ++half) scale[half] = BroadcastScales(row0 + k, n + half * kStripSize);
      }
      ForEach<2>([&](auto half) EFORMER_INLINED {
        const auto scaled = [&](const Strip& values) EFORMER_INLINED {
          if constexpr (kThen == kAll) return local_rule.Scaled(values, scale[half], other[half]);
          return kThen == kScale ? Times(values, scale[half]) : values;
        };
        Strip values;
        if constexpr (kLong && Decoder<Format>::kScalesTable) {
          values = local.With(scaled(local.table.Values())).template Along<half>(places);
        } else {
          values = scaled(local.template Along<half>(places));
        }
        StoreStrip(to + half * kStripSize, values);
      });
      for (int plane = 0; plane < kPlanes<Format>; ++plane) {
        places[plane] += CeilDiv(m.cols, 8 / Format::kPlaneBits[plane]);
      }
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
