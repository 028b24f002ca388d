// Numbers of every type that scales and offsets have, converted to float32.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

EFORMER_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Each reads one number. They have no branches, so that loops over them become vector instructions; and they make no
// float32 of the bits of a subnormal, which XLA's threads treat as 0.
struct ReadFloat32 {
  typedef float Stored;
  EFORMER_INLINE static float Of(float x) { return x; }
};

struct ReadBfloat16 {
  typedef uint16_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) { return FromBits(x << 16); }
};

struct ReadFloat16 {
  typedef uint16_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    const uint32_t size = x & 0x7fff, sign = (x & 0x8000) << 16;
    const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small);
    const uint32_t normal = (size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23);
    return FromBits((size < 0x400 ? small_bits : normal) | sign);
  }
};

struct ReadE8m0 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    return FromBits(x == 0 ? 0x00400000u : x == 255 ? 0x7fc00000u : x << 23);
  }
};

struct ReadE4m3 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    const uint32_t size = x & 0x7f, sign = (x & 0x80) << 24;
    const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small);
    const uint32_t normal = size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23);
    return FromBits((size < 8 ? small_bits : normal) | sign);
  }
};

struct ReadUint8 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(int32_t x) { return static_cast<float>(x); }
};

struct ReadInt8 {
  typedef int8_t Stored;
  EFORMER_INLINE static float Of(int32_t x) { return static_cast<float>(x); }
};

// Converts kLanes numbers.
template <class Read>
EFORMER_INLINE void ReadLanes(const typename Read::Stored* from, float* floats) {
  for (int i = 0; i < kLanes; ++i) floats[i] = Read::Of(from[i]);
}

#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
template <>  // GCC 12 makes no vectors of these loops
EFORMER_INLINE void ReadLanes<ReadFloat16>(const uint16_t* from, float* floats) {
  _mm512_storeu_ps(floats, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
template <>
EFORMER_INLINE void ReadLanes<ReadBfloat16>(const uint16_t* from, float* floats) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm512_storeu_si512(floats, _mm512_slli_epi32(words, 16));
}
template <>
EFORMER_INLINE void ReadLanes<ReadUint8>(const uint8_t* from, float* floats) {
  const __m512i ints = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm512_storeu_ps(floats, _mm512_cvtepi32_ps(ints));
}
template <>
EFORMER_INLINE void ReadLanes<ReadInt8>(const int8_t* from, float* floats) {
  const __m512i ints = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm512_storeu_ps(floats, _mm512_cvtepi32_ps(ints));
}
#elif defined(EFORMER_NEON)
template <>
EFORMER_INLINE void ReadLanes<ReadFloat16>(const uint16_t* from, float* floats) {
  vst1q_f32(floats, vcvt_f32_f16((float16x4_t)vld1_u16(from)));
}
#endif

// Converts `count` numbers, from the one at `start` on.
template <class Read>
EFORMER_INLINE void ReadNumbers(const void* numbers, int64_t start, int64_t count, float* floats) {
  const typename Read::Stored* from = static_cast<const typename Read::Stored*>(numbers) + start;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    ReadLanes<Read>(from + i, floats + i);
  }
  for (int64_t i = whole; i < count; ++i) floats[i] = Read::Of(from[i]);
}

// The same for `rows` times `count` numbers, `stride` apart.
template <class Read>
EFORMER_INLINE void ReadNumbers(const void* numbers, int64_t start, int64_t stride, int64_t rows, int64_t count,
                                float* floats) {
  for (int64_t row = 0; row < rows; ++row) {
    ReadNumbers<Read>(numbers, start + row * stride, count, floats + row * count);
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
