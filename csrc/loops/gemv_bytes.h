// One row of x as bytes times a matrix, contracted along its rows: some rows of codes are read side by side, from left
// to right over a stripe of columns, while the sums of a block wait in L1.
#pragma once

#include "matrix/pack_bytes.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kStripeColumns = 4096;
// Rows of bytes that are read side by side; the best from memory, on Zen 5.
#if defined(EFORMER_BYTE_DOTS)
constexpr int64_t kLineRows = 8;
#else
constexpr int64_t kLineRows = 16;
#endif

// Prefetches the rows behind those that are read side by side, one after the other from end to end: of rows side by
// side, memory gives less.
template <bool kIntoL1>
struct RowsAhead {
  const uint8_t *at, *end;  // what is next, and where its row ends
  int64_t stride, width;    // of rows

  RowsAhead(const uint8_t* first, int64_t stride, int64_t width)
      : at(first), end(first + width), stride(stride), width(width) {}

  EFORMER_INLINE void Prefetch() {
    kIntoL1 ? __builtin_prefetch(at, 0, 0) : __builtin_prefetch(at, 0, 2);
    at += kIntBytes;
    if (at >= end) end += stride, at = end - width;
  }
};

template <class Format, bool kPacked, int kParts>
struct Stripe {
  static constexpr int kPlaces = kPacked ? kValuesPerByte<Format> : 1;
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  typedef DotsOf<Format> Dots;

  const Matrix m;
  const ByteX& x;
  const int64_t n, width;                    // the first column, and the number of columns
  alignas(64) int32_t sums[kStripeColumns];  // of a block, or floats in parts; columns are in the order of panels
  alignas(64) float totals[kStripeColumns];  // from here on, columns are in order
  alignas(64) int32_t nan[kStripeColumns];   // bits of columns, in the order of panels
  ScaleBuffers buffers;
  RowOfScales scales;  // of a block
  ScalesAhead scales_ahead;

  Stripe(const Matrix& m, const ByteX& x, int64_t n, int64_t width) : m(m), x(x), n(n), width(width) {
    const int64_t padded = CeilDiv(width, kPanelColumns) * kPanelColumns;
    std::memset(totals, 0, padded * sizeof(float));
    if (Int8Codes<Format>::kHasNaN) std::memset(nan, 0, padded * sizeof(int32_t));
  }

  // Adds x[k : k + block] @ matrix[k : k + block].
  void AddBlock(int64_t k) {
    const int64_t first = k / kPlaces, rows = Min(x.order.block / kPlaces, CeilDiv(m.rows, kPlaces) - first);
    for (int64_t r = 0; r < rows; r += kLineRows) {
      const Group group = GroupOf(k / x.order.block, first + r, Min(kLineRows, rows - r), k + r * kPlaces, r == 0,
                                  r + kLineRows >= rows);
      const int64_t whole = group.count % 4 == 0 && kPacked ? width / kPanelColumns * kPanelColumns : 0;
      const uint8_t* first_code = m.planes[0] + group.row * m.cols + n;
      RowsAhead<(kLineRows * kStripeColumns <= 32768)> ahead(first_code + group.count * m.cols, m.cols, width);
      ScalesAhead of_scales = scales_ahead;
      const int64_t stride = m.cols;
      for (int64_t c = 0; c < whole; c += kLineColumns) {
        of_scales.Prefetch();
        AddLine(group, first_code + c, stride, c, [&] { ahead.Prefetch(); });
      }
      for (int64_t c = whole; c < width; c += kPanelColumns) {
        alignas(64) uint8_t copy[kLineRows][kPanelColumns] = {};
        CopyRows(group, c, copy);
        of_scales.Prefetch();
        for (int64_t at = 0; at < kPanelColumns; at += kLineColumns) {
          AddLine(group, copy[0] + at, kPanelColumns, c + at, [] {});
        }
      }
      scales_ahead = of_scales;
    }
  }

  // Finds the scales of a block of the matrix, and has those of the next prefetched.
  void TakeScales(int64_t block) {
    scales = buffers.Take(m, block, n, width, CentreOf<Format>(m));
    scales_ahead = ScalesAhead(m, block + 1, n, width);
  }

  void Write(float* y) const {
    std::memcpy(y, totals, width * sizeof(float));
    if constexpr (Int8Codes<Format>::kHasNaN) {
      for (int64_t c = 0; c < CeilDiv(width, kPanelColumns) * kPanelColumns; ++c) {
        const int64_t at = c % kPanelColumns, column = c - at + kPanelFours[at / 4] + at % 4;
        if (nan[c] != 0 && column < width) y[column] = __builtin_nanf("");
      }
    }
  }

