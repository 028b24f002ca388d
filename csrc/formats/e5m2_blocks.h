// FP8 E5M2 with a scale for each block along an axis.
#pragma once

#include "matrix/float8.h"

namespace eformer::EFORMER_ISA {

struct E5m2_blocks : Float8Format<2, true, true> {
  static constexpr const char* kName = "e5m2_blocks";
};

}  // namespace eformer::EFORMER_ISA
