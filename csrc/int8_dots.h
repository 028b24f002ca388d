// One row of x rounded to int8 times the transpose of a matrix: a dot product for each row of the matrix.
#pragma once

#include "int8_matmul.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kSpan = 64;  // bytes of a row that are multiplied at a time; x is in Int8Order with this span
constexpr int kSpanVectors = kSpan / kIntBytes;

// The dot products of x and kRows rows at a time.
template <class Format, bool kPacked>
struct Int8DotsOf {
  static constexpr int kPlaces = kPacked ? kValuesPerByte<Format> : 1;
  typedef DotsOf<Format> Dots;
  static_assert(Dots::kMaxTerms >= kPlaces);

  const Matrix& m;
  const Int8X& x;
  const int64_t row_bytes = kPacked ? m.RowBytes(kPlaces) : m.cols;
  const int64_t spans = CeilDiv(row_bytes, kSpan);
  const int64_t blocks = CeilDiv(m.cols, x.block);
  const int64_t stride = x.depth / x.block + kIntLanes;  // of factors
  Floats factors{4 * stride};                            // of the blocks of each row
  Floats x_sums{stride};                                 // of the blocks of the matrix
  Zeros<int32_t> corrections{spans * kSpan / 4};         // of each lane, for the bias
  int32_t places[kSpanVectors][kIntLanes];               // the block of each lane, from that of the first on

  Int8DotsOf(const Matrix& m, const Int8X& x) : m(m), x(x) {
    for (int h = 0; h < kSpanVectors; ++h) {
      for (int i = 0; i < kIntLanes; ++i) {
        places[h][i] = static_cast<int32_t>((h * kIntBytes + 4 * i) * kPlaces / x.block - FirstBlock(0, h));
      }
    }
    for (int64_t i = 0; i < spans * kSpan * kPlaces && Int8Codes<Format>::kBias != 0; ++i) {
      corrections.values[i / (kSpan * kPlaces) * (kSpan / 4) + i % kSpan / 4] -= Int8Codes<Format>::kBias * x.values[i];
    }
    if (Format::kScales == ScaleKind::kBroadcast) {
      for (int r = 0; r < 4; ++r) std::memcpy(factors.values + r * stride, x.steps, blocks * sizeof(float));
    } else {
      for (int64_t b = 0; b < blocks; ++b) {
        x_sums.values[b * x.block / m.block] += x.steps[b] * static_cast<float>(x.sums[b]);
      }
    }
  }

  int64_t FirstBlock(int64_t span, int h) const { return (span * kSpan + h * kIntBytes) * kPlaces / x.block; }

  // Writes the factors of the blocks of a row, and returns the sum of its offsets times x.
  float TakeScales(int64_t row, float* to, float* buffer) const {
    const int64_t count = m.BlockScaleStride(), each = m.block / x.block;
    const float* scale = ScalesAt(m, row, 0, count, buffer);
    constexpr float kUnit = 1 / Format::kInt8Steps;
    if (each == 1) {
      for (int64_t b = 0; b < blocks; ++b) to[b] = scale[b] * (x.steps[b] * kUnit);
    } else {
      for (int64_t b = 0; b < blocks; ++b) to[b] = scale[b / each] * (x.steps[b] * kUnit);
    }
    const float* offset = OffsetsAt(m, row, 0, count, buffer);
    if (offset == nullptr) return 0;
    Strip sum{};
    float rest = 0;
    int64_t b = 0;
    for (; b + kStripSize <= count; b += kStripSize)
      AddProduct(sum, LoadStrip(offset + b), LoadStrip(&x_sums.values[b]));
    for (; b < count; ++b) rest += offset[b] * x_sums.values[b];
    return Sum(sum) + rest;
  }

  // The bytes of a span of a row, all of which can be read.
  EFORMER_INLINE const uint8_t* SpanOf(int64_t row, int64_t span, uint8_t (&copy)[kSpan]) const {
    if constexpr (kPacked) {
      const uint8_t* from = m.planes[0] + row * row_bytes + span * kSpan;
      if ((span + 1) * kSpan <= row_bytes) return from;
      std::memset(copy, 0, kSpan);
      std::memcpy(copy, from, row_bytes - span * kSpan);
    } else {
      Bytes codes[2] = {};
      AddPlanes<Format>(m, row, span * kSpan, m.cols - span * kSpan, codes);
      StoreVector(copy, codes[0]);
      StoreVector(copy + kStripSize, codes[1]);
    }
    return copy;
  }

