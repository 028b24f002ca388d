// One row of x, rounded to whole numbers of 8 bits, times a matrix contracted over its rows. The sums are exact, but the
// values of NF4 are rounded to multiples of 1 / 127.
#ifndef EFORMER_INTEGERS_H_
#define EFORMER_INTEGERS_H_

#include "codes.h"

namespace eformer {
namespace EFORMER_ISA {

#if defined(__AVX2__)

static bool HasIntegerKernel(const Matrix& m) {
  constexpr int64_t kDeepestSum = 1 << 17;  // times 127 and 128: no more fits
  if (m.contracted_axis != 0 || m.packed_axis != 0 || m.rows > kDeepestSum) return false;
  return m.format == Format::kNf4 || m.scale_row_step == 0 || m.scale_col_step == 0;
}

typedef int32_t Ints __attribute__((vector_size(32)));

// Sums of 32 columns, in the order that unpacking gives: vector i has columns 4 i to 4 i + 3, and 16 more than those.
struct IntStrip {
  Ints v[4];
};

// One vector at a time: GCC would copy a whole strip by halves of vectors, and then wait for them.
static inline IntStrip LoadInts(const int32_t* from) {
  const __m256i* v = reinterpret_cast<const __m256i*>(from);
  return {{(Ints)_mm256_load_si256(v), (Ints)_mm256_load_si256(v + 1), (Ints)_mm256_load_si256(v + 2),
           (Ints)_mm256_load_si256(v + 3)}};
}

static inline void StoreInts(int32_t* to, const IntStrip& s) {
  for (int i = 0; i < 4; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(to) + i, (__m256i)s.v[i]);
}

// The sums as floats, in the order of columns.
static inline void ToColumns(const IntStrip& s, float factor, float* columns) {
  for (int i = 0; i < 4; ++i) {
    const __m256 floats = _mm256_cvtepi32_ps((__m256i)s.v[i]) * factor;
    _mm_storeu_ps(columns + 4 * i, _mm256_castps256_ps128(floats));
    _mm_storeu_ps(columns + 4 * i + 16, _mm256_extractf128_ps(floats, 1));
  }
}

// Adds four values of x, a byte each and none of them -128, times those of four rows, which may be.
static inline void AddFour(IntStrip& sums, __m256i x, const Bytes (&rows)[4]) {
  const __m256i r0 = (__m256i)rows[0], r1 = (__m256i)rows[1], r2 = (__m256i)rows[2], r3 = (__m256i)rows[3];
  const __m256i low01 = _mm256_unpacklo_epi8(r0, r1), high01 = _mm256_unpackhi_epi8(r0, r1);
  const __m256i low23 = _mm256_unpacklo_epi8(r2, r3), high23 = _mm256_unpackhi_epi8(r2, r3);
  const auto add = [&](int i, __m256i fours) {
    const __m256i sizes = _mm256_abs_epi8(fours), factors = _mm256_sign_epi8(x, fours);
#if defined(EFORMER_VNNI)
    sums.v[i] = (Ints)_mm256_dpbusd_epi32((__m256i)sums.v[i], sizes, factors);
#else
    sums.v[i] += (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, factors), _mm256_set1_epi16(1));
#endif
  };
  add(0, _mm256_unpacklo_epi16(low01, low23));
  add(1, _mm256_unpackhi_epi16(low01, low23));
  add(2, _mm256_unpacklo_epi16(high01, high23));
  add(3, _mm256_unpackhi_epi16(high01, high23));
}

// Four values of x, of which the last may not count.
static inline __m256i SpreadFour(const int8_t* x, int64_t count) {
  uint32_t four;
  std::memcpy(&four, x, sizeof four);
  if (count < 4) four &= (1u << 8 * count) - 1;
  return _mm256_set1_epi32(static_cast<int32_t>(four));
}

static inline void Int8ByIntegers(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) int32_t sums[kStripe + kStrip] = {};
  for (int64_t k = k0; k < k1; k += kRowGroup) {
    const int rows = static_cast<int>(Min(kRowGroup, k1 - k));
    ForEachStrip(m.codes + k * m.cols + n0, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      IntStrip sum = LoadInts(sums + n);
      for (int r = 0; r < rows; r += 4) {
        Bytes four[4] = {};
        for (int i = 0; i < 4 && r + i < rows; ++i, codes += stride) {
          PrefetchAfter(codes, kRowGroup * stride);
          four[i] = LoadBytes(codes);
        }
        AddFour(sum, SpreadFour(x + k + r, rows - r), four);
      }
      StoreInts(sums + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStrip) ToColumns(LoadInts(sums + n), 1, y + n);
}

constexpr float kNf4Unit = 127;

// The values of NF4 in 8 bits, for both halves of a vector.
static inline __m256i Nf4Integers() {
  alignas(32) int8_t bytes[32];
  for (int i = 0; i < 32; ++i) {
    const float value = kNf4Values[i % 16] * kNf4Unit;
    bytes[i] = static_cast<int8_t>(value < 0 ? value - 0.5f : value + 0.5f);
  }
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
}

static inline void Nf4ByIntegers(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) int32_t sums[kStripe + kStrip];
  const __m256i table = Nf4Integers();
  const auto look_up = [&](Bytes codes) { return (Bytes)_mm256_shuffle_epi8(table, (__m256i)codes); };
  for (int64_t k = k0; k < k1; k += m.block) {
    const int64_t end = (Min(k + m.block, k1) + 1) / 2;
    const float* scale = m.scale + k / m.block * m.cols + n0;
    for (int64_t r0 = k / 2; r0 < end; r0 += kRowGroup) {
      const int rows = static_cast<int>(Min(kRowGroup, end - r0));
      const bool starts = r0 == k / 2, ends = r0 + rows == end;
      ForEachStrip(m.codes + r0 * m.cols + n0, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
        IntStrip sum = starts ? IntStrip{} : LoadInts(sums + n);
        for (int r = 0; r < rows; r += 2, codes += 2 * stride) {
          PrefetchAfter(codes, kRowGroup * stride);
          PrefetchAfter(codes + stride, kRowGroup * stride);
          const Bytes a = LoadBytes(codes), b = r + 1 < rows ? LoadBytes(codes + stride) : Bytes{};
          const Bytes four[4] = {look_up(HighNibbles(a)), look_up(LowNibbles(a)), look_up(HighNibbles(b)), look_up(LowNibbles(b))};
          AddFour(sum, SpreadFour(x + 2 * (r0 + r), Min(4, 2 * (end - r0 - r))), four);
        }
        if (!ends) return StoreInts(sums + n, sum);
        alignas(64) float columns[kStrip];
        ToColumns(sum, 1 / kNf4Unit, columns);
        for (int64_t i = 0; i < Min(kStrip, n1 - n0 - n); ++i) y[n + i] += columns[i] * scale[n + i];
      });
    }
  }
}

