// Ternary: four values of -1, 0 and 1 a byte, and a code of NaN.
#pragma once

#include "matrix/codes.h"
#include "matrix/format.h"
#include "matrix/pack_floats.h"

namespace eformer::EFORMER_ISA {

constexpr float kNaN = __builtin_nanf("");
constexpr float kTernaryValues[4] = {0, -1, kNaN, 1};

struct Ternary : FormatDefaults {
  static constexpr const char* kName = "ternary";
  static constexpr int kPlaneBits[] = {2};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr bool kClearPadding = true;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return kTernaryValues[code]; }

  static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums);
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
  struct Panels;
};

// A table of x0 times the value of the low two bits plus x1 times the value of the high two: one lookup adds two
// values.
static inline Table TernaryPairTable(float x0, float x1) {
  constexpr float kLow[16] = {0, -1, kNaN, 1, 0, -1, kNaN, 1, 0, -1, kNaN, 1, 0, -1, kNaN, 1};
  constexpr float kHigh[16] = {0, 0, 0, 0, -1, -1, -1, -1, kNaN, kNaN, kNaN, kNaN, 1, 1, 1, 1};
  float sums[16];
  for (int i = 0; i < 16; i += kLanes) Store(sums + i, Load(kLow + i) * x0 + Load(kHigh + i) * x1);
  return MakeTable(sums);
}

static inline void TernaryRowByPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0,
                                          int64_t n1, float* sums) {
  Table tables[kByteRows][2];
  for (int64_t r0 = k0 / 4; r0 < (k1 + 3) / 4; r0 += kByteRows) {
    const int rows = static_cast<int>(Min(kByteRows, (k1 + 3) / 4 - r0));
    for (int r = 0; r < rows; ++r) {
      const float* xs = x + 4 * (r0 + r);
      tables[r][0] = TernaryPairTable(xs[0], xs[1]);
      tables[r][1] = TernaryPairTable(xs[2], xs[3]);
    }
    const uint8_t* first = m.planes[0] + r0 * m.cols + n0;
    ForEachStrip(first, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      Strip sum = LoadStrip(sums + n);
      for (int r = 0; r < rows; ++r, codes += stride) {
        PrefetchAfter(codes, kByteRows * stride);
        const Bytes fours = LoadBytes(codes);
        Add(sum, LookUpLow(LoadTable(tables[r][0]), fours));
        Add(sum, LookUpHigh(LoadTable(tables[r][1]), fours));
      }
      StoreStrip(sums + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStripSize) StoreStrip(sums + n, ToNatural(LoadStrip(sums + n)));
}

// Puts the codes of two rows side by side, to look them up as above. Each place in a byte has sums of its own, in lane
// order until the end.
static inline void TernaryRowByPackedColumns(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0,
                                             int64_t n1, float* sums) {
  alignas(64) float of_place[4][kSliceColumns / 4 + kStripSize] = {};
  const int64_t row_bytes = m.RowBytes(4), bytes = (n1 - n0 + 3) / 4;
  Table tables[kByteRows / 2];
  for (int64_t k = k0; k < k1; k += kByteRows) {
    const int rows = static_cast<int>(Min(kByteRows, k1 - k));
    for (int r = 0; r < rows; r += 2) tables[r / 2] = TernaryPairTable(x[k + r], r + 1 < rows ? x[k + r + 1] : 0);
    const uint8_t* first = m.planes[0] + k * row_bytes + n0 / 4;
    ForEachStrip(first, row_bytes, rows, bytes, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      for (int r = 0; r < rows; ++r) PrefetchAfter(codes + r * stride, kByteRows * stride);
      for (int place = 0; place < 4; ++place) {
        Strip sum = LoadStrip(of_place[place] + n);
        for (int r = 0; r < rows; r += 2) {
          const Bytes upper = LoadBytes(codes + r * stride);
          const Bytes lower = r + 1 < rows ? LoadBytes(codes + (r + 1) * stride) : Bytes{};
          const Bytes above = place == 0 ? ShiftUp(lower, 2) : ShiftDown(lower, 2 * place - 2);
          Add(sum, LookUpLow(LoadTable(tables[r / 2]), (ShiftDown(upper, 2 * place) & 3) | (above & 12)));
        }
        StoreStrip(of_place[place] + n, sum);
      }
    });
  }
  for (auto& of : of_place) {
    for (int64_t n = 0; n < bytes; n += kStripSize) StoreStrip(of + n, ToNatural(LoadStrip(of + n)));
  }
  for (int64_t n = 0; n < n1 - n0; ++n) sums[n] = of_place[n % 4][n / 4];
}

inline void Ternary::RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                               float* sums) {
  (m.packed_axis == 0 ? TernaryRowByPackedRows : TernaryRowByPackedColumns)(m, x, k0, k1, n0, n1, sums);
}

