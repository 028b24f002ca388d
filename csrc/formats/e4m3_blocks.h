// FP8 E4M3 with a scale for each block along an axis.
#pragma once

#include "matrix/float8.h"

namespace eformer::EFORMER_ISA {

struct E4m3_blocks : Float8Format<3, false, true> {
  static constexpr const char* kName = "e4m3_blocks";
};

}  // namespace eformer::EFORMER_ISA
