// Words of codes and the bit fields in them. A field becomes a float where it lies, with no shift: it is then the code
// times a power of two, by whose inverse x is multiplied beforehand.
#pragma once

#include <utility>

#include "matrix/codes.h"

namespace eformer::EFORMER_ISA {

typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kWordBytes = 4 * kLanes;  // bytes in a vector of words

// A word from each kBytes bytes: 1, 2 or 4.
template <int kBytes>
EFORMER_INLINE Bits LoadBits(const uint8_t* p) {
  Bits bits;
  if constexpr (kBytes == 4) {
    std::memcpy(&bits, p, sizeof bits);
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  } else if constexpr (kBytes == 2) {
    bits = (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  } else {
    bits = (Bits)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && !defined(EFORMER_EMULATE_AVX512)
  } else if constexpr (kBytes == 2) {
    bits = (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    bits = (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(EFORMER_NEON)
  } else if constexpr (kBytes == 2) {
    bits = (Bits)vmovl_u16((uint16x4_t)vld1_u8(p));
  } else {
    bits = (Bits)ToWords(p);
#else
  } else {
    for (int i = 0; i < kLanes; ++i) bits[i] = p[i * kBytes] | (kBytes == 2 ? p[i * kBytes + 1] << 8 : 0);
#endif
  }
  return bits;
}

// Words below 2^31 as floats.
EFORMER_INLINE Vec ToFloats(Bits bits) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Vec)_mm512_cvtepi32_ps((__m512i)bits);
#elif defined(__AVX2__) && !defined(EFORMER_EMULATE_AVX512)
  return (Vec)_mm256_cvtepi32_ps((__m256i)bits);
#else
  return __builtin_convertvector((Places)bits, Vec);
#endif
}

// The fields of kBits in half a word.
template <int kBits>
struct Masks {
  Bits of[16 / kBits];

  EFORMER_INLINE Masks() {
    for (int i = 0; i < 16 / kBits; ++i) {
      of[i] = Bits{} + (((1u << kBits) - 1) << kBits * i);
#if defined(__AVX512F__)  // GCC would make each again, from a general register, where it is used
      asm("" : "+v"(of[i]));
#endif
    }
  }
};

// The two halves of words, so that no field is multiplied by more than 2^15.
struct Halves {
  Bits low, high;

  EFORMER_INLINE explicit Halves(Bits bits) : low(bits), high(bits >> 16) {}

  // Field kI, times 2 ** (kBits * kI % 16).
  template <int kI, int kBits>
  EFORMER_INLINE Vec Field(const Masks<kBits>& masks) const {
    constexpr int kPerHalf = 16 / kBits;
    return ToFloats((kI < kPerHalf ? low : high) & masks.of[kI % kPerHalf]);
  }
};

// 2 ** -n for n from 0 to 15.
constexpr float InversePower(int n) { return 1.0f / static_cast<float>(1 << n); }

// Calls use(std::integral_constant<int, i>()) for 0 <= i < kCount.
template <class Use, int... kI>
EFORMER_INLINE void ForEachOf(std::integer_sequence<int, kI...>, const Use& use) {
  (use(std::integral_constant<int, kI>()), ...);
}

template <int kCount, class Use>
EFORMER_INLINE void ForEach(const Use& use) {
  ForEachOf(std::make_integer_sequence<int, kCount>(), use);
}

// Vector i has what belongs to the byte i of each word: puts all of them in the order of bytes.
EFORMER_INLINE void StoreByBytes(float* to, const Vec (&v)[4]) {
#if defined(EFORMER_AVX512)
  typedef int32_t Index __attribute__((vector_size(64)));
  constexpr Index kPairs = {0, 16, 0, 0, 1, 17, 0, 0, 2, 18, 0, 0, 3, 19, 0, 0};
  constexpr Index kFours = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  for (int i = 0; i < 4; ++i) {
    const __m512 low = _mm512_permutex2var_ps((__m512)v[0], (__m512i)(kPairs + 4 * i), (__m512)v[1]);
    const __m512 high = _mm512_permutex2var_ps((__m512)v[2], (__m512i)(kPairs + 4 * i), (__m512)v[3]);
    Store(to + 16 * i, (Vec)_mm512_permutex2var_ps(low, (__m512i)kFours, high));
  }
#elif defined(__AVX2__)
  const __m256 low01 = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]);
  const __m256 high01 = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
  const __m256 low23 = _mm256_unpacklo_ps((__m256)v[2], (__m256)v[3]);
  const __m256 high23 = _mm256_unpackhi_ps((__m256)v[2], (__m256)v[3]);
  StoreStrip(to,
             ToNatural({{(Vec)_mm256_shuffle_ps(low01, low23, 0x44), (Vec)_mm256_shuffle_ps(low01, low23, 0xEE),
                         (Vec)_mm256_shuffle_ps(high01, high23, 0x44), (Vec)_mm256_shuffle_ps(high01, high23, 0xEE)}}));
#elif defined(EFORMER_NEON)
  const float32x4x4_t all = {{(float32x4_t)v[0], (float32x4_t)v[1], (float32x4_t)v[2], (float32x4_t)v[3]}};
  vst4q_f32(to, all);
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) to[4 * i + j] = v[j][i];
  }
#endif
}

// The inverse: vector i gets every fourth number from number i on.
EFORMER_INLINE void LoadByBytes(const float* from, Vec (&v)[4]) {
#if defined(EFORMER_AVX512)
  typedef int32_t Index __attribute__((vector_size(64)));
  constexpr Index kEighths = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
  const __m512 c = _mm512_loadu_ps(from + 32), d = _mm512_loadu_ps(from + 48);
  for (int i = 0; i < 4; ++i) {
    const __m512i places = (__m512i)(kEighths + i);
    const __m512 low = _mm512_permutex2var_ps(a, places, b), high = _mm512_permutex2var_ps(c, places, d);
    v[i] = (Vec)_mm512_shuffle_f32x4(low, high, 0x44);
  }
#elif defined(__AVX2__)
  const Strip strip = FromNatural(LoadStrip(from));
  const __m256 low01 = _mm256_unpacklo_ps((__m256)strip.v[0], (__m256)strip.v[1]);
  const __m256 high01 = _mm256_unpackhi_ps((__m256)strip.v[0], (__m256)strip.v[1]);
  const __m256 low23 = _mm256_unpacklo_ps((__m256)strip.v[2], (__m256)strip.v[3]);
  const __m256 high23 = _mm256_unpackhi_ps((__m256)strip.v[2], (__m256)strip.v[3]);
  v[0] = (Vec)_mm256_shuffle_ps(low01, low23, 0x44);
  v[1] = (Vec)_mm256_shuffle_ps(low01, low23, 0xEE);
  v[2] = (Vec)_mm256_shuffle_ps(high01, high23, 0x44);
  v[3] = (Vec)_mm256_shuffle_ps(high01, high23, 0xEE);
#elif defined(EFORMER_NEON)
  const float32x4x4_t loaded = vld4q_f32(from);
  for (int i = 0; i < 4; ++i) v[i] = (Vec)loaded.val[i];
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < 4; ++j) v[j][i] = from[4 * i + j];
  }
#endif
}

}  // namespace eformer::EFORMER_ISA
