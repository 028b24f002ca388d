// NF4: two 4-bit codes a byte, the first in the high bits, for the quantiles of a normal distribution, and a scale for
// each block. Dettmers et al., "QLoRA", arXiv 2305.14314, appendix E.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

constexpr float kNf4Values[16] = {// clang-format off
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
// clang-format on

struct Nf4 : FormatDefaults {
  static constexpr const char* kName = "nf4";
  static constexpr int kPlaneBits[] = {4};
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr bool kHighBitsFirst = true;
  static constexpr float kInt8Steps = 127;  // the sixteen values are rounded to multiples of 1 / 127
  static constexpr float Value(int code) { return kNf4Values[code]; }
};

}  // namespace eformer::EFORMER_ISA