// Codes are brought into the order of values, of which they are then one more. Sums of pairs stay in 16 bits for a while.
static inline void TernaryByIntegers(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  constexpr int64_t kFlush = 32;  // rows of bytes: four codes of at most 2 each, 32 x 4 x 2 x 127 < 2^15
  alignas(64) int32_t sums[kStripe + kStrip] = {};
  alignas(64) Bytes threes[kStripe / kStrip + 1] = {};  // codes of no number: what they add up to does not count
  alignas(64) int16_t pairs[kStripe + kStrip];
  const __m256i low_bits = _mm256_set1_epi8(3);
  int64_t ones = 0;
  for (int64_t k = k0; k < k1; ++k) ones += x[k];
  const int64_t end = (k1 + 3) / 4;
  for (int64_t r0 = k0 / 4; r0 < end; r0 += kRowGroup) {
    const int rows = static_cast<int>(Min(kRowGroup, end - r0));
    const int64_t since = (r0 - k0 / 4) % kFlush;
    const bool starts = since == 0, ends = since + rows == kFlush || r0 + rows == end;
    ForEachStrip(m.codes + r0 * m.cols + n0, m.cols, rows, n1 - n0, [&](const uint8_t* codes, int64_t stride, int64_t n) {
      __m256i low{}, high{};
      __m256i* waiting = reinterpret_cast<__m256i*>(pairs + n);
      if (!starts) low = waiting[0], high = waiting[1];
      Bytes three = threes[n / kStrip];
      for (int r = 0; r < rows; ++r, codes += stride) {
        PrefetchAfter(codes, kRowGroup * stride);
        const __m256i c = (__m256i)(LoadBytes(codes) ^ kTernaryOrder), c1 = _mm256_srli_epi16(c, 2), c2 = _mm256_srli_epi16(c, 4);
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
      threes[n / kStrip] = three;
      if (!ends) {
        waiting[0] = low, waiting[1] = high;
        return;
      }
      IntStrip sum = LoadInts(sums + n);
      sum.v[0] += (Ints)_mm256_srai_epi32(_mm256_unpacklo_epi16(low, low), 16);
      sum.v[1] += (Ints)_mm256_srai_epi32(_mm256_unpackhi_epi16(low, low), 16);
      sum.v[2] += (Ints)_mm256_srai_epi32(_mm256_unpacklo_epi16(high, high), 16);
      sum.v[3] += (Ints)_mm256_srai_epi32(_mm256_unpackhi_epi16(high, high), 16);
      StoreInts(sums + n, sum);
    });
  }
  for (int64_t n = 0; n < n1 - n0; n += kStrip) {
    IntStrip sum = LoadInts(sums + n);
    for (Ints& v : sum.v) v -= static_cast<int32_t>(ones);
    ToColumns(sum, 1, y + n);
    for (int64_t i = 0; i < kStrip; ++i) {
      if (threes[n / kStrip][i] & 0x55) y[n + i] = kNaN;
    }
  }
}

// As Kernels::multiply_integers_by_rows says.
static void MultiplyIntegersByRows(const Matrix& m, const int8_t* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) float found[kStripe + kStrip] = {};
  switch (m.format) {
    case Format::kInt8:
      Int8ByIntegers(m, x, k0, k1, n0, n1, found);
      break;
    case Format::kNf4:
      Nf4ByIntegers(m, x, k0, k1, n0, n1, found);
      break;
    case Format::kTernary:
      TernaryByIntegers(m, x, k0, k1, n0, n1, found);
      break;
  }
  std::memcpy(y, found, (n1 - n0) * sizeof(float));
}

#else

static bool HasIntegerKernel(const Matrix&) { return false; }
constexpr decltype(Kernels::multiply_integers_by_rows) MultiplyIntegersByRows = nullptr;

#endif

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_INTEGERS_H_
