// FP8 E5M2 with a scale for each block along an axis.
#pragma once

#include "byte_rows.h"
#include "float8.h"

namespace eformer::EFORMER_ISA {

struct E5m2_blocks : Float8<2, true> {
  static constexpr const char* kName = "e5m2_blocks";
  static constexpr CodeType kCodes = CodeType::kE5m2;
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr bool kFloatScales = true;
  static constexpr auto RowMatmul = ByteRowMatmul<E5m2_blocks>;
};

}  // namespace eformer::EFORMER_ISA
