// One row of x times a matrix with a byte for each value.
#pragma once

#include "matrix/codes.h"
#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

// The scales of `count` values of a row from column `c` on, where each may be in a block of its own.
static inline Strip BlockScales(const Matrix& m, int64_t row, int64_t c, int64_t count) {
  float found[kStripSize] = {};
  for (int64_t i = 0; i < count; ++i) {
    found[i] = m.packed_axis == 0 ? m.scale[row / m.block * m.cols + c + i]
                                  : m.scale[row * m.BlockScaleStride() + (c + i) / m.block];
  }
  return LoadStrip(found);
}

// As format.h says of RowMatmul. The caller applies a broadcast scale to x or to the sums.
template <class Format>
static inline void ByteRowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                 float* sums) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  constexpr int64_t kLine = 2 * kStripSize;  // a cache line
  const int64_t pairs = (n1 - n0) / kLine * kLine;
  for (int64_t k = k0; k < k1; k += kMaxCopied) {
    const int rows = static_cast<int>(Min(kMaxCopied, k1 - k));
    const uint8_t* first = m.planes[0] + k * m.cols + n0;
    for (int64_t n = 0; n < pairs; n += kLine) {
      const uint8_t* codes = first + n;
      Strip left = LoadStrip(sums + n), right = LoadStrip(sums + n + kStripSize);
      for (int r = 0; r < rows; ++r, codes += m.cols) {
        PrefetchAfter(codes, kMaxCopied * m.cols);
        Strip values[2] = {Format::Values(codes), Format::Values(codes + kStripSize)};
        float factor = x[k + r];
        if (kInBlocks && m.packed_axis == 0) {
          const float* scale = m.scale + (k + r) / m.block * m.cols + n0 + n;
          for (int i = 0; i < 2; ++i) values[i] = Times(values[i], LoadStrip(scale + i * kStripSize));
        } else if (kInBlocks && m.block % kLine == 0) {
          factor *= m.scale[(k + r) * m.BlockScaleStride() + (n0 + n) / m.block];
        } else if (kInBlocks) {
          for (int i = 0; i < 2; ++i) {
            values[i] = Times(values[i], BlockScales(m, k + r, n0 + n + i * kStripSize, kStripSize));
          }
        }
        AddProduct(left, values[0], Spread(factor));
        AddProduct(right, values[1], Spread(factor));
      }
      StoreStrip(sums + n, left);
      StoreStrip(sums + n + kStripSize, right);
    }
    ForEachStrip(first + pairs, m.cols, rows, n1 - n0 - pairs, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip sum = LoadStrip(sums + pairs + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        Strip values = Format::Values(codes);
        const int64_t count = Min(kStripSize, n1 - n0 - pairs - n);
        if (kInBlocks) values = Times(values, BlockScales(m, k + r, n0 + pairs + n, count));
        AddProduct(sum, values, Spread(x[k + r]));
      }
      StoreStrip(sums + pairs + n, sum);
    });
  }
}

}  // namespace eformer::EFORMER_ISA
