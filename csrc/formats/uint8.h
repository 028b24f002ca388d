// Codes of 8 bits.
#pragma once

#include "loops/grouped.h"

namespace eformer::EFORMER_ISA {

struct Uint8 : GroupedIntegers<Uint8, 8> {
  static constexpr const char* kName = "uint8";
  static constexpr int kPlaneBits[] = {8};
};

}  // namespace eformer::EFORMER_ISA
