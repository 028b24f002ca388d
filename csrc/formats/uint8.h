// Codes of 8 bits.
#pragma once

#include "matrix/integers.h"

namespace eformer::EFORMER_ISA {

struct Uint8 : Integers<8> {
  static constexpr const char* kName = "uint8";
  static constexpr int kPlaneBits[] = {8};
};

}  // namespace eformer::EFORMER_ISA
