// One row of x times a matrix contracted over its rows: each row of codes, times its x, is added to the sums.
//
// A few rows are taken at a time, from left to right, so that memory is read as a few sequential streams.
#ifndef EFORMER_ROWS_H_
#define EFORMER_ROWS_H_

#include "scales.h"

namespace eformer {
namespace EFORMER_ISA {

static inline void Int8RowByRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                 float* sums) {
  for (int64_t k = k0; k < k1; k += kMaxCopied) {
    const int rows = static_cast<int>(Min(kMaxCopied, k1 - k));
    const uint8_t* first = m.codes + k * m.cols + n0;
    const int64_t pairs = (n1 - n0) / (2 * kStrip) * (2 * kStrip);
    for (int64_t n = 0; n < pairs; n += 2 * kStrip) {  // a line of cache
      const uint8_t* codes = first + n;
      Strip left = LoadStrip(sums + n), right = LoadStrip(sums + n + kStrip);
      for (int r = 0; r < rows; ++r, codes += m.cols) {
        PrefetchAfter(codes, kMaxCopied * m.cols);
        const Vec factor = Spread(x[k + r]);
        AddProduct(left, FromInt8(reinterpret_cast<const int8_t*>(codes)), factor);
        AddProduct(right, FromInt8(reinterpret_cast<const int8_t*>(codes + kStrip)), factor);
      }
      StoreStrip(sums + n, left);
      StoreStrip(sums + n + kStrip, right);
    }
    ForEachStrip(first + pairs, m.cols, rows, n1 - n0 - pairs, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip sum = LoadStrip(sums + pairs + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        AddProduct(sum, FromInt8(reinterpret_cast<const int8_t*>(codes)), Spread(x[k + r]));
      }
      StoreStrip(sums + pairs + n, sum);
    });
  }
}

// Codes of two rows a byte. The sums of a block, in lane order, wait in `block_sums` for their scale.
static inline void Nf4RowByPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                      float* sums) {
  alignas(64) float block_sums[kStripe + kStrip];
  const LoadedTable table = LoadTable(MakeTable(kNf4Values));
  for (int64_t k = k0; k < k1; k += m.block) {
    const int64_t last = Min(k + m.block, k1);
    const float* scale = m.scale + k / m.block * m.BlockScaleStride() + n0;
    for (int64_t r0 = k / 2; r0 < (last + 1) / 2; r0 += kRowGroup) {
      const int rows = static_cast<int>(Min(kRowGroup, (last + 1) / 2 - r0));
      const bool starts = r0 == k / 2, ends = r0 + rows == (last + 1) / 2;
      const float* xs = x + 2 * r0;
      ForEachStrip(m.codes + r0 * m.cols + n0, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
        Strip sum = starts ? Strip{} : LoadStrip(block_sums + n);
        for (int r = 0; r < rows; ++r, codes += stride) {
          PrefetchAfter(codes, kRowGroup * stride);
          const Bytes pairs = LoadBytes(codes);
          AddProduct(sum, LookUpHigh(table, pairs), Spread(xs[2 * r]));
          AddProduct(sum, LookUpLow(table, pairs), Spread(xs[2 * r + 1]));
        }
        if (!ends) return StoreStrip(block_sums + n, sum);
        float scales[kStrip];
        const int64_t present = Min(kStrip, n1 - n0 - n);
        if (present < kStrip) std::memset(scales, 0, sizeof scales);
        std::memcpy(scales, scale + n, present * sizeof(float));
        Strip total = LoadStrip(sums + n);
        AddProduct(total, ToNatural(sum), LoadStrip(scales));
        StoreStrip(sums + n, total);
      });
    }
  }
}

// Codes of two columns a byte, with scales of scales.h. The sums of even and of odd columns are kept apart, in lane
// order, until the end.
template <class Scales>
static inline void Nf4RowByScaledColumns(const Matrix& m, const Scales& scales, const float* x, int64_t k0, int64_t k1,
                                         int64_t n0, int64_t n1, float* sums) {
  alignas(64) float even[kStripe / 2 + kStrip] = {}, odd[kStripe / 2 + kStrip] = {};
  const LoadedTable table = LoadTable(MakeTable(kNf4Values));
  const int64_t row_bytes = m.RowBytes(), bytes = (n1 - n0 + 1) / 2;
  for (int64_t k = k0; k < k1; k += kRowGroup) {
    const int rows = static_cast<int>(Min(kRowGroup, k1 - k));
    const uint8_t* codes = m.codes + k * row_bytes + n0 / 2;
    ForEachStrip(codes, row_bytes, rows, bytes, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip of_even = LoadStrip(even + n), of_odd = LoadStrip(odd + n);
      const auto of_strip = scales.Of(n0 / 2 + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        PrefetchAfter(codes, kRowGroup * stride);
        const Bytes pairs = LoadBytes(codes);
        const auto factor = Times(of_strip.At(k + r), Spread(x[k + r]));
        AddProduct(of_even, LookUpHigh(table, pairs), factor);
        AddProduct(of_odd, LookUpLow(table, pairs), factor);
      }
      StoreStrip(even + n, of_even);
      StoreStrip(odd + n, of_odd);
    });
  }
  for (int64_t n = 0; n < bytes; n += kStrip) {
    StoreStrip(even + n, ToNatural(LoadStrip(even + n)));
    StoreStrip(odd + n, ToNatural(LoadStrip(odd + n)));
  }
  for (int64_t n = 0; n < n1 - n0; ++n) sums[n] = n % 2 ? odd[n / 2] : even[n / 2];
}

