// One row of x, split as split_x.h says, times a matrix of integers in blocks.
#pragma once

#include "fields.h"
#include "int8_simd.h"
#include "split_x.h"

namespace eformer::EFORMER_ISA {

#if defined(EFORMER_BYTE_DOTS)

// Blocks of x: as long as those of the matrix, up to 64.
static inline int64_t SplitLength(const Matrix& m) { return m.block % 64 == 0 ? 64 : 32; }

// Zeros that start at a cache line: vectors of 64 bytes that cross one take twice as long to load.
template <class T>
struct AlignedZeros {
  Zeros<T> all;
  T* values;

  explicit AlignedZeros(int64_t count)
      : all(count + 64 / sizeof(T)),
        values(reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(all.values) + 63) / 64 * 64)) {}
};

// quads[i] has four bytes of each of the columns 16 j + 4 i to 16 j + 4 i + 3, from four rows of 64 bytes.
EFORMER_INLINE void QuadsOfLines(const IntBytes (&rows)[4], IntBytes (&quads)[4]) {
  const __m512i r0 = (__m512i)rows[0], r1 = (__m512i)rows[1], r2 = (__m512i)rows[2], r3 = (__m512i)rows[3];
  const __m512i low01 = _mm512_unpacklo_epi8(r0, r1), high01 = _mm512_unpackhi_epi8(r0, r1);
  const __m512i low23 = _mm512_unpacklo_epi8(r2, r3), high23 = _mm512_unpackhi_epi8(r2, r3);
  quads[0] = (IntBytes)_mm512_unpacklo_epi16(low01, low23);
  quads[1] = (IntBytes)_mm512_unpackhi_epi16(low01, low23);
  quads[2] = (IntBytes)_mm512_unpacklo_epi16(high01, high23);
  quads[3] = (IntBytes)_mm512_unpackhi_epi16(high01, high23);
}

// Stores numbers that are in the order of QuadsOfLines.
EFORMER_INLINE void StoreLine(float* to, const Reals (&v)[4]) {
  const __m512 a = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4((__m512)v[0], (__m512)v[1], 0xEE);
  const __m512 c = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0x44);
  const __m512 d = _mm512_shuffle_f32x4((__m512)v[2], (__m512)v[3], 0xEE);
  StoreVector(to, _mm512_shuffle_f32x4(a, c, 0x88));
  StoreVector(to + 16, _mm512_shuffle_f32x4(a, c, 0xDD));
  StoreVector(to + 32, _mm512_shuffle_f32x4(b, d, 0x88));
  StoreVector(to + 48, _mm512_shuffle_f32x4(b, d, 0xDD));
}

// For codes packed along the rows that are summed over.
template <class Format>
struct SplitPackedRows {
  static constexpr int kPlaces = kValuesPerByte<Format>;
  static constexpr int64_t kLine = kIntBytes;  // columns at a time

  const Matrix& m;
  const int64_t k0, k1, length;
  Zeros<int32_t> fours;   // four bytes of x, for each quad, place and part
  Zeros<int32_t> starts;  // of the sums of each part, for each block
  Floats steps, x_sums;   // of each block
  bool fits;

  SplitPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1)
      : m(m),
        k0(k0),
        k1(k1),
        length(SplitLength(m)),
        fours(CeilDiv(k1 - k0, length) * length / 4 * kXParts),
        starts(CeilDiv(k1 - k0, length) * kXParts),
        steps(CeilDiv(k1 - k0, length)),
        x_sums(CeilDiv(k1 - k0, length)) {
    fits = SplitEach(x + k0, k1 - k0, length, [&](int64_t block, auto& parts, const BlockOfX& found) {
      int32_t* to = fours.values + block * length / 4 * kXParts;
      for (int part = 0; part < kXParts; ++part) {
        int8_t ordered[kMaxInt8Block];
        PutPart<kPlaces, 4>(parts[part], length, 0, ordered);
        for (int64_t i = 0; i < length / 4; ++i) std::memcpy(&to[i * kXParts + part], ordered + 4 * i, 4);
        starts.values[block * kXParts + part] = -static_cast<int32_t>(Format::kCentre) * found.sums[part];
      }
      steps.values[block] = found.step;
      x_sums.values[block] = found.Sum();
    });
  }

  // sums[n - n0] = the sum of x * (code - kCentre) over a block, for columns n0 to n1.
  void SumBlock(int64_t block, int64_t n0, int64_t n1, float* sums) const {
    const int64_t k = k0 + block * length, rows = CeilDiv(Min(length, k1 - k), kPlaces);
    const uint8_t* codes = m.planes[0] + k / kPlaces * m.cols;
    int64_t n = n0;
    if (rows % 4 == 0) {
      for (; n + kLine <= n1; n += kLine) SumLine<true>(block, codes + n, rows, kLine, sums + n - n0);
    }
    for (; n < n1; n += kLine) SumLine<false>(block, codes + n, rows, Min(kLine, n1 - n), sums + n - n0);
  }

 private:
  template <bool kWhole>
  EFORMER_INLINE void SumLine(int64_t block, const uint8_t* codes, int64_t rows, int64_t present, float* sums) const {
    const int32_t* four = fours.values + block * length / 4 * kXParts;
    Ints dots[kXParts][4];
#pragma GCC unroll 3
    for (int part = 0; part < kXParts; ++part) {
#pragma GCC unroll 4
      for (Ints& each : dots[part]) each = starts.values[block * kXParts + part] - Ints{};
    }
    for (int64_t r = 0; r < rows; r += 4, four += kPlaces * kXParts) {
      IntBytes lines[4] = {}, quads[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8_t* from = codes + (r + j) * m.cols;
        if constexpr (kWhole) {
          __builtin_prefetch(from + 4 * kLine, 0, 2);
          lines[j] = LoadVector<IntBytes>(from);
        } else if (r + j < rows) {
          std::memcpy(&lines[j], from, present);
        }
      }
      QuadsOfLines(lines, quads);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        ForEachPlace<kPlaces>([&](auto place) {
          const IntBytes bytes = BytesAt<Format, kPlaces, place>(quads[i]);
#pragma GCC unroll 3
          for (int part = 0; part < kXParts; ++part) {
            dots[part][i] = ByteDots::Add(dots[part][i], bytes, four[place * kXParts + part] - Ints{});
          }
        });
      }
    }
    Reals found[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      found[i] = Reals{};
#pragma GCC unroll 3
      for (int part = 0; part < kXParts; ++part) found[i] += ToReals(dots[part][i]) * kPartUnits[part];
      found[i] *= steps.values[block];
    }
    StoreLine(sums, found);
  }
};

// For codes packed along the columns, and dot products of x with rows of them.
template <class Format>
struct SplitPackedColumns {
  static constexpr int kPlaces = kValuesPerByte<Format>;
  static constexpr int64_t kSpan = kIntBytes, kSpanDepth = kSpan * kPlaces;

  const Matrix& m;
  const int64_t length, span_blocks, row_bytes, spans, blocks;
  AlignedZeros<int8_t> values;        // for each span, part and place
  AlignedZeros<int32_t> corrections;  // of each lane, for kCentre
  Floats steps;                       // of each block
  Floats x_sums;                      // of each block of the matrix
  const int64_t rows_at_once;
  Floats scales, offsets;      // of these rows
  Floats factors;              // their scales times steps
  int32_t places[kIntLanes];   // the block of each lane of a span
  int32_t numbers[kIntLanes];  // 0, 1, ...
  bool fits;

  SplitPackedColumns(const Matrix& m, const float* x)
      : m(m),
        length(SplitLength(m)),
        span_blocks(kSpanDepth / length),
        row_bytes(m.RowBytes(kPlaces)),
        spans(CeilDiv(row_bytes, kSpan)),
        blocks(CeilDiv(m.cols, length)),
        values(spans * kSpanDepth * kXParts),
        corrections(spans * kIntLanes),
        steps(blocks),
        x_sums(m.BlockScaleStride()),
        rows_at_once(Max(1, 512 / m.BlockScaleStride())),
        scales(rows_at_once * m.BlockScaleStride()),
        offsets(rows_at_once * m.BlockScaleStride()),
        factors(rows_at_once * blocks + kIntLanes) {
    for (int i = 0; i < kIntLanes; ++i) {
      places[i] = static_cast<int32_t>(4 * i * kPlaces / length);
      numbers[i] = i;
    }
    fits = SplitEach(x, m.cols, length, [&](int64_t block, auto& parts, const BlockOfX& found) {
      const int64_t k = block * length;
      int8_t* to = values.values + k / kSpanDepth * kSpanDepth * kXParts;
      for (int part = 0; part < kXParts; ++part) {
        PutPart<kPlaces, kSpan>(parts[part], length, k % kSpanDepth, to + part * kSpanDepth);
      }
      steps.values[block] = found.step;
      x_sums.values[k / m.block] += found.Sum();
    });
    const IntBytes ones = IntBytes{} + 1;
    for (int64_t t = 0; t < spans; ++t) {
      const Ints sum = SumParts(t, [&](auto) { return ones; });
      StoreVector(corrections.values + t * kIntLanes, sum * -static_cast<int32_t>(Format::kCentre));
    }
  }

