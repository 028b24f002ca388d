// What our code needs of AVX-512 and SIMDe 0.7.4 does not emulate. GCC's own macros of these names need AVX-512.
#pragma once

#include <immintrin.h>

#include <cstring>

static inline __m512 ShuffleEmulated(__m512 first, __m512 second, int order) {
  typedef float Four __attribute__((vector_size(16)));
  Four from[8], to[4];
  std::memcpy(from, &first, sizeof first);
  std::memcpy(from + 4, &second, sizeof second);
  for (int i = 0; i < 4; ++i) to[i] = from[i / 2 * 4 + (order >> 2 * i & 3)];
  __m512 result;
  std::memcpy(&result, to, sizeof result);
  return result;
}
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(first, second, order) ShuffleEmulated(first, second, order)
