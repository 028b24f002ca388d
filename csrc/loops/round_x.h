// Rows of x rounded to int8: integers from -127 to 127 times a step for each block.
#pragma once

#include "simd/vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace eformer::EFORMER_ISA {

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
#elif defined(EFORMER_NEON)
  return (Places)vcvtnq_s32_f32((float32x4_t)v);
#else
  Places rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = static_cast<int32_t>(__builtin_rintf(v[i]));
  return rounded;
#endif
}

static inline int32_t Largest(Places v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(EFORMER_NEON)
  return vmaxvq_s32((int32x4_t)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

static inline int32_t Total(Places v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// Sixteen floats times `factor`, rounded to bytes; adds them to `sum`.
static inline Sixteen RoundSixteen(const float* x, float factor, Places& sum) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  const Places all = Round(Load(x) * factor);
  sum += all;
  return (Sixteen)_mm512_cvtepi32_epi8((__m512i)all);
#else
  int32_t integers[16];
  for (int j = 0; j < 16; j += kLanes) {
    const Places some = Round(Load(x + j) * factor);
    sum += some;
    std::memcpy(integers + j, &some, sizeof some);
  }
  Sixteen bytes;
  for (int j = 0; j < 16; ++j) bytes[j] = static_cast<uint8_t>(integers[j]);
  return bytes;
#endif
}

// Writes sixteen values of a row from value `k` on, in the order of Int8Order.
template <int kPlaces, int kSpan>
static inline void PutSixteen(Sixteen values, int64_t k, int8_t* to) {
  constexpr int kBytes = 16 / kPlaces, kPiece = kBytes < kSpan ? kBytes : kSpan;
  Sixteen order;
  for (int byte = 0; byte < kBytes; ++byte) {
    for (int place = 0; place < kPlaces; ++place) {
      order[byte / kPiece * kPiece * kPlaces + place * kPiece + byte % kPiece] =
          static_cast<uint8_t>(kPlaces * byte + place);
    }
  }
#if defined(__clang__)  // it has no shuffle whose places are a variable, and makes a constant one of this
  Sixteen ordered;
  for (int i = 0; i < 16; ++i) ordered[i] = values[order[i]];
#else
  const Sixteen ordered = __builtin_shuffle(values, order);
#endif
  if constexpr (kPiece == kSpan || kPlaces == 1) {
    std::memcpy(to + k, &ordered, sizeof ordered);
  } else {
    const int64_t byte = k / kPlaces;
    int8_t* first = to + byte / kSpan * kSpan * kPlaces + byte % kSpan;
    for (int place = 0; place < kPlaces; ++place) {
      std::memcpy(first + place * kSpan, reinterpret_cast<const char*>(&ordered) + place * kPiece, kPiece);
    }
  }
}

constexpr int32_t kTooLarge = 0x71800000;  // the bits of 2^100: sums of x that are times offsets could overflow

template <int kPlaces, int kSpan>
static bool RoundRowOf(const float* x, int64_t depth, int64_t block, int8_t* values, float* steps, int32_t* sums) {
  for (int64_t k = 0; k < depth; k += block) {
    float padded[kInt8Block];
    const float* from = x + k;
    if (depth - k < block) {
      std::memset(padded, 0, sizeof padded);
      from = static_cast<const float*>(std::memcpy(padded, from, (depth - k) * sizeof(float)));
    }
    Places largest{};  // bits of absolute values are in the order of the values, and those of NaN are above all
    for (int64_t i = 0; i < block; i += kLanes) {
      const Places size = (Places)Load(from + i) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    const int32_t bits = Largest(largest);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    const float factor = top > 0 ? 127 / top : 0;
    if (bits >= kTooLarge || !(factor <= __FLT_MAX__)) return false;
    Places sum{};
    for (int64_t i = 0; i < block; i += 16) {
      PutSixteen<kPlaces, kSpan>(RoundSixteen(from + i, factor, sum), k + i, values);
    }
    *steps++ = top / 127;
    *sums++ = Total(sum);
  }
  return true;
}

// As InstructionSet::round says.
static inline bool RoundRow(const float* x, int64_t depth, const Int8Order& order, int8_t* values, float* steps,
                            int32_t* sums) {
  static constexpr decltype(&RoundRowOf<1, 4>) kOf[2][3] = {{RoundRowOf<1, 4>, RoundRowOf<2, 4>, RoundRowOf<4, 4>},
                                                            {RoundRowOf<1, 64>, RoundRowOf<2, 64>, RoundRowOf<4, 64>}};
  return kOf[order.span == 64][order.places / 2](x, depth, order.block, values, steps, sums);
}

}  // namespace eformer::EFORMER_ISA