  template <int kRows>
  void Run(int64_t n, float* buffer, float* y) const {
    float rest[kRows] = {};
    if constexpr (Format::kScales == ScaleKind::kPerBlock) {
      for (int r = 0; r < kRows; ++r) rest[r] = TakeScales(n + r, factors.values + r * stride, buffer);
    }
    Reals sums[kRows] = {};
    IntBytes nan[kRows] = {};
    const int64_t ahead = 4 * row_bytes;
    for (int64_t t = 0; t < spans; ++t) {
      const int8_t* xs = x.values + t * kSpan * kPlaces;
      const uint8_t* codes[kRows];
      alignas(64) uint8_t copies[kRows][kSpan];
      for (int r = 0; r < kRows; ++r) {
        codes[r] = SpanOf(n + r, t, copies[r]);
        if constexpr (kPacked) __builtin_prefetch(codes[r] + ahead);
      }
      for (int h = 0; h < kSpanVectors; ++h) {
        const Ints block_places = LoadVector<Ints>(places[h]);
        const int64_t first = FirstBlock(t, h);
        for (int r = 0; r < kRows; ++r) {
          const IntBytes flipped = FlipPacked<Format, kPlaces>(LoadVector<IntBytes>(codes[r] + h * kIntBytes));
          if constexpr (Int8Codes<Format>::kHasNaN) nan[r] |= FindNaN(flipped);
          typename Dots::Sum sum{};
          ForEachPlace<kPlaces>([&](auto place) {
            const Ints factor = LoadVector<Ints>(xs + place * kSpan + h * kIntBytes);
            sum = Dots::Add(sum, Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped)), factor);
          });
          Ints whole = Dots::Widen(sum);
          if constexpr (Int8Codes<Format>::kBias != 0) {
            whole += LoadVector<Ints>(corrections.values + t * (kSpan / 4) + h * kIntLanes);
          }
          sums[r] += ToReals(whole) * PickReals(LoadVector<Reals>(factors.values + r * stride + first), block_places);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      float lanes[kIntLanes], total = 0;
      StoreVector(lanes, sums[r]);
      for (float lane : lanes) total += lane;
      y[n + r] = total + rest[r];
      if constexpr (Int8Codes<Format>::kHasNaN) {
        uint64_t bits[kIntBytes / 8], any = 0;
        StoreVector(bits, nan[r]);
        for (uint64_t some : bits) any |= some;
        if (any != 0) y[n + r] = __builtin_nanf("");
      }
    }
  }
};

template <class Format, bool kPacked>
static void RunInt8Dots(const Matrix& m, const Int8X& x, int64_t n0, int64_t n1, float* y) {
  const Int8DotsOf<Format, kPacked> dots(m, x);
  const Floats buffer(Format::kScales == ScaleKind::kPerBlock ? m.BlockScaleStride() : 0);
  int64_t n = n0;
  for (; n + 4 <= n1; n += 4) dots.template Run<4>(n, buffer.values, y);
  for (; n < n1; ++n) dots.template Run<1>(n, buffer.values, y);
}

template <class Format>
static void Int8Dots(const Matrix& m, const Int8X& x, int64_t n0, int64_t n1, float* y) {
  if (IsPackedAlongDepth<Format>(m)) return RunInt8Dots<Format, true>(m, x, n0, n1, y);
  if constexpr (kPlanes<Format> > 1 || kValuesPerByte<Format> > 1) RunInt8Dots<Format, false>(m, x, n0, n1, y);
}

template <class Format>
constexpr decltype(Kernels::int8_dots) Int8DotsOrNull() {
  if constexpr (Format::kInt8Steps > 0) {
    return Int8Dots<Format>;
  } else {
    return nullptr;
  }
}

}  // namespace eformer::EFORMER_ISA
