// Codes that are floating point numbers of 8 bits: a sign, an exponent and a mantissa.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

// Without infinities only the code of all ones is no number, else all codes with the largest exponent.
template <int kMantissaBits, bool kHasInfinities>
struct Float8 : FormatDefaults {
  static constexpr int kPlaneBits[] = {8};
  static constexpr int kDigits = (1 << kMantissaBits) - 1;
  static constexpr int kBias = (1 << (6 - kMantissaBits)) - 1;
  static constexpr int kSpecial = kHasInfinities ? 0x7f - kDigits : 0x7f;

  static constexpr float Value(int code) {
    const int magnitude = code & 0x7f, digits = magnitude & kDigits, exponent = magnitude >> kMantissaBits;
    float value = static_cast<float>(exponent == 0 ? digits : digits + kDigits + 1);
    for (int i = exponent == 0 ? 1 : exponent; i < kBias + kMantissaBits; ++i) value /= 2;
    for (int i = kBias + kMantissaBits; i < exponent; ++i) value *= 2;
    if ((magnitude & kSpecial) == kSpecial) {
      value = kHasInfinities && digits == 0 ? __builtin_inff() : __builtin_nanf("");
    }
    return code >> 7 != 0 ? -value : value;
  }

  // The value of a code without its sign as a bfloat16, which all of them are. Small codes, below 16, may be subnormal.
  static constexpr int kUp = 7 - kMantissaBits;
  static constexpr int kAdd = (127 - kBias) << 7;
  static constexpr int BfloatOfSmall(int code) {
    int digits = code & kDigits, exponent = code >> kMantissaBits;
    if (code == 0) return 0;
    if (exponent > 0) return (code << kUp) + kAdd;
    for (exponent = 1; digits <= kDigits; digits *= 2) --exponent;
    return ((exponent - 1) * (kDigits + 1) + digits) * (1 << kUp) + kAdd;
  }

  static Strip Values(const uint8_t* codes);
};

#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)

// Makes 32 words of bfloat16, and of each half sixteen floats.
template <int kMantissaBits, bool kHasInfinities>
inline Strip Float8<kMantissaBits, kHasInfinities>::Values(const uint8_t* codes) {
  struct alignas(64) Small {
    uint16_t values[32] = {};
    constexpr Small() {
      for (int i = 0; i < 16; ++i) values[i] = static_cast<uint16_t>(BfloatOfSmall(i));
    }
  };
  static constexpr Small kSmall;
  const __m512i all = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const __m512i magnitude = _mm512_and_si512(all, _mm512_set1_epi16(0x7f));
  __m512i words = _mm512_add_epi16(_mm512_slli_epi16(magnitude, kUp), _mm512_set1_epi16(kAdd));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(16));
  words = _mm512_mask_permutexvar_epi16(words, is_small, magnitude, _mm512_load_si512(&kSmall));
  const __m512i special = _mm512_set1_epi16(kSpecial), no_number = _mm512_set1_epi16(0x7f80);
  const __mmask32 is_special = _mm512_cmpeq_epi16_mask(_mm512_and_si512(all, special), special);
  words = _mm512_or_si512(words, _mm512_maskz_mov_epi16(is_special, no_number));
  words = _mm512_or_si512(words, _mm512_and_si512(_mm512_slli_epi16(all, 8), _mm512_set1_epi16(-0x8000)));
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(words));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1));
  return {{(Vec)_mm512_slli_epi32(low, 16), (Vec)_mm512_slli_epi32(high, 16)}};
}

#elif defined(__AVX2__)

