// The fallback: few rows of x times any matrix, run by run of decoded values. It is correct for every block size, scale
// and x, also where sums of unscaled values would overflow.
#pragma once

#include "matrix/decode_rows.h"

namespace eformer::EFORMER_ISA {

// Whether x times any value is finite, with room for sums. Else scale * sum + offset * (sum of x) could be NaN where
// the sum of scaled values is infinite.
EFORMER_NOINLINE static bool AreModerate(const float* x, int64_t count) {
  constexpr float kLargest = 0x1p100f;
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= x[i] <= kLargest && x[i] >= -kLargest;
  return all;
}

// Whether something is to be added to scale * (value - kCentre).
template <class Format>
EFORMER_INLINE bool HasOffsets(const Matrix& m) {
  return Format::kScales == ScaleKind::kPerBlock && (m.offsets.entries != nullptr || Format::kCentre != m.centre);
}

// As Kernels::gemv says.
template <class Format>
static void GemvAny(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  const Decoder<Format> decoder = ExactDecoder<Format>(m);
  for (int64_t n = n0; n < n1; n += kRunValues) {
    const int64_t present = Min(kRunValues, n1 - n);
    float values[kRunValues];
    Strip found[2] = {};
    for (int64_t k = k0; k < k1; ++k) {
      DecodeRun<Format>(m, decoder, k, n, present, values);
      for (int i = 0; i < 2; ++i) AddProduct(found[i], LoadStrip(values + i * kStripSize), Spread(x[k]));
    }
    for (int i = 0; i < 2; ++i) StoreStrip(values + i * kStripSize, found[i]);
    std::memcpy(y + n - n0, values, present * sizeof(float));
  }
}

// As Kernels::dots says.
template <class Format>
static void DotsAny(const Matrix& m, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y) {
  const Decoder<Format> decoder = ExactDecoder<Format>(m);
  for (int64_t n = n0; n < n1; ++n) {
    float sums[kDotRows] = {};
    for (int64_t c = 0; c < m.cols; c += kRunValues) {
      const int64_t present = Min(kRunValues, m.cols - c);
      float values[kRunValues];
      DecodeRun<Format>(m, decoder, n, c, present, values);
      for (int64_t r = 0; r < count; ++r) {
        const float* xs = x.values + r * x.stride + c;
        Strip sum{};
        for (int i = 0; i < kRunValues && present == kRunValues; i += kStripSize) {
          AddProduct(sum, LoadStrip(values + i), LoadStrip(xs + i));
        }
        sums[r] += Sum(sum);
        for (int64_t i = 0; i < present && present < kRunValues; ++i) sums[r] += values[i] * xs[i];
      }
    }
    for (int64_t r = 0; r < count; ++r) y[r * m.Width() + n] = sums[r];
  }
}

}  // namespace eformer::EFORMER_ISA
