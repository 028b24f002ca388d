// One row of x, split as split_x.h says, times a matrix of integers in blocks.
#pragma once

#include "matrix/fields.h"
#include "simd/bytes.h"
#include "loops/split_x.h"
#include "matrix/stored_scales.h"

namespace eformer::EFORMER_ISA {

// Prefetches the rows behind those that are read side by side, one after the other from end to end: of rows side by
// side, memory gives less.
template <bool kIntoL1>
struct RowsAhead {
  const uint8_t *at, *end;  // what is next, and where its row ends
  int64_t stride, width;    // of rows

  RowsAhead(const uint8_t* first, int64_t stride, int64_t width)
      : at(first), end(first + width), stride(stride), width(width) {}

  EFORMER_INLINE void Prefetch() {
    kIntoL1 ? __builtin_prefetch(at, 0, 0) : __builtin_prefetch(at, 0, 2);
    at += kIntBytes;
    if (at >= end) end += stride, at = end - width;
  }
};

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

// For codes packed along the rows that are summed over. kGroupRows rows of bytes are read side by side, while those
// behind them are prefetched from end to end. Their sums, in steps, are below 2^31 and added as floats.
template <class Format>
struct SplitPackedRows {
  static constexpr int kPlaces = kValuesPerByte<Format>;
  static constexpr int64_t kLine = kIntBytes;  // columns at a time
  static constexpr int64_t kGroupRows = 8, kGroupValues = kGroupRows * kPlaces;
  static_assert(kGroupValues * Format::kCentre * 0x1p23 <= 0x1p30, "sums of a group must fit into 32 bits");

  const Matrix& m;
  const int64_t k0, k1, length;
  Zeros<int32_t> fours;                         // four bytes of x, for each quad, place and part
  Zeros<int32_t> starts;                        // of the sums of each group of rows
  Floats steps, x_sums;                         // of each block
  alignas(64) float block_sums[kSliceColumns];  // in the order of QuadsOfLines
  bool fits;

  SplitPackedRows(const Matrix& m, const float* x, int64_t k0, int64_t k1)
      : m(m),
        k0(k0),
        k1(k1),
        length(SplitLength(m)),
        fours(CeilDiv(k1 - k0, length) * length / 4 * kXParts),
        starts(CeilDiv(k1 - k0, length) * length / kGroupValues),
        steps(CeilDiv(k1 - k0, length)),
        x_sums(CeilDiv(k1 - k0, length)) {
    fits = SplitEach(x + k0, k1 - k0, length, [&](int64_t block, auto& parts, const BlockOfX& found) {
      int32_t* to = fours.values + block * length / 4 * kXParts;
      int32_t* start = starts.values + block * length / kGroupValues;
      for (int part = 0; part < kXParts; ++part) {
        int8_t ordered[kMaxInt8Block];
        PutPart<kPlaces, 4>(parts[part], length, 0, ordered);
        for (int64_t i = 0; i < length / 4; ++i) std::memcpy(&to[i * kXParts + part], ordered + 4 * i, 4);
        for (int64_t i = 0; i < length; ++i) {
          start[i / kGroupValues] -= static_cast<int32_t>(Format::kCentre * kPartUnits[part]) * parts[part][i];
        }
      }
      steps.values[block] = found.step;
      x_sums.values[block] = found.Sum();
    });
  }

  // sums += x times the matrix over a block, for columns n0 to n1.
  void AddBlock(int64_t block, int64_t n0, int64_t n1, const RowOfScales& scales, float* sums) {
    const int64_t k = k0 + block * length, rows = CeilDiv(Min(length, k1 - k), kPlaces), stride = m.cols;
    ScalesAhead scales_ahead(m, (k + length) / m.block, n0, n1 - n0);
    for (int64_t r = 0; r < rows; r += kGroupRows) {
      const uint8_t* codes = m.planes[0] + (k / kPlaces + r) * stride + n0;
      const int64_t group = (block * length + r * kPlaces) / kGroupValues;
      const Group all = {fours.values + group * kGroupValues / 4 * kXParts,
                         starts.values[group],
                         Min(kGroupRows, rows - r),
                         r == 0,
                         r + kGroupRows >= rows,
                         steps.values[block],
                         x_sums.values[block],
                         scales};
      RowsAhead<true> ahead(codes + kGroupRows * stride, stride, n1 - n0);
      int64_t n = 0;
      for (; n + kLine <= n1 - n0 && all.rows == kGroupRows; n += kLine) {
        scales_ahead.Prefetch();
        AddLine<true>(all, codes + n, stride, kLine, n, sums, ahead);
      }
      for (; n < n1 - n0; n += kLine) AddLine<false>(all, codes + n, stride, Min(kLine, n1 - n0 - n), n, sums, ahead);
    }
  }

