// Numbers of every type that scales and offsets have, converted to float32.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

// kLanes stored numbers, each widened to a word.
EFORMER_INLINE Words LoadWords(const uint16_t* p) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  typedef uint16_t Few __attribute__((vector_size(2 * kLanes)));
  Few numbers;
  std::memcpy(&numbers, p, sizeof numbers);
  return __builtin_convertvector(numbers, Words);
#endif
}

#if defined(__F16C__) || defined(EFORMER_NEON)
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// kLanes float16 as float32.
EFORMER_INLINE Vec FromHalves(Halves halves) {
#if defined(EFORMER_NEON)
  return (Vec)vcvt_f32_f16((float16x4_t)halves);
#elif defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps((__m256i)halves);
#elif defined(EFORMER_AVX512)
  const auto* halves_of = reinterpret_cast<const __m128i*>(&halves);
  const __m256 both[2] = {_mm256_cvtph_ps(halves_of[0]), _mm256_cvtph_ps(halves_of[1])};
  return Load(reinterpret_cast<const float*>(both));
#else
  return (Vec)_mm256_cvtph_ps((__m128i)halves);
#endif
}

// kLanes bytes with their signs.
EFORMER_INLINE Halves LoadSigned(const uint8_t* p) {
#if defined(EFORMER_NEON)
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return (Halves)vget_low_s16(vmovl_s8(vcreate_s8(four)));
#elif defined(EFORMER_AVX512)
  return (Halves)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return (Halves)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#endif
}
#endif

EFORMER_INLINE Words LoadWords(const float* p) { return (Words)Load(p); }

// `a` where the comparison holds, else `b`.
EFORMER_INLINE Words Where(Places holds, Words a, Words b) { return ((Words)holds & a) | (~(Words)holds & b); }

// Each makes floats of stored numbers. They make no float32 of the bits of a subnormal, which XLA's threads treat as 0.
struct ReadFloat32 {
  typedef float Stored;
  EFORMER_INLINE static Vec Of(Words x) { return (Vec)x; }
};

struct ReadBfloat16 {
  typedef uint16_t Stored;
  EFORMER_INLINE static Vec Of(Words x) { return (Vec)(x << 16); }
};

struct ReadUint8 {
  typedef uint8_t Stored;
  EFORMER_INLINE static Vec Of(Words x) { return __builtin_convertvector((Places)x, Vec); }
};

struct ReadInt8 {
  typedef uint8_t Stored;
  EFORMER_INLINE static Vec Of(Words x) { return __builtin_convertvector((Places)(x << 24) >> 24, Vec); }
};

struct ReadE8m0 {
  typedef uint8_t Stored;
  EFORMER_INLINE static Vec Of(Words x) {
    return (Vec)Where(x == 0, Words{} + 0x00400000, Where(x == 255, Words{} + 0x7fc00000, x << 23));
  }
};

// Floats of fewer bits: the sign, an exponent and kDigits of the mantissa.
template <class Number, int kBits, int kDigits, uint32_t kFirstSpecial, uint32_t kSpecial>
struct ReadSmallFloat {
  typedef Number Stored;
  EFORMER_INLINE static Vec Of(Words x) {
    constexpr uint32_t kSign = 1u << (kBits - 1), kBias = (1u << (kBits - kDigits - 2)) - 1;
    const Words size = x & (kSign - 1), sign = (x & kSign) << (32 - kBits);
    constexpr float kUnit = 1.0f / (1 << (kBias + kDigits - 1));  // of the last digit of subnormals
    const Words small = (Words)(ReadUint8::Of(size) * kUnit), normal = (size << (23 - kDigits)) + ((127 - kBias) << 23);
    const Words special = kSpecial + ((size - kFirstSpecial) << (23 - kDigits));
    const Words large = Where((Places)size < static_cast<int>(kFirstSpecial), normal, special);
    return (Vec)(Where((Places)size < (1 << kDigits), small, large) | sign);
  }
};

typedef ReadSmallFloat<uint16_t, 16, 10, 0x7c00, 0x7f800000> ReadFloat16;
typedef ReadSmallFloat<uint8_t, 8, 3, 0x7f, 0x7fc00000> ReadE4m3;

// The same for fewer than kLanes numbers.
template <class Read>
EFORMER_INLINE void ReadFew(const typename Read::Stored* from, int64_t count, float* floats) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  const auto mask = static_cast<__mmask16>((1 << count) - 1);
  Words words;
  if constexpr (sizeof *from == 1) {
    words = (Words)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, from));
  } else if constexpr (sizeof *from == 2) {
    words = (Words)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  } else {
    words = (Words)_mm512_maskz_loadu_epi32(mask, from);
  }
  _mm512_mask_storeu_ps(floats, mask, (__m512)Read::Of(words));
#else
  typename Read::Stored some[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = from[i];
  const Vec found = Read::Of(LoadWords(some));
  for (int64_t i = 0; i < count; ++i) floats[i] = found[i];
#endif
}

// Converts `rows` times `count` numbers, `stride` apart, from the one at `start` on.
template <class Read>
EFORMER_INLINE void ReadNumbers(const void* numbers, int64_t start, int64_t stride, int64_t rows, int64_t count,
                                float* floats) {
  const typename Read::Stored* from = static_cast<const typename Read::Stored*>(numbers) + start;
  for (int64_t row = 0; row < rows; ++row, from += stride, floats += count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) Store(floats + i, Read::Of(LoadWords(from + i)));
    if (i < count) ReadFew<Read>(from + i, count - i, floats + i);
  }
}

EFORMER_NOINLINE static void ReadNumbers(Number type, const void* numbers, int64_t start, int64_t stride, int64_t rows,
                                         int64_t count, float* floats) {
  switch (type) {
    case Number::kFloat32:
      return ReadNumbers<ReadFloat32>(numbers, start, stride, rows, count, floats);
    case Number::kBfloat16:
      return ReadNumbers<ReadBfloat16>(numbers, start, stride, rows, count, floats);
    case Number::kFloat16:
      return ReadNumbers<ReadFloat16>(numbers, start, stride, rows, count, floats);
    case Number::kE8m0:
      return ReadNumbers<ReadE8m0>(numbers, start, stride, rows, count, floats);
    case Number::kE4m3:
      return ReadNumbers<ReadE4m3>(numbers, start, stride, rows, count, floats);
    case Number::kUint8:
      return ReadNumbers<ReadUint8>(numbers, start, stride, rows, count, floats);
    case Number::kInt8:
      return ReadNumbers<ReadInt8>(numbers, start, stride, rows, count, floats);
  }
}

}  // namespace eformer::EFORMER_ISA
