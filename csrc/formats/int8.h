// INT8: a byte is its own value.
#pragma once

#include "codes.h"
#include "format.h"

namespace eformer::EFORMER_ISA {

struct Int8 : FormatDefaults {
  static constexpr const char* kName = "int8";
  static constexpr int kPlaneBits[] = {8};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr bool kSignedCodes = true;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return static_cast<int8_t>(code); }

  static Strip Values(const uint8_t* codes);
  static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums);
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
};

inline Strip Int8::Values(const uint8_t* codes) { return FromInt8(reinterpret_cast<const int8_t*>(codes)); }

inline void Int8::RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                            float* sums) {
  for (int64_t k = k0; k < k1; k += kMaxCopied) {
    const int rows = static_cast<int>(Min(kMaxCopied, k1 - k));
    const uint8_t* first = m.planes[0] + k * m.cols + n0;
    const int64_t pairs = (n1 - n0) / (2 * kStripSize) * (2 * kStripSize);
    for (int64_t n = 0; n < pairs; n += 2 * kStripSize) {  // a cache line
      const uint8_t* codes = first + n;
      Strip left = LoadStrip(sums + n), right = LoadStrip(sums + n + kStripSize);
      for (int r = 0; r < rows; ++r, codes += m.cols) {
        PrefetchAfter(codes, kMaxCopied * m.cols);
        const Vec factor = Spread(x[k + r]);
        AddProduct(left, FromInt8(reinterpret_cast<const int8_t*>(codes)), factor);
        AddProduct(right, FromInt8(reinterpret_cast<const int8_t*>(codes + kStripSize)), factor);
      }
      StoreStrip(sums + n, left);
      StoreStrip(sums + n + kStripSize, right);
    }
    ForEachStrip(first + pairs, m.cols, rows, n1 - n0 - pairs, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip sum = LoadStrip(sums + pairs + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        AddProduct(sum, FromInt8(reinterpret_cast<const int8_t*>(codes)), Spread(x[k + r]));
      }
      StoreStrip(sums + pairs + n, sum);
    });
  }
}

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