// Makes the high and the low byte of each bfloat16, and interleaves them with zeros.
template <int kMantissaBits, bool kHasInfinities>
inline Strip Float8<kMantissaBits, kHasInfinities>::Values(const uint8_t* codes) {
  struct alignas(16) Small {
    uint8_t low[16] = {}, high[16] = {};
    constexpr Small() {
      for (int i = 0; i < 16; ++i) {
        low[i] = static_cast<uint8_t>(BfloatOfSmall(i));
        high[i] = static_cast<uint8_t>(BfloatOfSmall(i) >> 8);
      }
    }
  };
  static constexpr Small kSmall;
  const auto table = [](const uint8_t* values) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
  };
  // In this order, interleaving within 128 bits gives the values in theirs.
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const Bytes all = (Bytes)_mm256_permutevar8x32_epi32(loaded, order), magnitude = all & 0x7f;
  const __m256i is_small = (__m256i)((magnitude & 0x70) == 0);
  constexpr uint8_t kSpecialByte = kSpecial;
  Bytes low = ShiftUp(all, kUp) & static_cast<uint8_t>(0xff << kUp);
  Bytes high =
      (ShiftDown(magnitude, 8 - kUp) & static_cast<uint8_t>(0x7f >> (8 - kUp))) + static_cast<uint8_t>(kAdd >> 8);
  low = (Bytes)_mm256_blendv_epi8((__m256i)low, _mm256_shuffle_epi8(table(kSmall.low), (__m256i)magnitude), is_small);
  high =
      (Bytes)_mm256_blendv_epi8((__m256i)high, _mm256_shuffle_epi8(table(kSmall.high), (__m256i)magnitude), is_small);
  high |= (Bytes)((magnitude & kSpecialByte) == kSpecialByte) & 0x7f;  // `low` ends the exponent with a 1 already
  high |= all & 0x80;
  const __m256i zero = _mm256_setzero_si256();
  const __m256i first = _mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
  const __m256i second = _mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
  const __m256i words[] = {_mm256_unpacklo_epi16(zero, first), _mm256_unpackhi_epi16(zero, first),
                           _mm256_unpacklo_epi16(zero, second), _mm256_unpackhi_epi16(zero, second)};
  Strip found;
  std::memcpy(&found, words, sizeof found);
  return found;
}

#elif defined(EFORMER_NEON)

// Makes float16, whose exponent has 5 bits: the upper byte is a code of e5m2. One of e4m3 becomes its 256th.
template <int kMantissaBits, bool kHasInfinities>
inline Strip Float8<kMantissaBits, kHasInfinities>::Values(const uint8_t* codes) {
  static_assert(kMantissaBits == (kHasInfinities ? 2 : 3));
  Strip found;
  for (int i = 0; i < kStripSize; i += 8) {
    const uint8x8_t some = vld1_u8(codes + i);
    uint16x8_t words;
    if constexpr (kHasInfinities) {
      words = vshll_n_u8(some, 8);
    } else {
      words = (uint16x8_t)vshll_n_s8((int8x8_t)some, 7);  // with the sign twice
      const uint16x8_t is_special = vceqq_u16(words & vdupq_n_u16(0x3f80), vdupq_n_u16(0x3f80));
      words = (words & vdupq_n_u16(0xbfff)) | (is_special & vdupq_n_u16(0x7fff));
    }
    const float32x4_t halves[2] = {vcvt_f32_f16((float16x4_t)vget_low_u16(words)),
                                   vcvt_f32_f16((float16x4_t)vget_high_u16(words))};
    for (int half = 0; half < 2; ++half) found.v[i / 4 + half] = (Vec)halves[half] * (kHasInfinities ? 1.0f : 256.0f);
  }
  return found;
}

#else

template <int kMantissaBits, bool kHasInfinities>
inline Strip Float8<kMantissaBits, kHasInfinities>::Values(const uint8_t* codes) {
  struct All {
    float values[256] = {};
    constexpr All() {
      for (int i = 0; i < 256; ++i) values[i] = Value(i);
    }
  };
  static constexpr All kAll;
  float found[kStripSize];
  for (int i = 0; i < kStripSize; ++i) found[i] = kAll.values[codes[i]];
  return LoadStrip(found);
}

#endif

// A format of them, which has a name besides: with a scale for each block along an axis, or for each row, each column
// or all.
template <int kMantissaBits, bool kHasInfinities, bool kInBlocks>
struct Float8Format : Float8<kMantissaBits, kHasInfinities> {
  static constexpr CodeType kCodes = kHasInfinities ? CodeType::kE5m2 : CodeType::kE4m3;
  static constexpr ScaleKind kScales = kInBlocks ? ScaleKind::kPerBlock : ScaleKind::kBroadcast;
};

}  // namespace eformer::EFORMER_ISA
