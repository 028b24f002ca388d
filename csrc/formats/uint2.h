// Codes of 2 bits, four to a byte.
#pragma once

#include "loops/grouped.h"

namespace eformer::EFORMER_ISA {

struct Uint2 : GroupedIntegers<Uint2, 2> {
  static constexpr const char* kName = "uint2";
  static constexpr int kPlaneBits[] = {2};
  static constexpr bool kSplitsX = true;
};

}  // namespace eformer::EFORMER_ISA
