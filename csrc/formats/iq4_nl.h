// IQ4_NL: sixteen integers of GGUF that are denser around zero, two to a byte.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

constexpr float kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Iq4_nl : FormatDefaults {
  static constexpr const char* kName = "iq4_nl";
  static constexpr int kPlaneBits[] = {4};
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return kIq4NlValues[code]; }
};

}  // namespace eformer::EFORMER_ISA