// Four dot products at a time: those of the four rows in a byte.
static inline void TernaryDotsOfPackedRows(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  for (int64_t n = n0; n < n1; n += 4) {
    Vec sums[4][2] = {};
    ForEachBytes(m.planes[0] + n / 4 * m.cols, m.cols, [&](const uint8_t* codes, int64_t c) {
      for (int i = 0; i < kStripVecs; ++i) {
        const Vec xs = Load(x + c + i * kLanes);
        for (int r = 0; r < 4; ++r) sums[r][i % 2] += LookUpPair(kTernaryValues, codes + i * kLanes, 2 * r) * xs;
      }
    });
    for (int64_t r = 0; r < Min(4, n1 - n); ++r) y[n + r] = Sum(sums[r][0] + sums[r][1]);
  }
}

// Brings the elements of x for each place in a byte together first.
static inline void TernaryDotsOfPackedColumns(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  const int64_t row_bytes = m.RowBytes(4), stride = row_bytes + kStripSize;
  const Floats of_place(4 * stride);
  for (int64_t c = 0; c < m.cols; ++c) of_place.values[c % 4 * stride + c / 4] = x[c];
  for (int64_t n = n0; n < n1; ++n) {
    Vec sums[4] = {};
    ForEachBytes(m.planes[0] + n * row_bytes, row_bytes, [&](const uint8_t* codes, int64_t c) {
      for (int i = 0; i < kStripSize; i += kLanes) {
        for (int place = 0; place < 4; ++place) {
          const Vec xs = Load(&of_place.values[place * stride + c + i]);
          sums[place] += LookUpPair(kTernaryValues, codes + i, 2 * place) * xs;
        }
      }
    });
    y[n] = Sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

inline void Ternary::RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  (m.packed_axis == 0 ? TernaryDotsOfPackedRows : TernaryDotsOfPackedColumns)(m, x, n0, n1, y);
}

// Decodes four rows from each row of bytes, where nothing is to be scaled or left out. It may write three rows too
// many.
struct Ternary::Panels : DecodedPanels<Ternary> {
  using DecodedPanels<Ternary>::DecodedPanels;

  const float* Decode(int64_t k0, int64_t depth, int64_t n, int64_t width, const PrefetchDistances& ahead,
                      float* panel) {
    if (m.contracted_axis == 1 || m.packed_axis == 1 || m.scale != nullptr || width < kPanelColumns) {
      return DecodedPanels<Ternary>::Decode(k0, depth, n, width, ahead, panel);
    }
    const int64_t row_bytes = m.cols;
    const uint8_t* codes = m.planes[0] + k0 / 4 * row_bytes + n;
    for (int64_t k = 0; k < depth; k += 4, codes += row_bytes, panel += 4 * kPanelStride) {
      ahead.Prefetch(codes, k / 4);
      for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
        for (int r = 0; r < 4; ++r) Store(panel + r * kPanelStride + i, LookUpPair(kTernaryValues, codes + i, 2 * r));
      }
    }
    return nullptr;
  }
};

}  // namespace eformer::EFORMER_ISA
