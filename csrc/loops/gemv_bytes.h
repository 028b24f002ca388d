// One row of x as bytes times a matrix, contracted along its rows: some rows of codes are read side by side, from left
// to right over a stripe of columns, while the sums of a block wait in L1. Codes are multiplied where they lie.
#pragma once

#include "matrix/pack_bytes.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kStripeColumns = 4096;  // at most
// Rows of bytes that are read side by side; the best from memory, on Zen 5.
#if defined(EFORMER_BYTE_DOTS)
constexpr int64_t kLineRows = 8;
#else
constexpr int64_t kLineRows = 16;
#endif

// A row of x times a stripe of columns.
template <class Format, int kParts>
struct Stripe {
  static constexpr int kPlaces = kValuesPerByte<Format>;
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr bool kHasNaN = Int8Codes<Format>::kHasNaN;
  static constexpr bool kIntoL1 = kLineRows * kStripeColumns <= 32768;  // where codes are prefetched
  typedef DotsOf<Format> Dots;

  const Matrix m;
  const ByteX& x;
  const int64_t n, width;  // the first column, and the number of columns
  const int64_t padded = CeilDiv(width, kPanelColumns) * kPanelColumns;
  // Columns are in the order of panels.
  const Zeros<int32_t> sums{padded};  // of a block, or floats where x is in parts
  const Floats totals{padded};
  const Zeros<int32_t> nan{kHasNaN ? padded : 0};  // bits of columns
  ScaleBuffers buffers;
  RowOfScales scales;  // of a block
  ScalesAhead scales_ahead;

  Stripe(const Matrix& m, const ByteX& x, int64_t n, int64_t width) : m(m), x(x), n(n), width(width) {}

  // Adds x[k : k + block] @ matrix[k : k + block].
  void AddBlock(int64_t k) {
    const int64_t first = k / kPlaces, rows = Min(x.order.block / kPlaces, CeilDiv(m.rows, kPlaces) - first);
    for (int64_t r = 0; r < rows; r += kLineRows) {
      const int64_t count = Min(kLineRows, rows - r);
      const Lines lines = {first + r, count, k / x.order.block, k + r * kPlaces, r == 0, r + kLineRows >= rows};
      const int64_t whole = count % 4 == 0 ? width / kPanelColumns * kPanelColumns : 0;
      const uint8_t* codes = m.planes[0] + lines.row * m.cols + n;
      LinesAhead ahead(codes + count * m.cols, m.cols, width);
      AddColumns(lines, codes, m.cols, 0, whole, [&]() EFORMER_INLINED { ahead.Prefetch<1, kIntBytes, kIntoL1>(); });
      for (int64_t c = whole; c < width; c += kPanelColumns) {
        alignas(64) uint8_t copy[kLineRows][kPanelColumns] = {};
        CopyRows(lines, c, copy);
        AddColumns(lines, copy[0], kPanelColumns, c, c + kPanelColumns, [] {});
      }
    }
  }

  // Finds the scales of a block of the matrix, and has those of the next prefetched.
  void TakeScales(int64_t block) {
    scales = buffers.Take(m, block, n, width, CentreOf<Format>(m));
    scales_ahead = ScalesAhead(m, block + 1, n, width);
  }

  void Write(float* y) const {
    for (int64_t c = 0; c < width; c += kLineColumns) {
      float* from = totals.values + c;
      for (int64_t i = 0; i < kLineColumns && kHasNaN; ++i) {
        if (nan.values[c + i] != 0) from[i] = __builtin_nanf("");
      }
      Reals line[4];
      for (int i = 0; i < 4; ++i) line[i] = LoadVector<Reals>(from + i * kIntLanes);
      ToColumnOrder(line);
      if (c + kLineColumns <= width) {
        std::memcpy(y + c, line, sizeof line);
      } else {
        std::memcpy(y + c, line, (width - c) * sizeof(float));
      }
    }
  }

 private:
  // Some rows of bytes of a block.
  struct Lines {
    int64_t row, count;  // the first row, and how many
    int64_t block, k;    // of x, and the depth
    bool starts, ends;   // the block
  };

  // Copies columns `c` and following, with zeros behind the last row and column.
  void CopyRows(const Lines& lines, int64_t c, uint8_t (&copy)[kLineRows][kPanelColumns]) const {
    for (int64_t j = 0; j < lines.count; ++j) {
      std::memcpy(copy[j], m.planes[0] + (lines.row + j) * m.cols + n + c, Min(kPanelColumns, width - c));
    }
  }

