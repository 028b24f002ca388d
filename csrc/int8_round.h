// Rows of x rounded to int8: integers from -127 to 127 times a step for each block.
#pragma once

#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace eformer::EFORMER_ISA {

typedef uint8_t Sixteen __attribute__((vector_size(16)));

// Rounds kLanes floats to the nearest integers, halves to the even one.
static inline Places Round(Vec v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Places)_mm512_cvtps_epi32((__m512)v);
#elif defined(EFORMER_AVX512)
  Places rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = static_cast<int32_t>(__builtin_rintf(v[i]));
  return rounded;
#elif defined(__AVX2__)
  return (Places)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (Places)_mm_cvtps_epi32((__m128)v);
#else
  Places rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = static_cast<int32_t>(__builtin_rintf(v[i]));
  return rounded;
#endif
}

// Sixteen values of a row with those of one place in a byte side by side: for two values a byte 0, 2, 4, ... 1, 3, 5.
static inline Sixteen ByPlace(Sixteen values, int places) {
  constexpr Sixteen kOrders[] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                 {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15},
                                 {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
  return __builtin_shuffle(values, kOrders[places / 2]);
}

// As InstructionSet::round says.
static bool RoundRow(const float* x, int64_t depth, const Int8Order& order, int8_t* values, float* steps,
                     int32_t* sums) {
  const int64_t span = order.span, places = order.places;
  for (int64_t k = 0; k < depth; k += order.block) {
    const int64_t present = Min(order.block, depth - k);
    float padded[kMaxInt8Block] = {};
    const float* from = x + k;
    if (present < order.block) from = static_cast<const float*>(std::memcpy(padded, from, present * sizeof(float)));
    Places largest{};  // bits of absolute values are in the order of the values, and those of NaN are above all
    for (int64_t i = 0; i < order.block; i += kLanes) {
      const Places size = (Places)Load(from + i) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    int32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits = Max(bits, largest[i]);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    const float factor = top > 0 ? 127 / top : 0;
    if (bits >= 0x7f800000 || !(factor <= __FLT_MAX__)) return false;
    alignas(64) int32_t integers[kMaxInt8Block];
    alignas(64) int8_t rounded[kMaxInt8Block];
    Places sum{};
    for (int64_t i = 0; i < order.block; i += kLanes) {
      const Places some = Round(Load(from + i) * factor);
      sum += some;
      std::memcpy(integers + i, &some, sizeof some);
    }
    for (int64_t i = 0; i < order.block; ++i) rounded[i] = static_cast<int8_t>(integers[i]);
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += sum[i];
    *steps++ = top / 127;
    *sums++ = total;
    for (int64_t i = 0; i < order.block; i += 16) {
      Sixteen some;
      std::memcpy(&some, rounded + i, sizeof some);
      some = ByPlace(some, static_cast<int>(places));
      const int64_t byte = (k + i) / places, size = 16 / places;
      for (int64_t place = 0; place < places; ++place) {
        for (int64_t piece = 0; piece < size; piece += Min(size, span)) {
          const int64_t at = byte + piece;
          std::memcpy(values + at / span * span * places + place * span + at % span,
                      reinterpret_cast<const char*>(&some) + place * size + piece, Min(size, span));
        }
      }
    }
  }
  return true;
}

}  // namespace eformer::EFORMER_ISA
