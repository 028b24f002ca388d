// Codes of 4 bits, two to a byte.
#pragma once

#include "loops/grouped.h"

namespace eformer::EFORMER_ISA {

struct Uint4 : GroupedIntegers<Uint4, 4> {
  static constexpr const char* kName = "uint4";
  static constexpr int kPlaneBits[] = {4};
  static constexpr bool kSplitsX = true;
};

}  // namespace eformer::EFORMER_ISA
