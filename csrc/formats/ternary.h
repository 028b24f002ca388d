// Ternary: four values of -1, 0 and 1 a byte, and a code of NaN.
#pragma once

#include "codes.h"
#include "format.h"
#include "integers.h"
#include "panels.h"

namespace eformer::EFORMER_ISA {

constexpr float kNaN = __builtin_nanf("");
constexpr float kTernaryValues[4] = {0, -1, kNaN, 1};

struct Ternary : FormatDefaults {
  static constexpr const char* kName = "ternary";
  static constexpr int kPlaneBits[] = {2};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr bool kClearPadding = true;
  static constexpr float Value(int code) { return kTernaryValues[code]; }

  static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums);
  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y);
#if defined(__AVX2__)
  static void Int8RowMatmul(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                            float* sums);
#endif
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

#if defined(__AVX2__)

// XOR with 0x55 turns each code into its value plus one, and NaN into 3. The sums of x are subtracted at the end.
inline void Ternary::Int8RowMatmul(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                                   float* sums) {
  constexpr uint8_t kToValuePlusOne = 0x55;
  constexpr int64_t kFlushRows = 32;  // rows of bytes whose sums fit into 16 bits: 32 x 4 codes x 2 x 127 < 2^15
  alignas(64) int32_t whole[kSliceColumns + kStripSize] = {};
  alignas(64) Bytes threes[kSliceColumns / kStripSize + 1] = {};  // the low bit of a code is set where one was NaN
  alignas(64) int16_t shorts[kSliceColumns + kStripSize];
  const __m256i low_bits = _mm256_set1_epi8(3);
  int64_t x_sum = 0;
  for (int64_t k = k0; k < k1; ++k) x_sum += x[k];
  const int64_t end = (k1 + 3) / 4;
  for (int64_t r0 = k0 / 4; r0 < end; r0 += kByteRows) {
    const int rows = static_cast<int>(Min(kByteRows, end - r0));
    const int64_t since = (r0 - k0 / 4) % kFlushRows;
    const bool starts = since == 0, ends = since + rows == kFlushRows || r0 + rows == end;
    const uint8_t* top = m.planes[0] + r0 * m.cols + n0;
    ForEachStrip(top, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      __m256i low{}, high{};
      __m256i* waiting = reinterpret_cast<__m256i*>(shorts + n);
      if (!starts) low = waiting[0], high = waiting[1];
      Bytes three = threes[n / kStripSize];
      for (int r = 0; r < rows; ++r, codes += stride) {
        PrefetchAfter(codes, kByteRows * stride);
        const __m256i c = (__m256i)(LoadBytes(codes) ^ kToValuePlusOne);
        const __m256i c1 = _mm256_srli_epi16(c, 2), c2 = _mm256_srli_epi16(c, 4);
        const __m256i v0 = c & low_bits, v1 = c1 & low_bits, v2 = c2 & low_bits;
        const __m256i v3 = _mm256_srli_epi16(c2, 2) & low_bits;
        three |= (Bytes)(c & _mm256_srli_epi16(c, 1));
        const int8_t* xs = x + 4 * (r0 + r);
        int16_t x01, x23;
        std::memcpy(&x01, xs, 2);
        std::memcpy(&x23, xs + 2, 2);
        const __m256i first = _mm256_set1_epi16(x01), second = _mm256_set1_epi16(x23);
        const auto sum = [&](__m256i a, __m256i b) {
          return _mm256_add_epi16(_mm256_maddubs_epi16(a, first), _mm256_maddubs_epi16(b, second));
        };
        low = _mm256_add_epi16(low, sum(_mm256_unpacklo_epi8(v0, v1), _mm256_unpacklo_epi8(v2, v3)));
        high = _mm256_add_epi16(high, sum(_mm256_unpackhi_epi8(v0, v1), _mm256_unpackhi_epi8(v2, v3)));
      }
      threes[n / kStripSize] = three;
      if (!ends) {
        waiting[0] = low, waiting[1] = high;
        return;
      }
      IntStrip sum = LoadInts(whole + n);
      sum.v[0] += (Ints)_mm256_srai_epi32(_mm256_unpacklo_epi16(low, low), 16);
      sum.v[1] += (Ints)_mm256_srai_epi32(_mm256_unpackhi_epi16(low, low), 16);
      sum.v[2] += (Ints)_mm256_srai_epi32(_mm256_unpacklo_epi16(high, high), 16);
      sum.v[3] += (Ints)_mm256_srai_epi32(_mm256_unpackhi_epi16(high, high), 16);
      StoreInts(whole + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStripSize) {
    IntStrip sum = LoadInts(whole + n);
    for (Ints& v : sum.v) v -= static_cast<int32_t>(x_sum);
    ToColumns(sum, 1, sums + n);
    for (int64_t i = 0; i < kStripSize; ++i) {
      if (threes[n / kStripSize][i] & 0x55) sums[n + i] = kNaN;
    }
  }
}

#endif

}  // namespace eformer::EFORMER_ISA
