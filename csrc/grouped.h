// Integers in blocks: what the formats uint2 to uint8 share. A code is its own value, before its block's scale.
#pragma once

#include "decode.h"

namespace eformer::EFORMER_ISA {

template <class Format, int kBits>
struct GroupedIntegers : FormatDefaults {
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kCentre = 1 << (kBits - 1);
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return static_cast<float>(code); }

  static Strip Values(const uint8_t* codes) { return FromUint8(codes); }
};

}  // namespace eformer::EFORMER_ISA
