// Rows of x as bytes times any matrix, in panels of bytes: which are unpacked in which order, and what scales them.
#pragma once

#include "loops/gemv_bytes.h"
#include "loops/tile_bytes.h"

namespace eformer::EFORMER_ISA {

// Values along the depth whose scales are one, and which a panel holds: a multiple of `block` of x.
static inline int64_t ScaledTogether(const Matrix& m, int64_t block) {
  if (kBytePanelDepth % m.block == 0) return m.block;
  return m.block % kBytePanelDepth == 0 ? kBytePanelDepth : block;
}

template <class Format, bool kPacked, int kParts>
struct ByteGemm {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr float kUnit = 1 / Format::kInt8Steps;

  const Matrix& m;
  const int64_t length;  // of blocks of x
  const int64_t count, k0, k1, n0, n1;
  float* const y;
  const TileOf<Format, kParts> multiply;  // adds rows of x times a panel to their totals
  const int64_t columns = CeilDiv(n1 - n0, kPanelColumns) * kPanelColumns;
  BytePanels<Format, kPacked> panels{m};
  const Floats totals{(m.contracted_axis == 0 ? columns : kPanelColumns) * count};
  const Zeros<uint32_t> nan{Int8Codes<Format>::kHasNaN ? columns : 0};  // bits of each column
  Part part = {panels.bytes, length / 4, kInBlocks, false, 0, {}, {}, nullptr};

  ByteGemm(const Matrix& m, const ByteX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y)
      : m(m), length(x.order.block), count(count), k0(k0), k1(k1), n0(n0), n1(n1), y(y), multiply(m, x, count) {}

  void Run() {
    if constexpr (kParts == 1) {
      m.contracted_axis == 1 ? ByColumns() : count <= kFewRows ? ByBlocks() : ByRows();
    } else {  // few rows, as SplitIsFaster says
      if constexpr (kSplitsColumns) {
        ByColumns();
      } else {
        ByBlocks();
      }
    }
  }

 private:
  float* TotalsOf(int64_t n) const { return totals.values + (n - n0) * count; }

  // Adds columns `n` and following from depth `k` to `end`, whose scales `part` has.
  template <class Ahead>
  EFORMER_INLINE void Add(int64_t k, int64_t end, int64_t n, Ahead&& ahead, float* to) {
    part.blocks = CeilDiv(end - k, length);
    part.results = end == k1 ? y + n : nullptr;
    alignas(64) uint8_t found[kQuadRowBytes];
    if constexpr (Int8Codes<Format>::kHasNaN) std::memset(found, 0, sizeof found);
    panels.Unpack(k, part.blocks * length, n, ahead, found);
    if constexpr (Int8Codes<Format>::kHasNaN) {
      for (int i = 0; i < 8; ++i) {
        uint32_t* bits = nan.values + (n - n0) + 8 * i;
        StoreVector(bits, LoadVector<Bytes>(bits) | LoadVector<Bytes>(found + 32 * i));
      }
    }
    multiply(part, k, to);
  }

  // Writes the sums of columns `n` and following, in their order in the matrix.
  void Write(int64_t n, float* sums) const {
    for (int64_t r = 0; r < count; ++r, sums += kPanelColumns) {
      if constexpr (Int8Codes<Format>::kHasNaN) {
        for (int i = 0; i < kPanelColumns; ++i) {
          if (nan.values[n - n0 + i] != 0) sums[i] = __builtin_nanf("");
        }
      }
      float row[kPanelColumns], *to = y + r * m.Width() + n;
      const bool is_whole = n + kPanelColumns <= n1;
      for (int64_t c = 0; c < kPanelColumns; c += kLineColumns) {
        Reals line[4];
        for (int i = 0; i < 4; ++i) line[i] = LoadVector<Reals>(sums + c + i * kIntLanes);
        ToColumnOrder(line);
        std::memcpy((is_whole ? to : row) + c, line, sizeof line);
      }
      if (!is_whole) std::memcpy(to, row, (n1 - n) * sizeof(float));
    }
  }

  void TakeScales(const BytePanelScales<Format>& scales, int64_t k, int64_t end, int64_t first) {
    part.has_offsets = scales.has_offsets;
    for (int64_t b = 0; b < CeilDiv(end - k, length); ++b) {
      const int64_t at = ((k + b * length) / m.block - first) * kPanelColumns;
      part.scales[b] = scales.scales.values + at;
      part.offsets[b] = scales.offsets.values + at;
    }
  }

  // For few rows of x: one row of blocks at a time, panel by panel, while the next row is prefetched.
  void ByBlocks() {
    struct Ahead : LinesAhead {
      EFORMER_INLINE void Prefetch(const uint8_t*, int64_t) { LinesAhead::Prefetch<1, kIntBytes, false>(); }
    };
    constexpr int kPlaces = BytePanels<Format, kPacked>::kPlaces;
    const int64_t depth = kInBlocks ? ScaledTogether(m, length) : Max(length, 32 * kPlaces);
    ScaleBuffers buffers;
    alignas(64) float scales[kPanelColumns], offsets[kPanelColumns];
    for (int64_t b = 0; b < kMaxPanelBlocks; ++b) part.scales[b] = scales, part.offsets[b] = offsets;
    for (int64_t start = n0; start < n1; start += kSliceColumns) {
      const int64_t stop = Min(start + kSliceColumns, n1);
      for (int64_t k = k0; k < k1; k += depth) {
        RowOfScales row;
        ScalesAhead scales_ahead;
        if constexpr (kInBlocks) {
          row = buffers.Take(m, k / m.block, start, stop - start, CentreOf<Format>(m));
          scales_ahead = ScalesAhead(m, (k + depth) / m.block, start, stop - start);
        }
        part.has_offsets = row.has_offsets;
        Ahead ahead = {{m.planes[0] + (k + depth) / kPlaces * m.cols + start, m.cols, stop - start}};
        for (int64_t n = start; n < stop; n += kPanelColumns) {
          if constexpr (kInBlocks) {
            for (int i = 0; i < 2; ++i) scales_ahead.Prefetch();
            PutScales(row, n - start, scales, offsets);
          }
          Add(k, Min(k + depth, k1), n, ahead, TotalsOf(n));
        }
      }
    }
    for (int64_t n = n0; n < n1; n += kPanelColumns) Write(n, TotalsOf(n));
  }