  void Run(int64_t n0, int64_t n1, float* y) const {
    const int64_t count = m.BlockScaleStride(), each = m.block / length;
    for (int64_t n = n0; n < n1; n += rows_at_once) {
      const int64_t rows = Min(rows_at_once, n1 - n);
      const float* scale = ScalesAt(m, n, 0, rows * count, scales.values);
      const float* offset = OffsetsAt(m, n, 0, rows * count, Format::kCentre, scale, offsets.values);
      for (int64_t i = 0; i < rows; ++i) {  // of all rows first: a load can't take the bytes of two recent stores
        float* factor = factors.values + i * blocks;
        if (each == 1) {
          for (int64_t b = 0; b < blocks; ++b) factor[b] = scale[i * count + b] * steps.values[b];
        } else {
          for (int64_t c = 0, b = 0; c < count; ++c) {
            for (const int64_t end = Min(b + each, blocks); b < end; ++b) {
              factor[b] = scale[i * count + c] * steps.values[b];
            }
          }
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        Reals sum{};
        float rest = 0;
        if (offset != nullptr) {
          int64_t b = 0;
          for (; b + kIntLanes <= count; b += kIntLanes) {
            sum += LoadVector<Reals>(offset + b) * LoadVector<Reals>(x_sums.values + b);
          }
          for (; b < count; ++b) rest += offset[b] * x_sums.values[b];
          offset += count;
        }
        y[n + i] = DotOfRow(m.planes[0] + (n + i) * row_bytes, factors.values + i * blocks, sum) + rest;
      }
    }
  }

 private:
  // The sums of all parts of a span of x times codes_at(place), in steps.
  template <class CodesAt>
  EFORMER_INLINE Ints SumParts(int64_t span, const CodesAt& codes_at) const {
    const int8_t* x = values.values + span * kSpanDepth * kXParts;
    Ints sum{};
#pragma GCC unroll 3
    for (int part = 0; part < kXParts; ++part) {
      sum <<= 8;
      ForEachPlace<kPlaces>([&](auto place) {
        const Ints four = LoadVector<Ints>(x + (part * kPlaces + place) * kSpan);
        sum = ByteDots::Add(sum, codes_at(place), four);
      });
    }
    return sum;
  }

  EFORMER_INLINE Reals DotOfSpan(int64_t span, IntBytes codes, const float* factor, Ints lanes) const {
    asm("" : "+v"(codes));  // GCC would load them for each place
    const Ints sum = SumParts(span, [&](auto place) { return BytesAt<Format, kPlaces, place>(codes); });
    const Ints centred = sum + LoadVector<Ints>(corrections.values + span * kIntLanes);
    return ToReals(centred) * PickReals(LoadVector<Reals>(factor + span * span_blocks), lanes);
  }

  EFORMER_INLINE float DotOfRow(const uint8_t* codes, const float* factor, Reals sum) const {
    constexpr int64_t kPrefetchBytes = 2048;
    const Ints lanes = LoadVector<Ints>(places), lane_numbers = LoadVector<Ints>(numbers);
    const int64_t whole = m.cols / kSpanDepth;
    for (int64_t t = 0; t < whole; ++t) {
      __builtin_prefetch(codes + t * kSpan + kPrefetchBytes);
      sum += DotOfSpan(t, LoadVector<IntBytes>(codes + t * kSpan), factor, lanes);
    }
    if (whole == spans) return Sum((Vec)sum);
    const uint8_t *rest = codes + whole * kSpan, *end = m.planes[0] + m.rows * row_bytes;
    IntBytes last{};
    if (end - rest >= kSpan) {
      last = LoadVector<IntBytes>(rest);  // with codes of the next row, which zeros follow x for
    } else {
      std::memcpy(&last, rest, row_bytes - whole * kSpan);
    }
    const Ints kept = lane_numbers < static_cast<int32_t>(CeilDiv(m.cols - whole * kSpanDepth, 4 * kPlaces));
    return Sum(
        (Vec)(sum + (Reals)((Ints)DotOfSpan(whole, last, factor, lanes) & kept)));  // other scales may be infinite
  }
};

#endif

}  // namespace eformer::EFORMER_ISA
