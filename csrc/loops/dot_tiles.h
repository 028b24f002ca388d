// Few rows of x times the transpose of a matrix: dot products along rows of codes, which are decoded as they lie.
//
// For few rows of x that costs less than to transpose codes. A tile has the sums of some rows of x times four rows of
// the matrix, a vector for each dot product.
#pragma once

#include <utility>

#include "matrix/pack_floats.h"
#include "matrix/decode_rows.h"

namespace eformer::EFORMER_ISA {

constexpr int kDotColumns = 4;                                        // rows of the matrix in a tile
constexpr int kDotTileRows = kLanes == 16 ? 6 : kLanes == 8 ? 3 : 2;  // rows of x in a tile
constexpr int64_t kDotDepth = kMaxPart;                               // decoded at a time, so that it stays in L1
constexpr int64_t kDotStride = kDotDepth + 16;  // no power of two, so that rows share no cache set

// sums[i] += or = the sum of the lanes of v[i].
static inline void AddSums(const Vec (&v)[kDotColumns], bool starts, float (&sums)[kDotColumns]) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 all = _mm256_add_ps(_mm512_castps512_ps256(abcd), (__m256)_mm512_extractf64x4_pd((__m512d)abcd, 1));
#elif defined(__AVX2__) && !defined(EFORMER_AVX512)
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
#endif
#if defined(__AVX512F__) || (defined(__AVX2__) && !defined(EFORMER_AVX512))
  const __m128 found = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  _mm_storeu_ps(sums, starts ? found : _mm_add_ps(_mm_loadu_ps(sums), found));
#else
  for (int i = 0; i < kDotColumns; ++i) sums[i] = starts ? Sum(v[i]) : sums[i] + Sum(v[i]);
#endif
}

// The dot products of kRows rows of x.
template <int kRows>
struct DotTile {
  // sums[r][i] += or = x[r] @ panel[i], over `depth`, a multiple of kLanes.
  static void Add(const float* panel, const float* x, int64_t stride, int64_t depth, bool starts,
                  float (*sums)[kDotColumns]) {
    Vec found[kRows][kDotColumns] = {};
    for (int64_t k = 0; k < depth; k += kLanes) {
      Vec values[kDotColumns];
#pragma GCC unroll 4
      for (int i = 0; i < kDotColumns; ++i) values[i] = Load(panel + i * kDotStride + k);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Vec xs = Load(x + r * stride + k);
#pragma GCC unroll 4
        for (int i = 0; i < kDotColumns; ++i) found[r][i] += values[i] * xs;
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) AddSums(found[r], starts, sums[r]);
  }
};

template <class Rows>
struct DotTileFunctions;

template <int... kRowsLessOne>
struct DotTileFunctions<std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&DotTile<1>::Add) kOf[] = {nullptr, DotTile<kRowsLessOne + 1>::Add...};
};

// Prefetches codes, scales and offsets of a part: hardware prefetchers do not follow so many rows.
template <class Format>
EFORMER_INLINE void PrefetchPart(const Matrix& m, int64_t row, int64_t c) {
  constexpr int kPerByte = kValuesPerByte<Format>;
  const uint8_t* codes = m.planes[0] + row * m.RowBytes(kPerByte) + c / kPerByte;
  for (int64_t i = 0; i < kDotDepth / kPerByte; i += 64) __builtin_prefetch(codes + i);
  if constexpr (RowParts<Format>::kInBlocks) {
    for (const BlockNumbers* numbers : {&m.scales, &m.offsets}) {
      const int64_t size = numbers->type == Number::kFloat32 ? 4 : numbers->type <= Number::kFloat16 ? 2 : 1;
      const int64_t entry = row * m.BlockScaleStride() + c / m.block;
      if (numbers->entries != nullptr) __builtin_prefetch(static_cast<const uint8_t*>(numbers->entries) + entry * size);
    }
  }
}

// As Kernels::dot_matmul says, for any format and x in the order of RowParts.
template <class Format>
static void DecodedDotMatmul(const Matrix& m, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y) {
  const RowParts<Format> parts(m, RowParts<Format>::DotOrderOf(m));
  const RowGroups groups(count, kDotTileRows);
  constexpr int64_t kRowsAhead = 2 * kDotColumns;
  alignas(64) float panel[kDotColumns][kDotStride];
  const Lines all_sums(count * CeilDiv(n1 - n0, kDotColumns) * kDotColumns);
  const auto begin = reinterpret_cast<float (*)[kDotColumns]>(all_sums.values);
  for (int64_t k = 0; k < m.cols; k += kDotDepth) {
    const int64_t depth = Min(kDotDepth, m.cols - k), padded = CeilDiv(depth, kRunValues) * kRunValues;
    auto sums = begin;
    for (int64_t n = n0; n < n1; n += kDotColumns, sums += count) {
      for (int64_t i = 0; i < kDotColumns; ++i) {
        if (n + i < n1) {
          if (k + depth < m.cols) PrefetchPart<Format>(m, n + i, k + depth);
          if (k == 0 && n + i + kRowsAhead < n1) PrefetchPart<Format>(m, n + i + kRowsAhead, k);
          parts.Decode(n + i, k, depth, panel[i]);
        } else {
          std::memset(panel[i], 0, padded * sizeof(float));
        }
      }
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.First(g), rows = groups.Size(g);
        DotTileFunctions<std::make_integer_sequence<int, kDotTileRows>>::kOf[rows](
            panel[0], x.values + first * x.stride + k, x.stride, padded, k == 0, sums + first);
      }
    }
  }
  auto sums = begin;
  for (int64_t n = n0; n < n1; n += kDotColumns, sums += count) {
    for (int64_t r = 0; r < count; ++r) {
      std::memcpy(y + r * m.Width() + n, sums[r], Min(kDotColumns, n1 - n) * sizeof(float));
    }
  }
}

}  // namespace eformer::EFORMER_ISA
