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
  const int64_t blocks = CeilDiv(m.cols, x.block), span_blocks = kSpan * kPlaces / x.block;
  const float centre = CentreOf<Format>(m);
  const int64_t stride = x.depth / x.block + kIntLanes;  // of factors
  Floats factors{4 * stride};                            // of the blocks of each row
  Floats x_sums{stride};                                 // of the blocks of the matrix
  Zeros<int32_t> corrections{spans * kSpan / 4};         // of each lane, for the bias
  int64_t first_block[kSpanVectors];                     // in a span, of each of its vectors
  int32_t places[kSpanVectors][kIntLanes];               // the block of each lane, from that one on

  Int8DotsOf(const Matrix& m, const Int8X& x) : m(m), x(x) {
    for (int h = 0; h < kSpanVectors; ++h) {
      first_block[h] = h * kIntBytes * kPlaces / x.block;
      for (int i = 0; i < kIntLanes; ++i) {
        places[h][i] = static_cast<int32_t>((h * kIntBytes + 4 * i) * kPlaces / x.block - first_block[h]);
      }
    }
    const int32_t bias = BiasOf<Format>(m);
    for (int64_t t = 0; t < spans && bias != 0; ++t) {
      for (int64_t i = 0; i < kSpan * kPlaces; ++i) {
        corrections.values[t * (kSpan / 4) + i % kSpan / 4] -= bias * x.values[t * kSpan * kPlaces + i];
      }
    }
    if (Format::kScales == ScaleKind::kBroadcast) {
      for (int r = 0; r < 4; ++r) std::memcpy(factors.values + r * stride, x.steps, blocks * sizeof(float));
    } else {
      for (int64_t b = 0; b < blocks; ++b) {
        x_sums.values[b * x.block / m.block] += x.steps[b] * static_cast<float>(x.sums[b]);
      }
    }
  }

  // Writes the factors of the blocks of a row, and returns the sum of its offsets times x.
  float TakeScales(int64_t row, float* to, float* buffer) const {
    const int64_t count = m.BlockScaleStride(), each = m.block / x.block;
    const float* scale = ScalesAt(m, row, 0, count, buffer);
    const float* offset = OffsetsAt(m, row, 0, count, centre, scale, buffer + count);
    constexpr float kUnit = 1 / Format::kInt8Steps;
    if (each == 1) {
      for (int64_t b = 0; b < blocks; ++b) to[b] = scale[b] * (x.steps[b] * kUnit);
    } else {
      for (int64_t b = 0; b < blocks; ++b) to[b] = scale[b / each] * (x.steps[b] * kUnit);
    }
    if (offset == nullptr) return 0;
    Strip sum{};
    float rest = 0;
    int64_t b = 0;
    for (; b + kStripSize <= count; b += kStripSize)
      AddProduct(sum, LoadStrip(offset + b), LoadStrip(&x_sums.values[b]));
    for (; b < count; ++b) rest += offset[b] * x_sums.values[b];
    return Sum(sum) + rest;
  }

  // A copy of a span of a row, with zeros behind the row.
  const uint8_t* CopySpan(int64_t row, int64_t span, uint8_t (&copy)[kSpan]) const {
    if constexpr (kPacked) {
      std::memset(copy, 0, kSpan);
      std::memcpy(copy, m.planes[0] + row * row_bytes + span * kSpan, row_bytes - span * kSpan);
    } else {
      Bytes codes[2] = {};
      AddPlanes<Format>(m, row, span * kSpan, m.cols - span * kSpan, codes);
      StoreVector(copy, codes[0]);
      StoreVector(copy + kStripSize, codes[1]);
    }
    return copy;
  }

  template <int kRows>
  EFORMER_INLINE void AddSpan(int64_t t, const uint8_t* const (&codes)[kRows], Reals (&sums)[kRows],
                              IntBytes (&nan)[kRows]) const {
    const int8_t* xs = x.values + t * kSpan * kPlaces;
    for (int h = 0; h < kSpanVectors; ++h) {
      const Ints block_places = LoadVector<Ints>(places[h]);
      const Ints correction = LoadVector<Ints>(corrections.values + t * (kSpan / 4) + h * kIntLanes);
      const float* factor = factors.values + t * span_blocks + first_block[h];
      for (int r = 0; r < kRows; ++r, factor += stride) {
        const IntBytes flipped = FlipPacked<Format, kPlaces>(LoadVector<IntBytes>(codes[r] + h * kIntBytes));
        if constexpr (Int8Codes<Format>::kHasNaN) nan[r] |= FindNaN(flipped);
        typename Dots::Sum sum{};
        ForEachPlace<kPlaces>([&](auto place) {
          const Ints four = LoadVector<Ints>(xs + place * kSpan + h * kIntBytes);
          sum = Dots::Add(sum, Dots::Prepare(BytesAt<Format, kPlaces, place>(flipped)), four);
        });
        sums[r] += ToReals(Dots::Widen(sum) + correction) * PickReals(LoadVector<Reals>(factor), block_places);
      }
    }
  }

  template <int kRows>
  void Run(int64_t n, float* buffer, float* y) const {
    float rest[kRows] = {};
    if constexpr (Format::kScales == ScaleKind::kPerBlock) {
      for (int r = 0; r < kRows; ++r) rest[r] = TakeScales(n + r, factors.values + r * stride, buffer);
    }
    Reals sums[kRows] = {};
    IntBytes nan[kRows] = {};
    const uint8_t* codes[kRows];
    int64_t t = 0;
    if constexpr (kPacked) {
      for (int r = 0; r < kRows; ++r) codes[r] = m.planes[0] + (n + r) * row_bytes;
      for (; (t + 1) * kSpan <= row_bytes; ++t) {
        for (int r = 0; r < kRows; ++r) __builtin_prefetch(codes[r] + 4 * row_bytes);
        AddSpan<kRows>(t, codes, sums, nan);
        for (int r = 0; r < kRows; ++r) codes[r] += kSpan;
      }
    }
    alignas(64) uint8_t copies[kRows][kSpan];
    for (; t < spans; ++t) {
      for (int r = 0; r < kRows; ++r) codes[r] = CopySpan(n + r, t, copies[r]);
      AddSpan<kRows>(t, codes, sums, nan);
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
  const Floats buffer(Format::kScales == ScaleKind::kPerBlock ? 2 * m.BlockScaleStride() : 0);
  int64_t n = n0;
  for (; n + 4 <= n1; n += 4) dots.template Run<4>(n, buffer.values, y);
  for (; n < n1; ++n) dots.template Run<1>(n, buffer.values, y);
}

template <class Format>
static void Int8Dots(const Matrix& m, const Int8X& x, int64_t n0, int64_t n1, float* y) {
  WithPacking<Format>(m, [&](auto packed) { RunInt8Dots<Format, packed>(m, x, n0, n1, y); });
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
