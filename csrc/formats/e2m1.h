// E2M1: floats of a sign, two bits of exponent and one of mantissa, two to a byte. MXFP4 and NVFP4 hold them.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

constexpr float kE2m1Values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

struct E2m1 : FormatDefaults {
  static constexpr const char* kName = "e2m1";
  static constexpr int kPlaneBits[] = {4};
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kInt8Steps = 2;
  static constexpr float Value(int code) { return kE2m1Values[code]; }
};

}  // namespace eformer::EFORMER_ISA
