// Packs panels of floats: kPanelColumns columns of the matrix, or rows of its transpose, by some depth, scaled.
#pragma once

#include "matrix/decode_rows.h"
#include "matrix/transposed_codes.h"

namespace eformer::EFORMER_ISA {

static_assert(kPanelColumns == kRunValues, "a row of a panel is decoded at once");
constexpr int64_t kPanelStride = kPanelColumns + 16;  // between rows: no power of two, so that they share no cache set

// Memory for floats that starts a cache line: no row of a panel is in more lines than it has to be.
struct Lines {
  float* values;

  explicit Lines(int64_t count) : values(static_cast<float*>(std::aligned_alloc(64, CeilDiv(Max(count, 1), 16) * 64))) {
    if (values == nullptr) OutOfMemory();
  }
  ~Lines() { std::free(values); }
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
};

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
#elif defined(EFORMER_NEON)
  for (int i = 0; i < 8; i += 4) {
    for (int k = 0; k < 8; k += 4) {
      float32x4_t row[4];
      for (int j = 0; j < 4; ++j) row[j] = (float32x4_t)Load(from + (i + j) * from_stride + k);
      const float32x4x2_t even = vzipq_f32(row[0], row[2]), odd = vzipq_f32(row[1], row[3]);
      for (int j = 0; j < 2; ++j) {
        const float32x4x2_t columns = vzipq_f32(even.val[j], odd.val[j]);
        Store(to + (k + 2 * j) * to_stride + i, (Vec)columns.val[0]);
        Store(to + (k + 2 * j + 1) * to_stride + i, (Vec)columns.val[1]);
      }
    }
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) std::memcpy(to + k * to_stride + i, from + i * from_stride + k, sizeof(float));
  }
#endif
}

template <class Format>
struct PackFloats {
  const Matrix& m;
  RowDecoder<Format> rows;

  PackFloats(const Matrix& m, int64_t n0, int64_t n1)
      : m(m), rows(m, m.contracted_axis == 0 ? n0 : 0, m.contracted_axis == 0 ? n1 : 0, kMaxPanelDepth) {}

  // panel[k] = matrix[k0 + k, n : n + width] or matrix[n : n + width, k0 + k].
  void Pack(int64_t k0, int64_t depth, int64_t n, int64_t width, const PrefetchDistances& ahead, float* panel) {
    if (m.contracted_axis == 0) {
      rows.Decode(k0, depth, n, Min(width, kPanelColumns), ahead, panel, kPanelStride);
    } else if (TransposedCodes<Format>::Fits(m, k0, depth)) {
      const TransposedCodes<Format> codes(m, k0, depth, n, width);
      RowDecoder<Format> transposed(codes.matrix, 0, kPanelColumns, depth);
      transposed.Decode(0, depth, 0, kPanelColumns, PrefetchDistances(), panel, kPanelStride);
    } else {
      PackColumns(k0, depth, n, width, panel);
    }
  }

 private:
  // For blocks that TransposedCodes does not fit: floats are transposed.
  EFORMER_NOINLINE void PackColumns(int64_t k0, int64_t depth, int64_t n, int64_t width, float* panel) {
    alignas(64) float values[kPanelColumns * kPanelStride] = {};
    RowDecoder<Format> columns(m, k0, k0 + depth, kPanelColumns);
    for (int64_t k = 0; k < depth; k += kRunValues) {
      columns.Decode(n, width, k0 + k, kRunValues, PrefetchDistances(), values, kPanelStride);
      for (int64_t row = 0; row < kPanelColumns; row += 8) {
        for (int64_t i = 0; i < Min(kRunValues, depth - k); i += 8) {
          Transpose8(values + row * kPanelStride + i, kPanelStride, panel + (k + i) * kPanelStride + row, kPanelStride);
        }
      }
    }
  }
};

}  // namespace eformer::EFORMER_ISA