  // Brings the scales of columns `n` and following into the order of panels.
  EFORMER_INLINE static void PutScales(const RowOfScales& row, int64_t n, float* scales, float* offsets) {
    for (int64_t c = 0; c < kPanelColumns; c += kLineColumns) {
      Reals scale[4], offset[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        scale[i] = row.template Scale<Reals>(n + c + i * kIntLanes);
        if (row.has_offsets) offset[i] = row.template Offset<Reals>(n + c + i * kIntLanes, scale[i]);
        scale[i] *= kUnit;
      }
      ToPanelOrder(scale);
      for (int i = 0; i < 4; ++i) StoreVector(scales + c + i * kIntLanes, scale[i]);
      if (!row.has_offsets) continue;
      ToPanelOrder(offset);
      for (int i = 0; i < 4; ++i) StoreVector(offsets + c + i * kIntLanes, offset[i]);
    }
  }

  // For more: panels as deep as may be.
  void ByRows() {
    BytePanelScales<Format> scales(m, kInBlocks ? kMaxPanelBlocks + 1 : 0);
    for (int64_t k = k0; k < k1; k += kBytePanelDepth) {
      const int64_t end = Min(k + kBytePanelDepth, k1);
      for (int64_t n = n0; n < n1; n += kPanelColumns) {
        if constexpr (kInBlocks) {
          const int64_t first = k / m.block;
          scales.Take(first, CeilDiv(end, m.block) - first, n);
          TakeScales(scales, k, end, first);
        }
        Add(k, end, n, PrefetchDistances(m, panels.kPlaces, kBytePanelDepth, n, n0, n1), TotalsOf(n));
      }
    }
    for (int64_t n = n0; n < n1; n += kPanelColumns) Write(n, TotalsOf(n));
  }

  // For dot products with rows of the matrix, which are the columns of panels.
  void ByColumns() {
    const int64_t first = kInBlocks ? k0 / m.block : 0, scale_rows = kInBlocks ? CeilDiv(k1, m.block) - first : 0;
    BytePanelScales<Format> scales(m, scale_rows);
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      if constexpr (kInBlocks) scales.Take(first, scale_rows, n);
      if (n > n0) std::memset(totals.values, 0, kPanelColumns * count * sizeof(float));
      for (int64_t k = k0; k < k1; k += kBytePanelDepth) {
        const int64_t end = Min(k + kBytePanelDepth, k1);
        if constexpr (kInBlocks) TakeScales(scales, k, end, first);
        Add(k, end, n, PrefetchDistances(), totals.values);
      }
      Write(n, totals.values);
    }
  }
};

// As Kernels::byte_matmul says.
template <class Format>
static void ByteMatmul(const Matrix& m, const ByteX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                       float* y) {
  WithPacking<Format>(m, [&](auto packed) {
    WithParts<Format>(x, [&](auto parts) {
      if constexpr (packed && (parts == 1 || kSplitsRows)) {
        if (m.contracted_axis == 0 && count == 1) return ByteGemv<Format, parts>(m, x, k0, k1, n0, n1, y);
      }
      ByteGemm<Format, packed, parts>(m, x, count, k0, k1, n0, n1, y).Run();
    });
  });
}

template <class Format>
constexpr decltype(Kernels::byte_matmul) ByteMatmulOrNull() {
  if constexpr (Format::kInt8Steps > 0) {
    return ByteMatmul<Format>;
  } else {
    return nullptr;
  }
}

// Whether x in three parts is faster than floats.
static inline bool SplitIsFaster(const Matrix& m, int64_t rows) {
  return kSplitsColumns ? rows > 1 && m.contracted_axis == 1 : rows == 1 || m.contracted_axis == 0;
}

// As Kernels::byte_order says. Blocks of x divide those of the matrix.
template <class Format>
static ByteOrder ByteOrderOf(const Matrix& m, int64_t rows, int64_t parts) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  if (Format::kInt8Steps == 0 || (kInBlocks && (m.packed_axis != m.contracted_axis || m.block % 16 != 0))) return {};
  if (parts > 1 && !(SplitsX<Format>() && SplitIsFaster(m, rows))) return {};
  int64_t block = parts > 1 ? kSplitBlock : kRoundedBlock;
  while (kInBlocks && m.block % block != 0) block /= 2;
  const bool is_dots = rows == 1 && m.contracted_axis == 1, is_packed = IsPackedAlongDepth<Format>(m);
  const int64_t places = is_packed ? kValuesPerByte<Format> : 1;
  if (is_dots && (is_packed || ArePlanesInPlace<Format>(block))) return {parts, 1, block, places, 64, block};
  if (!is_packed && rows < kFewRows) return {};  // codes have to be unpacked: for few rows, floats are faster
  if (parts > 1) return {parts, kByteTileRows<kXParts>, block, places, 4, block};
  if (rows == 1) return {parts, 1, block, places, 4, block};
  return {parts, kAdjacentRows, block, places, 4, kHoldsTotals && kInBlocks ? ScaledTogether(m, block) : block};
}

}  // namespace eformer::EFORMER_ISA
