// FP8 E4M3 with a scale for each block along an axis.
#pragma once

#include "byte_rows.h"
#include "float8.h"

namespace eformer::EFORMER_ISA {

struct E4m3_blocks : Float8<3, false> {
  static constexpr const char* kName = "e4m3_blocks";
  static constexpr CodeType kCodes = CodeType::kE4m3;
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr bool kFloatScales = true;
  static constexpr auto RowMatmul = ByteRowMatmul<E4m3_blocks>;
};

}  // namespace eformer::EFORMER_ISA