 private:
  // Some rows of bytes of a block, and all that is the same for their columns.
  struct Group {
    int64_t row, count;  // the first row, and how many
    const int8_t* x;
    bool starts, ends;           // the block
    int32_t first_sums[kParts];  // what sums of the block start with
    float step, x_sum;           // of the block
    RowOfScales scales;
  };

  Group GroupOf(int64_t block, int64_t row, int64_t count, int64_t k, bool starts, bool ends) const {
    Group group = {
        row,   count, x.values + k * kParts, starts, ends, {}, x.steps[block] / Format::kInt8Steps, x.totals[block],
        scales};
    for (int part = 0; part < kParts; ++part) {
      group.first_sums[part] = -BiasOf<Format>(m) * x.sums[block * kParts + part];
    }
    return group;
  }

  // Copies columns `c` and following, or their codes, with zeros behind the last row and column.
  void CopyRows(const Group& group, int64_t c, uint8_t (&copy)[kLineRows][kPanelColumns]) const {
    for (int64_t j = 0; j < group.count; ++j) {
      if constexpr (kPacked) {
        std::memcpy(copy[j], m.planes[0] + (group.row + j) * m.cols + n + c, Min(kPanelColumns, width - c));
      } else {
        Bytes codes[2] = {};
        AddPlanes<Format>(m, group.row + j, n + c, width - c, codes);
        std::memcpy(copy[j], codes, sizeof codes);
      }
    }
  }

  // Adds the group's rows of bytes, from columns `c` on, times x, and calls prefetch() for each row.
  template <class Prefetch>
  EFORMER_INLINE void AddLine(const Group& group, const uint8_t* from, int64_t stride, int64_t c,
                              const Prefetch& prefetch) {
    Ints dots[kParts][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 3
      for (int part = 0; part < kParts; ++part) {
        dots[part][i] = group.starts  ? group.first_sums[part] - Ints{}
                        : kParts == 1 ? LoadVector<Ints>(sums + c + i * kIntLanes)
                                      : Ints{};
      }
    }
    const int8_t* xs = group.x;
    for (int64_t r = 0; r < group.count; r += 4, xs += 4 * kPlaces * kParts) {
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
        if constexpr (Int8Codes<Format>::kHasNaN) {
          int32_t* to = nan + c + i * kIntLanes;
          StoreVector(to, LoadVector<IntBytes>(to) | FindNaN(flipped));
        }
        typename Dots::Sum sum[kParts];
#pragma GCC unroll 3
        for (int part = 0; part < kParts; ++part) sum[part] = Dots::Start(dots[part][i]);
        ForEachPlace<kPlaces>([&](auto place) {
          const auto codes = Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped));
#pragma GCC unroll 3
          for (int part = 0; part < kParts; ++part) {
            sum[part] = Dots::Add(sum[part], codes, SpreadFour(xs + 4 * (place * kParts + part)));
          }
        });
#pragma GCC unroll 3
        for (int part = 0; part < kParts; ++part) dots[part][i] = Dots::Finish(sum[part], dots[part][i]);
      }
    }
    Reals found[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      int32_t* stored = sums + c + i * kIntLanes;
      if constexpr (kParts == 1) {
        if (!group.ends) StoreVector(stored, dots[0][i]);
        found[i] = ToReals(dots[0][i]);
      } else {
        found[i] = Joined<kParts>([&](int part) { return dots[part][i]; });
        if (!group.starts) found[i] += LoadVector<Reals>(stored);
        if (!group.ends) StoreVector(stored, found[i]);
      }
    }
    if (group.ends) Scale(group, c, found);
  }

  // Adds the sums of a block, scaled, to the totals.
  EFORMER_INLINE void Scale(const Group& group, int64_t c, const Reals (&sums_found)[4]) {
    alignas(64) float found[kLineColumns];
    StoreInOrder(sums_found, found);
    const Reals unit = group.step - Reals{};
#pragma GCC unroll 4
    for (int i = 0; i < kLineColumns; i += kIntLanes) {
      Reals total = LoadVector<Reals>(totals + c + i);
      const Reals scale = kInBlocks ? group.scales.template Scale<Reals>(c + i) : 1 - Reals{};
      total += LoadVector<Reals>(found + i) * (unit * scale);
      if (group.scales.has_offsets) total += group.scales.template Offset<Reals>(c + i, scale) * group.x_sum;
      StoreVector(totals + c + i, total);
    }
  }
};

// As Kernels::byte_matmul says, for one row and contracted_axis 0.
template <class Format, bool kPacked, int kParts>
static void ByteRowMatmul(const Matrix& m, const ByteX& x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += kStripeColumns) {
    Stripe<Format, kPacked, kParts> stripe(m, x, n, Min(kStripeColumns, n1 - n));
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
