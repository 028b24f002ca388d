// FP8 E4M3: four bits of exponent, three of mantissa and no infinities. A scale for each row, each column or all.
#pragma once

#include "matrix/float8.h"

namespace eformer::EFORMER_ISA {

struct E4m3 : Float8Format<3, false, false> {
  static constexpr const char* kName = "e4m3";
};

}  // namespace eformer::EFORMER_ISA
