// A panel for x as bytes: 64 columns of the matrix, or rows of its transpose, as bytes of Int8Codes.
//
// Four bytes of a column, a quad, are adjacent. A row of a panel has a quad of each column, in the order of
// interleaving vectors of bytes, which kPanelFours says. The order along the depth is that of ByteOrder with a span
// of 4.
#pragma once

#include "matrix/decode.h"
#include "matrix/pack_floats.h"
#include "matrix/scales.h"
#include "simd/bytes.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kBytePanelDepth = 256;              // at most
constexpr int64_t kQuadRowBytes = 4 * kPanelColumns;  // of a panel
constexpr int64_t kMaxPanelBlocks = kBytePanelDepth / 16;

constexpr int64_t kLineColumns = kIntBytes;  // a vector of a row of bytes

// The first of each four columns of a panel.
#if defined(EFORMER_BYTE_DOTS)
constexpr int kPanelFours[16] = {0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60};
#elif defined(EFORMER_NEON)
constexpr int kPanelFours[16] = {0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60};
#else
constexpr int kPanelFours[16] = {0, 16, 4, 20, 8, 24, 12, 28, 32, 48, 36, 52, 40, 56, 44, 60};
#endif

// quads[i] has the quads of some columns, from four rows of bytes.
EFORMER_INLINE void QuadsOfRows(const IntBytes (&rows)[4], IntBytes (&quads)[4]) {
  IntBytes even[2], odd[2];  // the lower and upper columns of rows 0 and 2, and of rows 1 and 3
  InterleaveLanes(rows[0], rows[2], even[0], even[1]);
  InterleaveLanes(rows[1], rows[3], odd[0], odd[1]);
  for (int i = 0; i < 2; ++i) InterleaveLanes(even[i], odd[i], quads[2 * i], quads[2 * i + 1]);
}

// Brings a number for each column of a row of bytes, in the order of QuadsOfRows, into that of columns.
EFORMER_INLINE void ToColumnOrder(Reals (&v)[4]) {
#if defined(EFORMER_BYTE_DOTS)
  __m512 pairs[4];  // lanes of sixteen bytes are transposed
  for (int i = 0; i < 2; ++i) {
    pairs[2 * i] = _mm512_shuffle_f32x4((__m512)v[2 * i], (__m512)v[2 * i + 1], 0x88);      // lanes 0 and 2 of both
    pairs[2 * i + 1] = _mm512_shuffle_f32x4((__m512)v[2 * i], (__m512)v[2 * i + 1], 0xdd);  // lanes 1 and 3
  }
  for (int i = 0; i < 2; ++i) {
    v[i] = (Reals)_mm512_shuffle_f32x4(pairs[i], pairs[2 + i], 0x88);
    v[i + 2] = (Reals)_mm512_shuffle_f32x4(pairs[i], pairs[2 + i], 0xdd);
  }
#else
  float in_order[kLineColumns];
  for (int i = 0; i < kLineColumns / 4; ++i) {
    std::memcpy(in_order + kPanelFours[i], reinterpret_cast<const char*>(v) + 16 * i, 16);
  }
  std::memcpy(v, in_order, sizeof v);
#endif
}

// And back.
EFORMER_INLINE void ToPanelOrder(Reals (&v)[4]) {
#if defined(EFORMER_BYTE_DOTS)
  ToColumnOrder(v);  // its own inverse
#else
  float in_order[kLineColumns];
  std::memcpy(in_order, v, sizeof v);
  for (int i = 0; i < kLineColumns / 4; ++i) {
    std::memcpy(reinterpret_cast<char*>(v) + 16 * i, in_order + kPanelFours[i], 16);
  }
#endif
}

// quads[u] has quad u of eight columns, from 32 bytes of each: a transpose of words.
EFORMER_INLINE void QuadsOfColumns(const Bytes (&columns)[8], Bytes (&quads)[8]) {
  Transpose8(reinterpret_cast<const float*>(columns), 8, reinterpret_cast<float*>(quads), 8);
}

// Panels of a format, with the bytes in memory taken as they are (kPacked, as IsPackedAlongDepth says) or after
// unpacking their codes.
template <class Format, bool kPacked>
struct BytePanels {
  static constexpr int kPlaces = kPacked ? kValuesPerByte<Format> : 1;

  const Matrix m;
  alignas(64) uint8_t bytes[kBytePanelDepth / 4 * kQuadRowBytes];

  explicit BytePanels(const Matrix& m) : m(m) {}

