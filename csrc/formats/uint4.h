// Codes of 4 bits, two to a byte.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint4 : Integers<4> {
  static constexpr const char* kName = "uint4";
  static constexpr int kPlaneBits[] = {4};
};

}  // namespace eformer::EFORMER_ISA
