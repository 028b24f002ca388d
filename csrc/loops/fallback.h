// One row of x times a matrix of any format, by rows of decoded values. These loops are right for every x, block and
// scale; formats have faster ones for what is common.
#pragma once

#include "matrix/decode.h"

namespace eformer::EFORMER_ISA {

// As Kernels::row_matmul says, with `sums` zero at first.
template <class Format>
static void DecodedRowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                             float* sums) {
  const LoadedTable table = TableOf<Format>();
  for (int64_t n = n0; n < n1; n += kRunValues) {
    const int64_t present = Min(kRunValues, n1 - n);
    float values[kRunValues];
    Strip found[2] = {};
    for (int64_t k = k0; k < k1; ++k) {
      DecodeRun<Format>(m, table, k, n, present, values);
      for (int i = 0; i < 2; ++i) AddProduct(found[i], LoadStrip(values + i * kStripSize), Spread(x[k]));
    }
    for (int i = 0; i < 2; ++i) StoreStrip(values + i * kStripSize, found[i]);
    std::memcpy(sums + n - n0, values, present * sizeof(float));
  }
}

// As Kernels::row_matmul_transposed says: a dot product for each row. A broadcast scale is applied to x or to the
// result by the caller.
template <class Format>
static void DecodedRowMatmulTransposed(const Matrix& matrix, const float* x, int64_t n0, int64_t n1, float* y) {
  Matrix m = matrix;
  if (Format::kScales == ScaleKind::kBroadcast) m.scale = nullptr;
  const LoadedTable table = TableOf<Format>();
  for (int64_t n = n0; n < n1; ++n) {
    Strip sum{};
    float values[kRunValues], rest = 0;
    int64_t c = 0;
    for (; c + kRunValues <= m.cols; c += kRunValues) {
      DecodeRun<Format>(m, table, n, c, kRunValues, values);
      AddProduct(sum, LoadStrip(values), LoadStrip(x + c));
      AddProduct(sum, LoadStrip(values + kStripSize), LoadStrip(x + c + kStripSize));
    }
    if (c < m.cols) DecodeRun<Format>(m, table, n, c, m.cols - c, values);
    for (int64_t i = c; i < m.cols; ++i) rest += values[i - c] * x[i];
    y[n] = Sum(sum) + rest;
  }
}

}  // namespace eformer::EFORMER_ISA