  // Unpacks columns `n` and following from depth `k` on: `depth` is a multiple of the blocks of x. `nan` gets bits for
  // each column that has a code of NaN. ahead.Prefetch(codes, row) is called for rows of codes.
  template <class Ahead>
  void Unpack(int64_t k, int64_t depth, int64_t n, Ahead&& ahead, uint8_t (&nan)[kQuadRowBytes]) {
    if (m.contracted_axis == 0) {
      const bool whole = n + kPanelColumns <= m.cols && k + depth <= m.rows;
      whole ? UnpackRows<true>(k, depth, n, ahead, nan) : UnpackRows<false>(k, depth, n, ahead, nan);
    } else {
      const bool whole = n + kPanelColumns <= m.rows && k + CeilDiv(depth, 32 * kPlaces) * 32 * kPlaces <= m.cols;
      whole ? UnpackColumns<true>(k, depth, n, nan) : UnpackColumns<false>(k, depth, n, nan);
    }
  }

 private:
  // Writes the bytes of each place to a row of the panel of its own, from row `quad` on, at byte `at`.
  template <class Vector>
  EFORMER_INLINE void Put(Vector packed, int64_t quad, int64_t at, uint8_t (&nan)[kQuadRowBytes]) {
    const Vector flipped = FlipPacked<Format, kPlaces>(packed);
    if constexpr (Int8Codes<Format>::kHasNaN) StoreVector(nan + at, LoadVector<Vector>(nan + at) | FindNaN(flipped));
    ForEachPlace<kPlaces>([&](auto place) EFORMER_INLINED {
      StoreVector(bytes + (quad + place) * kQuadRowBytes + at, BytesAt<Format, kPlaces, place>(flipped));
    });
  }

  template <bool kWhole, class Ahead>
  void UnpackRows(int64_t k, int64_t depth, int64_t n, Ahead& ahead, uint8_t (&nan)[kQuadRowBytes]) {
    const int64_t first = k / kPlaces, count = depth / kPlaces, all = CeilDiv(m.rows, kPlaces);
    for (int64_t r = 0; r < count; r += 4) {
      constexpr int kLines = kPanelColumns / kLineColumns;
      IntBytes rows[kLines][4] = {};
      for (int j = 0; j < 4; ++j) {
        if (!kWhole && first + r + j >= all) break;
        alignas(64) uint8_t copy[kPanelColumns];
        const uint8_t* row = RowAt<kWhole>(first + r + j, n, copy);
        if constexpr (kPacked) ahead.Prefetch(row, r + j);
        for (int s = 0; s < kLines; ++s) rows[s][j] = LoadVector<IntBytes>(row + s * kLineColumns);
      }
      for (int s = 0; s < kLines; ++s) {
        IntBytes quads[4];
        QuadsOfRows(rows[s], quads);
        for (int i = 0; i < 4; ++i) Put(quads[i], r / 4 * kPlaces, 4 * kLineColumns * s + kIntBytes * i, nan);
      }
    }
  }

  // The bytes, or unpacked codes, of columns `n` and following: where they are, or in `copy` with zeros behind them.
  template <bool kWhole>
  EFORMER_INLINE const uint8_t* RowAt(int64_t row, int64_t n, uint8_t (&copy)[kPanelColumns]) const {
    const int64_t present = kWhole ? kPanelColumns : m.cols - n;
    const uint8_t* from = m.planes[0] + row * m.cols + n;
    if (kPacked && present >= kPanelColumns) return from;
    Bytes found[2] = {};
    if constexpr (kPacked) {
      std::memcpy(found, from, Min(present, kPanelColumns));
    } else {
      AddPlanes<Format>(m, row, n, present, found);
    }
    return static_cast<const uint8_t*>(std::memcpy(copy, found, sizeof found));
  }

  template <bool kWhole>
  void UnpackColumns(int64_t k, int64_t depth, int64_t n, uint8_t (&nan)[kQuadRowBytes]) {
    const int64_t row_bytes = kPacked ? m.RowBytes(kPlaces) : kBytePanelDepth + kRunValues;
    const int64_t first = kPacked ? k / kPlaces : 0, count = depth / kPlaces;
    alignas(32) uint8_t unpacked[8][kBytePanelDepth + kRunValues];
    for (int part = 0; part < 8; ++part) {
      int64_t rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = n + kPanelFours[2 * part + i / 4] + i % 4;
      if constexpr (!kPacked) {
        std::memset(unpacked, 0, sizeof unpacked);
        for (int i = 0; i < 8 && rows[i] < m.rows; ++i) {
          for (int64_t c = 0; c < depth && k + c < m.cols; c += kRunValues) {
            Bytes codes[2] = {};
            AddPlanes<Format>(m, rows[i], k + c, m.cols - k - c, codes);
            StoreVector(unpacked[i] + c, codes[0]);
            StoreVector(unpacked[i] + c + kStripSize, codes[1]);
          }
        }
      }
      for (int64_t c = 0; c < count; c += kStripSize) {
        Bytes columns[8] = {}, quads[8];
        for (int i = 0; i < 8; ++i) {
          if constexpr (kPacked) {
            if (!kWhole && rows[i] >= m.rows) break;
            const uint8_t* from = m.planes[0] + rows[i] * row_bytes + first + c;
            __builtin_prefetch(from + kBytePanelDepth / kPlaces, 0, 2);
            columns[i] = kWhole ? LoadBytes(from) : LoadSome(from, row_bytes - first - c);
          } else {
            columns[i] = LoadBytes(unpacked[i] + c);
          }
        }
        QuadsOfColumns(columns, quads);
        for (int u = 0; u < 8; ++u) Put(quads[u], (c / 4 + u) * kPlaces, 32 * part, nan);
      }
    }
  }
};

