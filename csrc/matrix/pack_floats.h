// A panel: kPanelColumns columns of the matrix, or rows of its transpose, by some depth, decoded into cache.
#pragma once

#include "matrix/decode.h"
#include "matrix/transposed_codes.h"

namespace eformer::EFORMER_ISA {

static_assert(kPanelColumns == kRunValues, "a row of a panel is decoded at once");
constexpr int64_t kPanelStride = kPanelColumns + 16;  // between rows: no power of two, so that they share no cache set

// Byte distances to prefetch, since hardware prefetchers miss strides of a page: panels further on in the same rows of
// codes, or at the start of the next rows. Neighbouring rows use different distances, because the same column of rows a
// power of two apart may be in one memory channel.
struct PrefetchDistances {
  static constexpr int kMinPanels = 2, kCount = 8;
  int64_t bytes[kCount] = {};

  PrefetchDistances() = default;  // what is in cache already

  PrefetchDistances(const Matrix& m, int values_per_byte, int64_t depth, int64_t n, int64_t n0, int64_t n1) {
    const int64_t panel = m.packed_axis == 1 ? kPanelColumns / values_per_byte : kPanelColumns;
    const int64_t byte_rows = m.packed_axis == 0 ? CeilDiv(depth, values_per_byte) : depth;
    const int64_t next_rows = byte_rows * m.RowBytes(values_per_byte);
    const int64_t here = (n - n0) / kPanelColumns, panels = CeilDiv(n1 - n0, kPanelColumns);
    const int64_t fitting = Max(1, panels - kMinPanels + 1);
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t distance = kMinPanels + i;
      const int64_t wrapped = here + distance < panels ? distance * panel : next_rows + (distance - panels) * panel;
      bytes[i] = i < fitting ? wrapped : bytes[i - fitting];
    }
  }

  void Prefetch(const uint8_t* codes, int64_t row) const { __builtin_prefetch(codes + bytes[row % kCount]); }
};

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

// Puts the values of even columns and those of odd ones, both in lane order, side by side.
static inline void StorePairs(const float* even, const float* odd, float* to) {
  alignas(64) float halves[2][kStripSize];
  StoreStrip(halves[0], ToNatural(LoadStrip(even)));
  StoreStrip(halves[1], ToNatural(LoadStrip(odd)));
  for (int i = 0; i < kStripSize; ++i) {
    to[2 * i] = halves[0][i];
    to[2 * i + 1] = halves[1][i];
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
    for (int k = 0; k < 8; ++k) to[k * to_stride + i] = from[i * from_stride + k];
  }
#endif
}

// Panels of any format. A format may have a class of its own that decodes faster, into another order.
template <class Format>
struct DecodedPanels {
  const Matrix& m;
  LoadedTable table = TableOf<Format>();

  DecodedPanels(const Matrix& m, int64_t /*rows of x*/, int64_t /*n0*/, int64_t /*n1*/) : m(m) {}

  // Where a panel that begins at depth `k` must end, at `end` or before.
  int64_t End(int64_t /*k*/, int64_t end) const { return end; }

  // panel[k] = matrix[k0 + k, n : n + width] or matrix[n : n + width, k0 + k]. Returns what to multiply the sums of its
  // columns by, or nullptr.
  const float* Decode(int64_t k0, int64_t depth, int64_t n, int64_t width, const PrefetchDistances& ahead,
                      float* panel) {
    if (m.contracted_axis == 0) {
      DecodeRows(k0, depth, n, ahead, panel);
    } else if (TransposedCodes<Format>::Fits(m, k0, depth)) {
      const TransposedCodes<Format> codes(m, k0, depth, n, width);
      DecodeRowsOf(codes.matrix, 0, depth, 0, kRunValues, PrefetchDistances(), panel);
    } else {
      DecodeColumns(k0, depth, n, width, panel);
    }
    return nullptr;
  }

  // Whether the values of a row are in the order of columns. Else `ToNatural` would bring them, or their sums, into it.
  bool IsNatural() const { return true; }
  void ToNatural(const float* values, float* to) const { std::memcpy(to, values, kPanelColumns * sizeof(float)); }

 private:
  // The byte of the first plane that has the value at (row, col).
  EFORMER_INLINE static const uint8_t* CodesAt(const Matrix& m, int64_t row, int64_t col) {
    constexpr int kPerByte = kValuesPerByte<Format>;
    return m.planes[0] +
           (m.packed_axis == 0 ? row / kPerByte * m.cols + col : row * m.RowBytes(kPerByte) + col / kPerByte);
  }

  void DecodeRows(int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead, float* panel) const {
    if (n + kRunValues <= m.cols) {
      DecodeRowsOf(m, k0, depth, n, kRunValues, ahead, panel);
    } else {
      DecodeRowsOf(m, k0, depth, n, m.cols - n, ahead, panel);
    }
  }

  EFORMER_INLINE void DecodeRowsOf(const Matrix& matrix, int64_t k0, int64_t depth, int64_t n, int64_t present,
                                   const PrefetchDistances& ahead, float* panel) const {
    const Matrix local = matrix;  // copies stay in registers: stores to the panel cannot change them
    const LoadedTable local_table = table;
    if (Format::kScales == ScaleKind::kPerBlock && Format::kFloatScales && local.packed_axis == 0) {
      for (int64_t k = 0, end; k < depth; k = end) {  // the scales of a block stay in registers
        end = Min(depth, ((k0 + k) / local.block + 1) * local.block - k0);
        const Run scales = NumbersOfRun(local, local.scales, k0 + k, n, present);
        for (int64_t row = k; row < end; ++row) {
          ahead.Prefetch(CodesAt(local, k0 + row, n), row);
          Strip values[2];
          DecodeCodes<Format>(local, local_table, k0 + row, n, present, values);
          for (int i = 0; i < 2; ++i) {
            StoreStrip(panel + row * kPanelStride + i * kStripSize, Times(values[i], scales.half[i]));
          }
        }
      }
      return;
    }
    for (int64_t k = 0; k < depth; ++k) {
      ahead.Prefetch(CodesAt(local, k0 + k, n), k);
      DecodeRun<Format>(local, local_table, k0 + k, n, present, panel + k * kPanelStride);
    }
  }

  void DecodeColumns(int64_t k0, int64_t depth, int64_t n, int64_t width, float* panel) const {
    constexpr int64_t kStride = kMaxPanelDepth + 16;
    alignas(64) float values[8][kStride];
    const LoadedTable loaded = table;
    for (int64_t row = 0; row < width; row += 8) {
      const int64_t rows = Min(8, width - row);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t at = n + row + i, panels_ahead = PrefetchDistances::kMinPanels + at % PrefetchDistances::kCount;
        __builtin_prefetch(CodesAt(m, at, k0 + panels_ahead * kPanelColumns));
        DecodeRow<Format>(m, loaded, at, k0, depth, values[i]);
      }
      if (rows < 8) std::memset(values[rows], 0, (8 - rows) * sizeof values[0]);
      for (int64_t k = 0; k < depth; k += 8) {
        Transpose8(&values[0][k], kStride, panel + k * kPanelStride + row, kPanelStride);
      }
    }
  }
};

}  // namespace eformer::EFORMER_ISA
