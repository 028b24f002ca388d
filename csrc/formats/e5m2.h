// FP8 E5M2: five bits of exponent and two of mantissa, as in float16. A scale for each row, each column or all.
#pragma once

#include "byte_rows.h"
#include "float8.h"

namespace eformer::EFORMER_ISA {

struct E5m2 : Float8<2, true> {
  static constexpr const char* kName = "e5m2";
  static constexpr CodeType kCodes = CodeType::kE5m2;
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr auto RowMatmul = ByteRowMatmul<E5m2>;
};

}  // namespace eformer::EFORMER_ISA