// The scales and offsets of a panel's columns, in their order: a row for each block of the matrix along the depth.
template <class Format>
struct BytePanelScales {
  const Matrix& m;
  const float centre;
  Floats scales, offsets;
  bool has_offsets = false;

  BytePanelScales(const Matrix& m, int64_t max_blocks)
      : m(m), centre(CentreOf<Format>(m)), scales(max_blocks * kPanelColumns), offsets(max_blocks * kPanelColumns) {}

  // Takes `count` blocks of columns `n` and following from block `first` on.
  void Take(int64_t first, int64_t count, int64_t n) {
    m.contracted_axis == 0 ? TakeRows(first, count, n) : TakeColumns(first, count, n);
  }

 private:
  static constexpr float kUnit = 1 / Format::kInt8Steps;

  void TakeRows(int64_t first, int64_t count, int64_t n) {
    const int64_t present = Min(kPanelColumns, m.cols - n);
    float of_scales[kPanelColumns], of_offsets[kPanelColumns];
    for (int64_t i = 0; i < count; ++i) {
      const float* scale = ScalesAt(m, first + i, n, present, of_scales);
      const float* offset = OffsetsAt(m, first + i, n, present, centre, scale, of_offsets);
      PutRow(scale, present, kUnit, scales.values + i * kPanelColumns);
      has_offsets = offset != nullptr;
      if (has_offsets) PutRow(offset, present, 1, offsets.values + i * kPanelColumns);
    }
  }

  EFORMER_INLINE static void PutRow(const float* from, int64_t present, float unit, float* to) {
    float some[kPanelColumns];
    if (present < kPanelColumns) {
      std::memset(some, 0, sizeof some);
      from = static_cast<const float*>(std::memcpy(some, from, present * sizeof(float)));
    }
    for (int64_t c = 0; c < kPanelColumns; c += kLineColumns) {
      Reals line[4];
      for (int i = 0; i < 4; ++i) line[i] = LoadVector<Reals>(from + c + i * kIntLanes) * unit;
      ToPanelOrder(line);
      std::memcpy(to + c, line, sizeof line);
    }
  }

  // Up to kAtOnce blocks of all columns at a time.
  void TakeColumns(int64_t first, int64_t count, int64_t n) {
    constexpr int64_t kAtOnce = 64;
    const int64_t present = Min(kPanelColumns, m.rows - n);
    float of_scales[kPanelColumns * kAtOnce], of_offsets[kPanelColumns * kAtOnce];
    for (int64_t b = 0; b < count; b += kAtOnce) {
      const int64_t some = Min(kAtOnce, count - b);
      for (int64_t i = 0; i < present; ++i) {
        const float* scale = ScalesAt(m, n + i, first + b, some, of_scales + i * kAtOnce);
        const float* offset = OffsetsAt(m, n + i, first + b, some, centre, scale, of_offsets + i * kAtOnce);
        if (scale != of_scales + i * kAtOnce) std::memcpy(of_scales + i * kAtOnce, scale, some * sizeof(float));
        has_offsets = offset != nullptr;
        if (!has_offsets || offset == of_offsets + i * kAtOnce) continue;
        std::memcpy(of_offsets + i * kAtOnce, offset, some * sizeof(float));
      }
      PutColumns(of_scales, some, present, kUnit, scales.values + b * kPanelColumns);
      if (has_offsets) PutColumns(of_offsets, some, present, 1, offsets.values + b * kPanelColumns);
    }
  }

  static void PutColumns(const float* from, int64_t count, int64_t present, float unit, float* to) {
    constexpr int64_t kStride = 64;
    float transposed[8 * kPanelColumns];
    for (int64_t b = 0; b < count; b += 8) {
      for (int64_t i = 0; i < present; i += 8)
        Transpose8(from + i * kStride + b, kStride, transposed + i, kPanelColumns);
      for (int64_t i = 0; i < Min(8, count - b); ++i) {
        PutRow(transposed + i * kPanelColumns, present, unit, to + (b + i) * kPanelColumns);
      }
    }
  }
};

}  // namespace eformer::EFORMER_ISA
