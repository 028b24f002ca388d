// Any number of rows of x times any matrix: a part of the matrix is decoded into cache and used for all rows.
#ifndef EFORMER_MULTIPLY_H_
#define EFORMER_MULTIPLY_H_

#include "decode.h"

namespace eformer {
namespace EFORMER_ISA {

constexpr int kWide = 2 * kLanes;                               // columns of a tile of the result
constexpr int kTall = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;  // rows of it: the tile fits in registers

constexpr int64_t kStride = kGrain + 16;  // of rows of a part: no power of two, so that they do not share cache sets
constexpr int64_t kFew = 32;              // rows of x

// How much of the depth is decoded at a time, for kGrain columns of the result. For few rows of x it stays in the first
// level of cache, and memory is read in long pieces of rows; for many it is large, so that sums are rarely touched.
static inline int64_t Deep(const Matrix& m, int64_t count) {
  return m.contracted_axis == 1 ? 512 : count <= kFew ? 32 : 256;
}
constexpr int64_t kDeepest = 512;
constexpr int64_t kAhead = 128;  // bytes

template <int Rows>
static void MultiplyTile(const float* tile, const float* x, int64_t x_stride, int64_t depth, bool adds,
                         float* y, int64_t y_stride) {
  Vec sums[Rows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const Vec left = Load(tile + k * kStride), right = Load(tile + k * kStride + kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec factor = Spread(x[r * x_stride + k]);
      sums[r][0] += left * factor;
      sums[r][1] += right * factor;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float* out = y + r * y_stride;
    Store(out, adds ? Load(out) + sums[r][0] : sums[r][0]);
    Store(out + kLanes, adds ? Load(out + kLanes) + sums[r][1] : sums[r][1]);
  }
}

typedef void (*TileFunction)(const float*, const float*, int64_t, int64_t, bool, float*, int64_t);

template <int... Rows>
struct TileFunctions {
  static constexpr TileFunction kOf[] = {nullptr, MultiplyTile<Rows>...};
};

static inline TileFunction TileOf(int64_t rows) {
#if defined(__AVX512F__)
  return TileFunctions<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>::kOf[rows];
#else
  return TileFunctions<1, 2, 3, 4, 5, 6>::kOf[rows];
#endif
}

// part[k] = matrix[k0 + k, n : n + width]
static inline void DecodeRows(const Matrix& m, const LoadedTable& table, int64_t k0, int64_t depth, int64_t n,
                              int64_t width, float* part) {
  for (int64_t k = 0; k < depth; ++k) {
    // Rows are pages apart, which no processor foresees: ask for what the next columns will need.
    const uint8_t* codes = m.codes + (m.packed_axis == 0 ? m.Codes(k0 + k + 1) - 1 : k0 + k) * m.RowBytes();
    __builtin_prefetch(codes + (m.packed_axis == 1 ? m.Codes(n) : n) + kAhead);
    DecodeRow(m, table, k0 + k, n, width, part + k * kStride);
  }
}

// to[k][i] = from[i][k] for 8 x 8 floats.
static inline void Transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) to[k * to_stride + i] = from[i * from_stride + k];
  }
#endif
}

// part[k] = matrix[n : n + width, k0 + k]
static inline void DecodeColumns(const Matrix& m, const LoadedTable& table, int64_t k0, int64_t depth, int64_t n,
                                 int64_t width, float* part) {
  alignas(64) float values[8][kDeepest + 16];
  for (int64_t row = 0; row < width; row += 8) {
    const int64_t rows = Min(8, width - row);
    for (int64_t i = 0; i < rows; ++i) DecodeRow(m, table, n + row + i, k0, depth, values[i]);
    if (rows < 8) std::memset(values[rows], 0, (8 - rows) * sizeof values[0]);
    for (int64_t k = 0; k < depth; k += 8) Transpose8(&values[0][k], kDeepest + 16, part + k * kStride + row, kStride);
  }
}

static inline void MultiplyPart(const float* part, int64_t width, int64_t depth, const float* x, int64_t x_stride,
                                int64_t count, bool adds, float* y, int64_t y_stride) {
  const int64_t strips = (count + kTall - 1) / kTall;
  for (int64_t i = 0; i < width; i += kWide) {
    for (int64_t strip = 0; strip < strips; ++strip) {
      const int64_t first = count * strip / strips, rows = count * (strip + 1) / strips - first;
      const float* xs = x + first * x_stride;
      float* out = y + first * y_stride + i;
      if (i + kWide <= width) {
        TileOf(rows)(part + i, xs, x_stride, depth, adds, out, y_stride);
        continue;
      }
      float sums[kTall][kWide];
      TileOf(rows)(part + i, xs, x_stride, depth, false, sums[0], kWide);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < width - i; ++j) out[r * y_stride + j] = sums[r][j] + (adds ? out[r * y_stride + j] : 0);
      }
    }
  }
}

// As Kernels::multiply says.
static void Multiply(const Matrix& m, const float* x, int64_t x_stride, int64_t count, int64_t n0, int64_t n1, float* y) {
  const int64_t deep = Deep(m, count);
  const Floats part((deep + 8) * kStride);
  const LoadedTable table = Nf4Table();
  for (int64_t k0 = 0; k0 < m.Depth(); k0 += deep) {
    const int64_t depth = Min(deep, m.Depth() - k0);
    for (int64_t n = n0; n < n1; n += kGrain) {
      const int64_t width = Min(kGrain, n1 - n);
      (m.contracted_axis == 0 ? DecodeRows : DecodeColumns)(m, table, k0, depth, n, width, part.values);
      MultiplyPart(part.values, width, depth, x + k0, x_stride, count, k0 > 0, y + n, m.Width());
    }
  }
}

static int64_t Panel(const Matrix& m, int64_t count) {
  return m.contracted_axis == 0 && count <= kFew ? 8 * kGrain : kGrain;
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_MULTIPLY_H_
