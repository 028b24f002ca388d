// Codes of 6 bits, the high two in a plane of their own.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint6 : Integers<6> {
  static constexpr const char* kName = "uint6";
  static constexpr int kPlaneBits[] = {4, 2};
};

}  // namespace eformer::EFORMER_ISA
