// Codes that are floating point numbers of 8 bits: a sign, an exponent and a mantissa.
#pragma once

#include "matrix/format.h"
#include "matrix/numbers.h"

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

  static Strip Values(const uint8_t* codes) {
    Strip found;
    for (int i = 0; i < kStripVecs; ++i) found.v[i] = Decode(codes + i * kLanes);
    return found;
  }

 private:
  static Vec Decode(const uint8_t* codes) {
#if defined(__F16C__) || defined(EFORMER_NEON)
    // A float16 has 5 bits of exponent: its upper byte is a code of e5m2, and one of e4m3 becomes its 256th.
    Halves halves = LoadSigned(codes);
    if constexpr (kHasInfinities) return FromHalves(halves << 8);
    halves <<= 7;  // with the sign twice
    const Halves is_special = (Halves)((halves & 0x3f80) == 0x3f80);
    return FromHalves((halves & 0xbfff) | (is_special & 0x7fff)) * 256;
#else
    return ReadSmallFloat < uint8_t, 8, kMantissaBits, kSpecial,
           kHasInfinities ? 0x7f800000 : 0x7fc00000 > ::Of(LoadWords(codes));
#endif
  }
};

// A format of them, which has a name besides: with a scale for each block along an axis, or for each row, each column
// or all.
template <int kMantissaBits, bool kHasInfinities, bool kInBlocks>
struct Float8Format : Float8<kMantissaBits, kHasInfinities> {
  static constexpr CodeType kCodes = kHasInfinities ? CodeType::kE5m2 : CodeType::kE4m3;
  static constexpr ScaleKind kScales = kInBlocks ? ScaleKind::kPerBlock : ScaleKind::kBroadcast;
};

}  // namespace eformer::EFORMER_ISA
