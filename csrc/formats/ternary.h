// Ternary: four values of -1, 0 and 1 a byte, and a code of NaN.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

constexpr float kNaN = __builtin_nanf("");
constexpr float kTernaryValues[4] = {0, -1, kNaN, 1};

struct Ternary : FormatDefaults {
  static constexpr const char* kName = "ternary";
  static constexpr int kPlaneBits[] = {2};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr bool kClearPadding = true;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return kTernaryValues[code]; }
};

}  // namespace eformer::EFORMER_ISA
