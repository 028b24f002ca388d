// INT8: a byte is its own value.
#pragma once

#include "loops/byte_rows.h"
#include "matrix/codes.h"
#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

struct Int8 : FormatDefaults {
  static constexpr const char* kName = "int8";
  static constexpr int kPlaneBits[] = {8};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr CodeType kCodes = CodeType::kInt8;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return static_cast<int8_t>(code); }

  static Strip Values(const uint8_t* codes);
  static constexpr auto RowMatmul = ByteRowMatmul<Int8>;
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
};

inline Strip Int8::Values(const uint8_t* codes) { return FromInt8(reinterpret_cast<const int8_t*>(codes)); }

inline void Int8::RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; ++n) {
    Strip sum{};
    ForEachBytes(m.planes[0] + n * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
      AddProduct(sum, FromInt8(reinterpret_cast<const int8_t*>(codes)), LoadStrip(x + c));
    });
    y[n] = Sum(sum);
  }
}

}  // namespace eformer::EFORMER_ISA
