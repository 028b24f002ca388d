// Integers in blocks: what the formats uint2 to uint8 share. A code is its own value, before its block's scale.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

template <int kBits>
struct Integers : FormatDefaults {
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kCentre = 1 << (kBits - 1);
  static constexpr float kInt8Steps = 1;
  static constexpr bool kIsInteger = true;
  static constexpr float Value(int code) { return static_cast<float>(code); }
};

}  // namespace eformer::EFORMER_ISA
