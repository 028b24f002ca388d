// Codes of 2 bits, four to a byte.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint2 : Integers<2> {
  static constexpr const char* kName = "uint2";
  static constexpr int kPlaneBits[] = {2};
};

}  // namespace eformer::EFORMER_ISA