  // Adds rows of bytes times x, from columns `c0` to `c1`, and calls prefetch() for each row of each line.
  template <class Prefetch>
  EFORMER_INLINE void AddColumns(const Lines& lines, const uint8_t* from, int64_t stride, int64_t c0, int64_t c1,
                                 const Prefetch& prefetch) {
    int32_t starts[kParts];
    for (int part = 0; part < kParts; ++part) starts[part] = -BiasOf<Format>(m) * x.sums[lines.block * kParts + part];
    const float step = x.steps[lines.block] / Format::kInt8Steps;
    const RowOfScales row_scales = scales;
    ScalesAhead of_scales = scales_ahead;
    for (int64_t c = c0; c < c1; c += kLineColumns, from += kLineColumns) {
      int32_t* stored = sums.values + c;
      of_scales.Prefetch();
      Ints dots[kParts][4];
#pragma GCC unroll 6
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          dots[part][i] = lines.starts  ? starts[part] - Ints{}
                          : kParts == 1 ? LoadVector<Ints>(stored + i * kIntLanes)
                                        : Ints{};
        }
      }
      AddLines(from, stride, lines.count, x.values + lines.k * kParts, c, dots, prefetch);
      Reals found[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        if constexpr (kParts == 1) {
          if (!lines.ends) StoreVector(stored + i * kIntLanes, dots[0][i]);
          found[i] = ToReals(dots[0][i]);
        } else {
          found[i] = Joined<kParts>([&](int part) EFORMER_INLINED { return dots[part][i]; });
          if (!lines.starts) found[i] += LoadVector<Reals>(stored + i * kIntLanes);
          if (!lines.ends) StoreVector(stored + i * kIntLanes, found[i]);
        }
      }
      if (lines.ends) AddScaled(row_scales, c, step, x.totals[lines.block], found, totals.values + c);
    }
    scales_ahead = of_scales;
  }

  // Adds rows of bytes times x, and calls prefetch() for each row.
  template <class Prefetch>
  EFORMER_INLINE void AddLines(const uint8_t* from, int64_t stride, int64_t count, const int8_t* xs, int64_t c,
                               Ints (&dots)[kParts][4], const Prefetch& prefetch) const {
    for (int64_t r = 0; r < count; r += 4, xs += 4 * kPlaces * kParts) {
      IntBytes rows[4], quads[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, from += stride) {
        prefetch();
        rows[j] = LoadVector<IntBytes>(from);
      }
      QuadsOfRows(rows, quads);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const IntBytes flipped = FlipPacked<Format, kPlaces>(quads[i]);
        if constexpr (kHasNaN) {
          int32_t* to = nan.values + c + i * kIntLanes;
          StoreVector(to, LoadVector<IntBytes>(to) | FindNaN(flipped));
        }
        typename Dots::Sum sum[kParts];
#pragma GCC unroll 6
        for (int part = 0; part < kParts; ++part) sum[part] = Dots::Start(dots[part][i]);
        ForEachPlace<kPlaces>([&](auto place) EFORMER_INLINED {
          const auto codes = Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped));
#pragma GCC unroll 6
          for (int part = 0; part < kParts; ++part) {
            sum[part] = Dots::Add(sum[part], codes, SpreadFour(xs + 4 * (place * kParts + part)));
          }
        });
#pragma GCC unroll 6
        for (int part = 0; part < kParts; ++part) dots[part][i] = Dots::Finish(sum[part], dots[part][i]);
      }
    }
  }

  // Adds the sums of a block, scaled, to the totals.
  EFORMER_INLINE static void AddScaled(const RowOfScales& row, int64_t c, float step, float x_sum,
                                       const Reals (&found)[4], float* totals) {
    Reals scale[4], offset[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4 && kInBlocks; ++i) {
      scale[i] = row.template Scale<Reals>(c + i * kIntLanes);
      if (row.has_offsets) offset[i] = row.template Offset<Reals>(c + i * kIntLanes, scale[i]);
    }
    if (kInBlocks) ToPanelOrder(scale);
    if (kInBlocks && row.has_offsets) ToPanelOrder(offset);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      float* to = totals + i * kIntLanes;
      Reals total = LoadVector<Reals>(to) + found[i] * (kInBlocks ? scale[i] * step : step - Reals{});
      if (kInBlocks && row.has_offsets) total += offset[i] * x_sum;
      StoreVector(to, total);
    }
  }
};

// As Kernels::byte_matmul says, for contracted_axis 0 and one row.
template <class Format, int kParts>
static void ByteGemv(const Matrix& m, const ByteX& x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += kStripeColumns) {
    Stripe<Format, kParts> stripe(m, x, n, Min(kStripeColumns, n1 - n));
    for (int64_t k = k0; k < k1; k += x.order.block) {
      if constexpr (Format::kScales == ScaleKind::kPerBlock) {
        if (k == k0 || k % m.block == 0) stripe.TakeScales(k / m.block);
      }
      stripe.AddBlock(k);
    }
    stripe.Write(y + n);
  }
}

}  // namespace eformer::EFORMER_ISA
