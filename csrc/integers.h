// Exact sums of 8-bit values times 8-bit x, on AVX2 and what includes it.
#pragma once

#include "codes.h"

#if defined(__AVX2__)

namespace eformer::EFORMER_ISA {

typedef int32_t Ints __attribute__((vector_size(32)));

// Sums of 32 columns, as unpacking orders them: vector i has columns 4 i to 4 i + 3 and 4 i + 16 to 4 i + 19.
struct IntStrip {
  Ints v[4];
};

// Loads one vector at a time: GCC would copy a whole strip by halves of vectors, and wait for them.
static inline IntStrip LoadInts(const int32_t* from) {
  const __m256i* v = reinterpret_cast<const __m256i*>(from);
  return {{(Ints)_mm256_load_si256(v), (Ints)_mm256_load_si256(v + 1), (Ints)_mm256_load_si256(v + 2),
           (Ints)_mm256_load_si256(v + 3)}};
}

static inline void StoreInts(int32_t* to, const IntStrip& s) {
  for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(to) + i, (__m256i)s.v[i]);
}

// Writes the sums times `factor` as floats, in the order of columns.
static inline void ToColumns(const IntStrip& s, float factor, float* columns) {
  for (int i = 0; i < 4; ++i) {
    const __m256 floats = _mm256_cvtepi32_ps((__m256i)s.v[i]) * factor;
    _mm_storeu_ps(columns + 4 * i, _mm256_castps256_ps128(floats));
    _mm_storeu_ps(columns + 4 * i + 16, _mm256_extractf128_ps(floats, 1));
  }
}

// Adds the matmul of four bytes of x, none of them -128, and four rows of 32 bytes, which may be -128.
static inline void AddFour(IntStrip& sums, __m256i x, const Bytes (&rows)[4]) {
  const __m256i r0 = (__m256i)rows[0], r1 = (__m256i)rows[1], r2 = (__m256i)rows[2], r3 = (__m256i)rows[3];
  const __m256i low01 = _mm256_unpacklo_epi8(r0, r1), high01 = _mm256_unpackhi_epi8(r0, r1);
  const __m256i low23 = _mm256_unpacklo_epi8(r2, r3), high23 = _mm256_unpackhi_epi8(r2, r3);
  const auto add = [&](int i, __m256i fours) {
    const __m256i sizes = _mm256_abs_epi8(fours), factors = _mm256_sign_epi8(x, fours);
#if defined(EFORMER_VNNI)
    sums.v[i] = (Ints)_mm256_dpbusd_epi32((__m256i)sums.v[i], sizes, factors);
#else
    sums.v[i] += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, factors), _mm256_set1_epi16(1));
#endif
  };
  add(0, _mm256_unpacklo_epi16(low01, low23));
  add(1, _mm256_unpackhi_epi16(low01, low23));
  add(2, _mm256_unpacklo_epi16(high01, high23));
  add(3, _mm256_unpackhi_epi16(high01, high23));
}

// Repeats four bytes of x, with 0 for those from `count` on.
static inline __m256i SpreadFour(const int8_t* x, int64_t count) {
  uint32_t four;
  std::memcpy(&four, x, sizeof four);
  if (count < 4) four &= (1u << 8 * count) - 1;
  return _mm256_set1_epi32(static_cast<int32_t>(four));
}

}  // namespace eformer::EFORMER_ISA

#endif  // __AVX2__
