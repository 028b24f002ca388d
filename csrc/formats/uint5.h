// Codes of 5 bits, the fifth in a plane of its own.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint5 : Integers<5> {
  static constexpr const char* kName = "uint5";
  static constexpr int kPlaneBits[] = {4, 1};
};

}  // namespace eformer::EFORMER_ISA
