// One row of x times a matrix contracted over its columns: a dot product per row of the matrix.
#ifndef EFORMER_COLUMNS_H_
#define EFORMER_COLUMNS_H_

#include "scales.h"

namespace eformer {
namespace EFORMER_ISA {

constexpr int64_t kPrefetched = 2048;  // bytes ahead, in the one stream that is read

// Calls add(codes, c) for each 32 bytes from byte `c` on of a row of `bytes`, all of which can be read.
template <class Add>
static inline void ForEachBytes(const uint8_t* codes, int64_t bytes, const Add& add) {
  int64_t c = 0;
  for (; c + kStrip <= bytes; c += kStrip) {
    if (c % 64 == 0) __builtin_prefetch(codes + c + kPrefetched);
    add(codes + c, c);
  }
  if (c < bytes) {
    const CopiedBytes copied(codes + c, 0, 1, bytes - c);
    add(copied.bytes[0], c);
  }
}

static inline void Int8Dots(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; ++n) {
    Strip sum{};
    ForEachBytes(m.codes + n * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
      AddProduct(sum, FromInt8(reinterpret_cast<const int8_t*>(codes)), LoadStrip(x + c));
    });
    y[n] = Sum(sum);
  }
}

// The dots of rows n0 to n1 with blocks of so many times 64 columns. `x` is in the order of the lookups.
static inline void Nf4DotsOfLongBlocks(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const LoadedTable table = LoadTable(MakeTable(kNf4Values));
  const int64_t row_bytes = m.RowBytes(), scales = m.BlockScaleStride();
  for (int64_t n = n0; n < n1; ++n) {
    const float* scale = m.scale + n * scales;
    Strip sum{}, block_sum{};
    int64_t block_end = m.block / 2;  // in bytes
    ForEachBytes(m.codes + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      if (c == block_end) {
        AddProduct(sum, block_sum, Spread(*scale++));
        block_sum = Strip{};
        block_end += m.block / 2;
      }
      const Bytes pairs = LoadBytes(codes);
      AddProduct(block_sum, LookUpHigh(table, pairs), LoadStrip(x + 2 * c));
      AddProduct(block_sum, LookUpLow(table, pairs), LoadStrip(x + 2 * c + kStrip));
    });
    y[n] = Sum(sum) + Sum(block_sum) * *scale;  // no product of the scale and an empty lane: it may be infinite
  }
}

// The same of blocks of any length, with scales of scales.h.
template <class Scales>
static inline void Nf4DotsOfAnyBlocks(const Matrix& m, const Scales& scales, const float* x, int64_t n0, int64_t n1,
                                      float* y) {
  const LoadedTable table = LoadTable(MakeTable(kNf4Values));
  const int64_t row_bytes = m.RowBytes();
  for (int64_t n = n0; n < n1; ++n) {
    Strip sum{};
    float rest = 0;
    ForEachBytes(m.codes + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      const Bytes pairs = LoadBytes(codes);
      Strip unscaled{};
      AddProduct(unscaled, LookUpHigh(table, pairs), LoadStrip(x + 2 * c));
      AddProduct(unscaled, LookUpLow(table, pairs), LoadStrip(x + 2 * c + kStrip));
      const auto factors = scales.Of(c).At(n);
      if (c + kStrip <= row_bytes) return AddProduct(sum, unscaled, factors);
      float last[kStrip];  // of which some lanes are empty, as above
      StoreStrip(last, ToNatural(Times(unscaled, factors)));
      for (int64_t i = 0; i < row_bytes - c; ++i) rest += last[i];
    });
    y[n] = Sum(sum) + rest;
  }
}

// Codes of two columns a byte.
static inline void Nf4DotsOfPackedColumns(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const int64_t row_bytes = m.RowBytes();
  const Floats ordered((row_bytes + kStrip) * 2);
  for (int64_t c = 0; c < row_bytes; c += kStrip) {
    float even[kStrip], odd[kStrip];
    for (int i = 0; i < kStrip; ++i) {
      even[i] = 2 * (c + i) < m.cols ? x[2 * (c + i)] : 0;
      odd[i] = 2 * (c + i) + 1 < m.cols ? x[2 * (c + i) + 1] : 0;
    }
    StoreStrip(&ordered.values[2 * c], FromNatural(LoadStrip(even)));
    StoreStrip(&ordered.values[2 * c + kStrip], FromNatural(LoadStrip(odd)));
  }
  if (HasLongBlocks(m)) return Nf4DotsOfLongBlocks(m, ordered.values, n0, n1, y);
  const Positions positions(m, 0, row_bytes);
  WithScales(m, positions, [&](const auto& scales) { Nf4DotsOfAnyBlocks(m, scales, ordered.values, n0, n1, y); });
}

// Codes of two rows a byte: two dot products at a time, with x times the scales of their block of rows.
static inline void Nf4DotsOfPackedRows(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const LoadedTable table = LoadTable(MakeTable(kNf4Values));
  const Floats scaled(m.cols + kStrip);
  for (int64_t start = n0; start < n1; start += m.block) {
    const float* scale = m.scale + start / m.block * m.cols;
    for (int64_t c = 0; c < m.cols; ++c) scaled.values[c] = x[c] * scale[c];
    std::memset(scaled.values + m.cols, 0, kStrip * sizeof(float));
    for (int64_t c = 0; c < m.cols; c += kStrip) StoreStrip(&scaled.values[c], FromNatural(LoadStrip(&scaled.values[c])));
    const int64_t end = Min(start + m.block, n1);
    for (int64_t n = start; n < end; n += 2) {
      Strip first{}, second{};
      ForEachBytes(m.codes + n / 2 * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
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

// Codes of four rows a byte: four dot products at a time.
static inline void TernaryDotsOfPackedRows(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += 4) {
    Vec sums[4][2] = {};
    ForEachBytes(m.codes + n / 4 * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
      for (int i = 0; i < kVecs; ++i) {
        const Vec xs = Load(x + c + i * kLanes);
        for (int r = 0; r < 4; ++r) {
          sums[r][i % 2] += LookUpPair(kTernaryValues, codes + i * kLanes, 2 * r) * xs;
        }
      }
    });
    for (int64_t r = 0; r < Min(4, n1 - n); ++r) y[n + r] = Sum(sums[r][0] + sums[r][1]);
  }
}

// Codes of four columns a byte. The elements of x for each place in a byte are brought together.
static inline void TernaryDotsOfPackedColumns(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const int64_t row_bytes = m.RowBytes(), stride = row_bytes + kStrip;
  const Floats of_place(4 * stride);
  for (int64_t c = 0; c < m.cols; ++c) of_place.values[c % 4 * stride + c / 4] = x[c];
  for (int64_t n = n0; n < n1; ++n) {
    Vec sums[4] = {};
    ForEachBytes(m.codes + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      for (int i = 0; i < kStrip; i += kLanes) {
        for (int place = 0; place < 4; ++place) {
          sums[place] += LookUpPair(kTernaryValues, codes + i, 2 * place) * Load(&of_place.values[place * stride + c + i]);
        }
      }
    });
    y[n] = Sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

static void MultiplyRowByColumns(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  switch (m.format) {
    case Format::kInt8:
      return Int8Dots(m, x, n0, n1, y);
    case Format::kNf4:
      return (m.packed_axis == 0 ? Nf4DotsOfPackedRows : Nf4DotsOfPackedColumns)(m, x, n0, n1, y);
    case Format::kTernary:
      return (m.packed_axis == 0 ? TernaryDotsOfPackedRows : TernaryDotsOfPackedColumns)(m, x, n0, n1, y);
  }
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_COLUMNS_H_
