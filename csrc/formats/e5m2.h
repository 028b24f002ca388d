// FP8 E5M2: five bits of exponent and two of mantissa, as in float16. A scale for each row, each column or all.
#pragma once

#include "matrix/float8.h"

namespace eformer::EFORMER_ISA {

struct E5m2 : Float8Format<2, true, false> {
  static constexpr const char* kName = "e5m2";
};

}  // namespace eformer::EFORMER_ISA
