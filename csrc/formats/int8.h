// INT8: a byte is its own value.
#pragma once

#include "byte_rows.h"
#include "codes.h"
#include "format.h"
#include "integers.h"

namespace eformer::EFORMER_ISA {

struct Int8 : FormatDefaults {
  static constexpr const char* kName = "int8";
  static constexpr int kPlaneBits[] = {8};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr CodeType kCodes = CodeType::kInt8;
  static constexpr float Value(int code) { return static_cast<int8_t>(code); }

  static Strip Values(const uint8_t* codes);
  static constexpr auto RowMatmul = ByteRowMatmul<Int8>;
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
#if defined(__AVX2__)
  static void Int8RowMatmul(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                            float* sums);
#endif
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

#if defined(__AVX2__)

inline void Int8::Int8RowMatmul(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                float* sums) {
  alignas(64) int32_t whole[kSliceColumns + kStripSize] = {};
  for (int64_t k = k0; k < k1; k += kByteRows) {
    const int rows = static_cast<int>(Min(kByteRows, k1 - k));
    const uint8_t* first = m.planes[0] + k * m.cols + n0;
    ForEachStrip(first, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      IntStrip sum = LoadInts(whole + n);
      Bytes four[kByteRows] = {};
      for (int r = 0; r < kByteRows && r < rows; ++r, codes += stride) {  // unrolled: `four` stays in registers
        PrefetchAfter(codes, kByteRows * stride);
        four[r] = LoadBytes(codes);
      }
      AddFour(sum, SpreadFour(x + k, rows), four);
      StoreInts(whole + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStripSize) ToColumns(LoadInts(whole + n), 1, sums + n);
}

#endif

}  // namespace eformer::EFORMER_ISA
