// FP8 E4M3: four bits of exponent, three of mantissa and no infinities. A scale for each row, each column or all.
#pragma once

#include "byte_rows.h"
#include "float8.h"

namespace eformer::EFORMER_ISA {

struct E4m3 : Float8<3, false> {
  static constexpr const char* kName = "e4m3";
  static constexpr CodeType kCodes = CodeType::kE4m3;
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr auto RowMatmul = ByteRowMatmul<E4m3>;
};

}  // namespace eformer::EFORMER_ISA
