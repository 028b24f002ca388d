// Codes of 3 bits, the third in a plane of its own.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint3 : Integers<3> {
  static constexpr const char* kName = "uint3";
  static constexpr int kPlaneBits[] = {2, 1};
};

}  // namespace eformer::EFORMER_ISA