 private:
  // Some rows of bytes of a block, and all that is the same for their columns.
  struct Group {
    const int32_t* fours;
    int32_t start;
    int64_t rows;
    bool starts, ends;  // the block
    float step, x_sum;
    RowOfScales scales;
  };

  template <bool kWhole>
  EFORMER_INLINE void AddLine(const Group& group, const uint8_t* codes, int64_t stride, int64_t present, int64_t n,
                              float* sums, RowsAhead<true>& ahead) {
    const int32_t* four = group.fours;
    Ints dots[kXParts][4];
#pragma GCC unroll 3
    for (int part = 0; part < kXParts; ++part) {
#pragma GCC unroll 4
      for (Ints& each : dots[part]) each = (part == kXParts - 1 ? group.start : 0) - Ints{};
    }
#pragma GCC unroll 2
    for (int64_t r = 0; r < kGroupRows; r += 4, four += kPlaces * kXParts) {
      IntBytes lines[4] = {}, quads[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j, codes += stride) {
        if constexpr (kWhole) {
          ahead.Prefetch();
          lines[j] = LoadVector<IntBytes>(codes);
        } else if (r + j < group.rows) {
          std::memcpy(&lines[j], codes, present);
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
      Ints sum = dots[0][i];
#pragma GCC unroll 2
      for (int part = 1; part < kXParts; ++part) sum = (sum << 8) + dots[part][i];
      found[i] = ToReals(sum);
      float* of_block = block_sums + n + i * kIntLanes;
      if (!group.starts) found[i] += LoadVector<Reals>(of_block);
      if (!group.ends) StoreVector(of_block, found[i]);
    }
    if (!group.ends) return;
    alignas(64) float in_order[kLine];
    StoreLine(in_order, found);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLine; i += kIntLanes) {
      const Reals scale = group.scales.template Scale<Reals>(n + i);
      Reals total = LoadVector<Reals>(sums + n + i) + LoadVector<Reals>(in_order + i) * (scale * group.step);
      if (group.scales.has_offsets) total += group.scales.template Offset<Reals>(n + i, scale) * group.x_sum;
      StoreVector(sums + n + i, total);
    }
  }
};

// For codes packed along the columns, and dot products of x with rows of them.
template <class Format>
struct SplitPackedColumns {
  static constexpr int kPlaces = kValuesPerByte<Format>;
  static constexpr int64_t kSpan = kIntBytes, kSpanDepth = kSpan * kPlaces;
  static constexpr int kSideBySide = 4;  // rows that share what is loaded of x

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
      Ints fours[kXParts * kPlaces];
      LoadSpan(t, fours);
      const Ints sum = SumParts(fours, [&](auto) { return ones; });
      StoreVector(corrections.values + t * kIntLanes, sum * -static_cast<int32_t>(Format::kCentre));
    }
  }

  void Run(int64_t n0, int64_t n1, float* y) const {
    const int64_t count = m.BlockScaleStride(), each = m.block / length;
    for (int64_t n = n0; n < n1; n += rows_at_once) {
      const int64_t rows = Min(rows_at_once, n1 - n);
      const float* scale = ScalesAt(m, n, 0, rows * count, scales.values);
      const float* offset = OffsetsAt(m, n, 0, rows * count, Format::kCentre, scale, offsets.values);
      PrefetchScales(m, n + kDotScalesAhead * rows, 0, rows * count);
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
      int64_t i = 0;
      for (; i + kSideBySide <= rows; i += kSideBySide) {
        DotsOfRows<kSideBySide>(n + i, factors.values + i * blocks, OffsetsOfRow(offset, i), y + n + i);
      }
      for (; i < rows; ++i) DotsOfRows<1>(n + i, factors.values + i * blocks, OffsetsOfRow(offset, i), y + n + i);
    }
  }

 private:
  const float* OffsetsOfRow(const float* all, int64_t row) const {
    return all != nullptr ? all + row * m.BlockScaleStride() : nullptr;
  }

