// One row of x rounded to int8 times a matrix, contracted along its rows: some rows of bytes are read side by side,
// from left to right over a stripe of columns, while the sums of a block wait in L1.
#pragma once

#include <initializer_list>

#include "matrix/pack_bytes.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kStripeColumns = 4096;
// Rows of bytes that are read side by side; the best from memory, on Zen 5.
#if defined(EFORMER_BYTE_DOTS)
constexpr int64_t kLineRows = 8;
#else
constexpr int64_t kLineRows = 16;
#endif

// Stores numbers that are in the order of panels.
EFORMER_INLINE void StoreInOrder(float* to, const Reals (&v)[4]) {
#if defined(EFORMER_BYTE_DOTS)
  StoreLine(to, v);
#else
  for (int i = 0; i < kLineColumns / 4; ++i) {
    std::memcpy(to + kPanelFours[i], reinterpret_cast<const char*>(v) + 16 * i, 16);
  }
#endif
}

template <class Format, bool kPacked>
struct Int8Stripe {
  static constexpr int kPlaces = kPacked ? kValuesPerByte<Format> : 1;
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  typedef DotsOf<Format> Dots;

  const Matrix m;
  const Int8X& x;
  const int64_t n, width;                    // the first column, and the number of columns
  alignas(64) int32_t sums[kStripeColumns];  // of a block; columns are in the order of panels
  alignas(64) float totals[kStripeColumns];  // from here on, columns are in order
  alignas(64) int32_t nan[kStripeColumns];   // bits of columns, in the order of panels
  ScaleBuffers buffers;
  RowOfScales scales;  // of a block
  ScalesAhead scales_ahead;

  Int8Stripe(const Matrix& m, const Int8X& x, int64_t n, int64_t width) : m(m), x(x), n(n), width(width) {
    const int64_t padded = CeilDiv(width, kPanelColumns) * kPanelColumns;
    std::memset(totals, 0, padded * sizeof(float));
    if (Int8Codes<Format>::kHasNaN) std::memset(nan, 0, padded * sizeof(int32_t));
  }

  // Adds x[k : k + block] @ matrix[k : k + block].
  void AddBlock(int64_t k) {
    const int64_t first = k / kPlaces, rows = Min(x.block / kPlaces, CeilDiv(m.rows, kPlaces) - first);
    for (int64_t r = 0; r < rows; r += kLineRows) {
      const Part part =
          PartOf(k / x.block, first + r, Min(kLineRows, rows - r), k + r * kPlaces, r == 0, r + kLineRows >= rows);
      const int64_t whole = part.count % 4 == 0 && kPacked ? width / kPanelColumns * kPanelColumns : 0;
      const uint8_t* first_code = m.planes[0] + part.row * m.cols + n;
      RowsAhead<(kLineRows * kStripeColumns <= 32768)> ahead(first_code + part.count * m.cols, m.cols, width);
      ScalesAhead of_scales = scales_ahead;
      const int64_t stride = m.cols;
      for (int64_t c = 0; c < whole; c += kLineColumns) {
        of_scales.Prefetch();
        AddLine(part, first_code + c, stride, c, [&] { ahead.Prefetch(); });
      }
      for (int64_t c = whole; c < width; c += kPanelColumns) {
        alignas(64) uint8_t copy[kLineRows][kPanelColumns] = {};
        CopyRows(part, c, copy);
        of_scales.Prefetch();
        for (int64_t at = 0; at < kPanelColumns; at += kLineColumns) {
          AddLine(part, copy[0] + at, kPanelColumns, c + at, [] {});
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
  struct Part {
    int64_t row, count;  // the first row, and how many
    const int8_t* x;
    bool starts, ends;
    int32_t first_sum;  // what sums of the block start with
    float step, x_sum;  // of the block
    RowOfScales scales;
  };

  Part PartOf(int64_t block, int64_t row, int64_t count, int64_t k, bool starts, bool ends) const {
    const int32_t sum = x.sums[block];
    const float step = x.steps[block];
    return {row,
            count,
            x.values + k,
            starts,
            ends,
            -BiasOf<Format>(m) * sum,
            step / Format::kInt8Steps,
            step * static_cast<float>(sum),
            scales};
  }

  // Copies columns `c` and following, or their codes, with zeros behind the last row and column.
  void CopyRows(const Part& part, int64_t c, uint8_t (&copy)[kLineRows][kPanelColumns]) const {
    for (int64_t j = 0; j < part.count; ++j) {
      if constexpr (kPacked) {
        std::memcpy(copy[j], m.planes[0] + (part.row + j) * m.cols + n + c, Min(kPanelColumns, width - c));
      } else {
        Bytes codes[2] = {};
        AddPlanes<Format>(m, part.row + j, n + c, width - c, codes);
        std::memcpy(copy[j], codes, sizeof codes);
      }
    }
  }

  // Adds the part's rows of bytes, from columns `c` on, times x, and calls prefetch() for each row.
  template <class Prefetch>
  EFORMER_INLINE void AddLine(const Part& part, const uint8_t* from, int64_t stride, int64_t c,
                              const Prefetch& prefetch) {
    Ints dots[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      dots[i] = part.starts ? part.first_sum - Ints{} : LoadVector<Ints>(sums + c + i * kIntLanes);
    }
    const int8_t* xs = part.x;
    for (int64_t r = 0; r < part.count; r += 4, xs += 4 * kPlaces) {
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
        typename Dots::Sum sum = Dots::Start(dots[i]);
        ForEachPlace<kPlaces>([&](auto place) {
          sum = Dots::Add(sum, Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped)), SpreadFour(xs + 4 * place));
        });
        dots[i] = Dots::Finish(sum, dots[i]);
      }
    }
    if (part.ends) return Scale(part, c, dots);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) StoreVector(sums + c + i * kIntLanes, dots[i]);
  }

  // Adds the sums of a block, scaled, to the totals.
  EFORMER_INLINE void Scale(const Part& part, int64_t c, const Ints (&dots)[4]) {
    Reals reals[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) reals[i] = ToReals(dots[i]);
    alignas(64) float found[kLineColumns];
    StoreInOrder(found, reals);
    const Reals unit = part.step - Reals{};
#pragma GCC unroll 4
    for (int i = 0; i < kLineColumns; i += kIntLanes) {
      Reals total = LoadVector<Reals>(totals + c + i);
      const Reals scale = kInBlocks ? part.scales.template Scale<Reals>(c + i) : 1 - Reals{};
      total += LoadVector<Reals>(found + i) * (unit * scale);
      if (part.scales.has_offsets) total += part.scales.template Offset<Reals>(c + i, scale) * part.x_sum;
      StoreVector(totals + c + i, total);
    }
  }
};

// As Kernels::int8_matmul says.
template <class Format, bool kPacked>
static void Int8RowMatmulOf(const Matrix& m, const Int8X& x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += kStripeColumns) {
    Int8Stripe<Format, kPacked> stripe(m, x, n, Min(kStripeColumns, n1 - n));
    for (int64_t k = k0; k < k1; k += x.block) {
      if constexpr (Format::kScales == ScaleKind::kPerBlock) {
        if (k == k0 || k % m.block == 0) stripe.TakeScales(k / m.block);
      }
      stripe.AddBlock(k);
    }
    stripe.Write(y + n);
  }
}

}  // namespace eformer::EFORMER_ISA