static inline void Nf4RowByPackedColumns(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                         float* sums) {
  const Positions positions(m, n0 / 2, (n1 - n0 + 1) / 2);
  WithScales(m, positions, [&](const auto& scales) { Nf4RowByScaledColumns(m, scales, x, k0, k1, n0, n1, sums); });
}

// Codes of four rows a byte: one lookup adds two of them, from the sums of all multiples of two neighbours in x.
static inline void TernaryRowByPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0,
                                          int64_t n1, float* sums) {
  Table tables[kRowGroup][2];
  for (int64_t r0 = k0 / 4; r0 < (k1 + 3) / 4; r0 += kRowGroup) {
    const int rows = static_cast<int>(Min(kRowGroup, (k1 + 3) / 4 - r0));
    for (int r = 0; r < rows; ++r) {
      const float* xs = x + 4 * (r0 + r);
      tables[r][0] = MakePairTable(kTernaryLow, kTernaryHigh, xs[0], xs[1]);
      tables[r][1] = MakePairTable(kTernaryLow, kTernaryHigh, xs[2], xs[3]);
    }
    ForEachStrip(m.codes + r0 * m.cols + n0, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip sum = LoadStrip(sums + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        PrefetchAfter(codes, kRowGroup * stride);
        const Bytes fours = LoadBytes(codes);
        Add(sum, LookUpLow(LoadTable(tables[r][0]), fours));
        Add(sum, LookUpHigh(LoadTable(tables[r][1]), fours));
      }
      StoreStrip(sums + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStrip) StoreStrip(sums + n, ToNatural(LoadStrip(sums + n)));
}

// Codes of four columns a byte: those of two rows, side by side, are looked up as above. The sums of each place in a
// byte are kept apart, in lane order, until the end.
static inline void TernaryRowByPackedColumns(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0,
                                             int64_t n1, float* sums) {
  alignas(64) float of_place[4][kStripe / 4 + kStrip] = {};
  const int64_t row_bytes = m.RowBytes(), bytes = (n1 - n0 + 3) / 4;
  Table tables[kRowGroup / 2];
  for (int64_t k = k0; k < k1; k += kRowGroup) {
    const int rows = static_cast<int>(Min(kRowGroup, k1 - k));
    for (int r = 0; r < rows; r += 2) {
      tables[r / 2] = MakePairTable(kTernaryLow, kTernaryHigh, x[k + r], r + 1 < rows ? x[k + r + 1] : 0);
    }
    const uint8_t* codes = m.codes + k * row_bytes + n0 / 4;
    ForEachStrip(codes, row_bytes, rows, bytes, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      for (int r = 0; r < rows; ++r) PrefetchAfter(codes + r * stride, kRowGroup * stride);
      for (int place = 0; place < 4; ++place) {
        Strip sum = LoadStrip(of_place[place] + n);
        for (int r = 0; r < rows; r += 2) {
          const Bytes first = LoadBytes(codes + r * stride);
          const Bytes second = r + 1 < rows ? LoadBytes(codes + (r + 1) * stride) : Bytes{};
          const Bytes above = place == 0 ? ShiftUp(second, 2) : ShiftDown(second, 2 * place - 2);
          Add(sum, LookUpLow(LoadTable(tables[r / 2]), (ShiftDown(first, 2 * place) & 3) | (above & 12)));
        }
        StoreStrip(of_place[place] + n, sum);
      }
    });
  }
  for (auto& of : of_place) {
    for (int64_t n = 0; n < bytes; n += kStrip) StoreStrip(of + n, ToNatural(LoadStrip(of + n)));
  }
  for (int64_t n = 0; n < n1 - n0; ++n) sums[n] = of_place[n % 4][n / 4];
}

static void MultiplyRowByRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) float sums[kStripe + kStrip] = {};
  switch (m.format) {
    case Format::kInt8:
      Int8RowByRows(m, x, k0, k1, n0, n1, sums);
      break;
    case Format::kNf4:
      (m.packed_axis == 0 ? Nf4RowByPackedRows : Nf4RowByPackedColumns)(m, x, k0, k1, n0, n1, sums);
      break;
    case Format::kTernary:
      (m.packed_axis == 0 ? TernaryRowByPackedRows : TernaryRowByPackedColumns)(m, x, k0, k1, n0, n1, sums);
      break;
  }
  std::memcpy(y, sums, (n1 - n0) * sizeof(float));
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_ROWS_H_