  // The sums of all parts of a span of x, in `fours`, times codes_at(place), in steps.
  template <class CodesAt>
  EFORMER_INLINE static Ints SumParts(const Ints (&fours)[kXParts * kPlaces], const CodesAt& codes_at) {
    Ints sum{};
#pragma GCC unroll 3
    for (int part = 0; part < kXParts; ++part) {
      sum <<= 8;
      ForEachPlace<kPlaces>(
          [&](auto place) { sum = ByteDots::Add(sum, codes_at(place), fours[part * kPlaces + place]); });
    }
    return sum;
  }

  EFORMER_INLINE void LoadSpan(int64_t span, Ints (&fours)[kXParts * kPlaces]) const {
#pragma GCC unroll 12
    for (int i = 0; i < kXParts * kPlaces; ++i) {
      fours[i] = LoadVector<Ints>(values.values + (span * kXParts * kPlaces + i) * kSpan);
    }
  }

  // What is added to the dot products of rows: their offsets times the sums of x.
  template <int kRows>
  EFORMER_INLINE void AddOffsets(const float* offset, Reals (&sums)[kRows], float (&rest)[kRows]) const {
    const int64_t count = m.BlockScaleStride(), whole = count / kIntLanes * kIntLanes;
    for (int64_t b = 0; b < whole; b += kIntLanes) {
      const Reals x_sum = LoadVector<Reals>(x_sums.values + b);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r] += LoadVector<Reals>(offset + r * count + b) * x_sum;
    }
    for (int64_t b = whole; b < count; ++b) {
      for (int r = 0; r < kRows; ++r) rest[r] += offset[r * count + b] * x_sums.values[b];
    }
  }

  // The dot products of kRows rows from `n` on. While they are read, those behind them are prefetched from end to end.
  template <int kRows>
  EFORMER_INLINE void DotsOfRows(int64_t n, const float* factor, const float* offset, float* y) const {
    Reals sums[kRows] = {};
    float rest[kRows] = {};
    if (offset != nullptr) AddOffsets(offset, sums, rest);
    const Ints lanes = LoadVector<Ints>(places);
    const uint8_t* codes = m.planes[0] + n * row_bytes;
    const int64_t whole = m.cols / kSpanDepth, distance = Max(kRows * row_bytes, kDotBytesAhead), stride = row_bytes;
    const uint8_t* ahead = codes + distance;
    Ints fours[kXParts * kPlaces];
    const auto dot = [&](int64_t span, IntBytes packed, int r) {
      asm("" : "+v"(packed));  // GCC would load them for each place
      const Ints sum = SumParts(fours, [&](auto place) { return BytesAt<Format, kPlaces, place>(packed); });
      const Ints centred = sum + LoadVector<Ints>(corrections.values + span * kIntLanes);
      return ToReals(centred) * PickFirst<kSpanDepth / 32>(factor + r * blocks + span * span_blocks, lanes);
    };
    for (int64_t t = 0; t < whole; ++t, codes += kSpan, ahead += kRows * kSpan) {
      LoadSpan(t, fours);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        distance <= kDotMostAhead ? __builtin_prefetch(ahead + r * kSpan, 0, 0)
                                  : __builtin_prefetch(ahead + r * kSpan, 0, 2);
        sums[r] += dot(t, LoadVector<IntBytes>(codes + r * stride), r);
      }
    }
    if (whole < spans) {
      const uint8_t* end = m.planes[0] + m.rows * row_bytes;
      const Ints kept =
          LoadVector<Ints>(numbers) < static_cast<int32_t>(CeilDiv(m.cols - whole * kSpanDepth, 4 * kPlaces)) - Ints{};
      LoadSpan(whole, fours);
      for (int r = 0; r < kRows; ++r, codes += stride) {
        IntBytes last{};
        if (end - codes >= kSpan) {
          last = LoadVector<IntBytes>(codes);  // with codes of the next row, which zeros follow x for
        } else {
          std::memcpy(&last, codes, row_bytes - whole * kSpan);
        }
        sums[r] += (Reals)((Ints)dot(whole, last, r) & kept);  // other scales may be infinite
      }
    }
    AddUp(sums, y);
    for (int r = 0; r < kRows; ++r) y[r] += rest[r];
  }
};

#endif

}  // namespace eformer::EFORMER_ISA
