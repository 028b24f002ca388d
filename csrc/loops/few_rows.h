// Few rows of x as bytes, rounded or split, times integers in blocks along the rows of a matrix. A row of blocks is
// read panel by panel, while the next one is prefetched from end to end; tiles are as large as registers allow.
#pragma once

#include "loops/gemm_bytes.h"
#include "loops/split_x.h"

namespace eformer::EFORMER_ISA {

// Rows of split x whose sums fit into registers.
#if defined(EFORMER_BYTE_DOTS)
constexpr int kSplitTileRows = 2;
#else
constexpr int kSplitTileRows = kInt8TileRows / kXParts;
#endif

#if defined(EFORMER_BYTE_DOTS)

constexpr int kFewVectors = 4;  // a row of a panel
static_assert(kFewVectors * kIntLanes == kPanelColumns);

// Starts the sums of a block with -bias * (sum of x), and adds the panel's rows of quads.
template <int kRows>
EFORMER_INLINE void DotsOfBlock(const Int8Part& part, int64_t block, const int8_t* x, const int32_t* x_sums,
                                Ints (&dots)[kRows][kFewVectors]) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kFewVectors; ++v) dots[r][v] = -part.bias * x_sums[block * kRows + r] - Ints{};
  }
  AddQuads<ByteDots>(part.panel + block * part.quads * kQuadRowBytes, part.quads, x + block * part.quads * 4 * kRows,
                     dots);
}

// totals += found * scale + offset * x_sum, for row r of a tile.
EFORMER_INLINE void AddScaled(const Int8Part& part, int64_t block, int v, Reals found, float x_sum, float* totals) {
  const Reals scale = LoadVector<Reals>(part.scales[block] + v * kIntLanes);
  Reals total = LoadVector<Reals>(totals + v * kIntLanes) + found * scale;
  if (part.has_offsets) total += LoadVector<Reals>(part.offsets[block] + v * kIntLanes) * x_sum;
  StoreVector(totals + v * kIntLanes, total);
}

// Rows of rounded x.
struct FewRounded {
  typedef Int8X X;
  static constexpr int kMostRows = kInt8TileRows;

  // Of what is multiplied at once.
  static int64_t Depth(const Matrix&, const X& x) { return x.scaled; }

  template <int kRows>
  static void Add(const Int8Part& part, const X& x, int64_t first, int64_t k, float* totals) {
    const int64_t at = first * (x.depth / x.block) + k / x.block * kRows;
    const int8_t* values = x.values + first * x.depth + k * kRows;
    const float *steps = x.steps + at, *x_totals = x.totals + at + (part.blocks - 1) * kRows;
    const int32_t* sums = x.sums + at;
    Reals found[kRows][kFewVectors] = {};
    for (int64_t b = 0; b < part.blocks; ++b) {  // which share the scales of the matrix
      Ints dots[kRows][kFewVectors];
      DotsOfBlock(part, b, values, sums, dots);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const float step = steps[b * kRows + r];
#pragma GCC unroll 4
        for (int v = 0; v < kFewVectors; ++v) found[r][v] += ToReals(dots[r][v]) * step;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kFewVectors; ++v) {
        AddScaled(part, 0, v, found[r][v], x_totals[r], totals + r * kPanelColumns);
      }
    }
  }
};

// Rows of split x.
struct FewSplit {
  typedef SplitX X;
  static constexpr int kMostRows = kSplitTileRows;

  static int64_t Depth(const Matrix& m, const X&) { return m.block % 64 == 0 ? 64 : 32; }

  template <int kRows>
  static void Add(const Int8Part& part, const X& x, int64_t first, int64_t k, float* totals) {
    const int64_t at = first * (x.depth / x.block) + k / x.block * kRows;
    const int8_t* values = x.values + (first * x.depth + k * kRows) * kXParts;
    for (int64_t b = 0; b < part.blocks; ++b) {
      Ints dots[kRows * kXParts][kFewVectors];
      DotsOfBlock(part, b, values, x.of_parts + at * kXParts, dots);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const float step = x.steps[at + b * kRows + r], x_sum = x.sums[at + b * kRows + r];
#pragma GCC unroll 4
        for (int v = 0; v < kFewVectors; ++v) {
          Reals sum = ToReals(dots[r * kXParts][v]) * kPartUnits[0];
#pragma GCC unroll 2
          for (int i = 1; i < kXParts; ++i) sum += ToReals(dots[r * kXParts + i][v]) * kPartUnits[i];
          AddScaled(part, b, v, sum * step, x_sum, totals + r * kPanelColumns);
        }
      }
    }
  }
};

template <class Rows, class Sizes>
struct FewTiles;

template <class Rows, int... kRowsLessOne>
struct FewTiles<Rows, std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&Rows::template Add<1>) kOf[] = {nullptr, Rows::template Add<kRowsLessOne + 1>...};
};

// `count` rows of x times panels of a matrix whose blocks are a multiple of 32.
template <class Format, class Rows>
struct FewRows {
  static constexpr float kUnit = 1 / Format::kInt8Steps;
  static_assert(Format::kScales == ScaleKind::kPerBlock && kPlanes<Format> == 1 && !Int8Codes<Format>::kHasNaN);

  const Matrix m;
  const typename Rows::X& x;
  const int64_t count;
  const RowGroups groups{count, Rows::kMostRows};
  Int8Panels<Format, true> panels{m};
  Int8Part part = {panels.bytes, 0, x.block / 4, BiasOf<Format>(m), true, false, {}, {}, nullptr};

  static bool Fits(const Matrix& m) { return m.packed_axis == 0 && m.contracted_axis == 0 && m.block % 32 == 0; }

  void Multiply(int64_t k, float* totals) const {
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t first = groups.First(g);
      FewTiles<Rows, std::make_integer_sequence<int, Rows::kMostRows>>::kOf[groups.Size(g)](
          part, x, first, k, totals + first * kPanelColumns);
    }
  }

  void Write(const float* totals, int64_t n, int64_t width, float* y) const {
    for (int64_t r = 0; r < count; ++r, totals += kPanelColumns) {
      float row[kPanelColumns];
      Reals v[4];
      for (int i = 0; i < 4; ++i) v[i] = LoadVector<Reals>(totals + i * kIntLanes);
      StoreLine(row, v);
      std::memcpy(y + r * m.Width() + n, row, width * sizeof(float));
    }
  }

  // The next row of blocks.
  struct Ahead {
    RowsAhead<false> rows;
    EFORMER_INLINE void Prefetch(const uint8_t*, int64_t) { rows.Prefetch(); }
  };

  // Up to kSliceColumns columns.
  void Run(int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
    const int64_t depth = Rows::Depth(m, x), columns = CeilDiv(n1 - n0, kPanelColumns) * kPanelColumns;
    const Floats totals(columns * count);
    ScaleBuffers buffers;
    alignas(64) float scales[kPanelColumns], offsets[kPanelColumns];
    for (int64_t k = k0; k < k1; k += depth) {
      const int64_t end = Min(k + depth, k1);
      const RowOfScales row = buffers.Take(m, k / m.block, n0, n1 - n0, CentreOf<Format>(m));
      ScalesAhead scales_ahead(m, (k + depth) / m.block, n0, n1 - n0);
      const uint8_t* next = m.planes[0] + (k + depth) / panels.kPlaces * m.cols + n0;
      Ahead ahead = {RowsAhead<false>(next, m.cols, n1 - n0)};
      part.blocks = CeilDiv(end - k, x.block);
      part.has_offsets = row.has_offsets;
      for (int64_t b = 0; b < part.blocks; ++b) part.scales[b] = scales, part.offsets[b] = offsets;
      for (int64_t n = n0; n < n1; n += kPanelColumns) {
        for (int i = 0; i < 2; ++i) scales_ahead.Prefetch();
        Reals scale[4], offset[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          scale[i] = row.template Scale<Reals>(n - n0 + i * kIntLanes);
          offset[i] = row.has_offsets ? row.template Offset<Reals>(n - n0 + i * kIntLanes, scale[i]) : Reals{};
          scale[i] *= kUnit;
        }
        StoreLine(scales, scale);  // which brings them into the order of panels too: it is its own inverse
        StoreLine(offsets, offset);
        uint8_t nan[kQuadRowBytes];  // not written: such formats do not fit
        panels.Unpack(k, part.blocks * x.block, n, ahead, nan);
        Multiply(k, totals.values + (n - n0) * count);
      }
    }
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      Write(totals.values + (n - n0) * count, n, Min(kPanelColumns, n1 - n), y);
    }
  }
};

#endif

// As Kernels::int8_matmul says.
template <class Format>
static void Int8FewMatmul(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                          int64_t n1, float* y) {
#if defined(EFORMER_BYTE_DOTS) && !defined(EFORMER_AMX)
  if constexpr (Format::kScales == ScaleKind::kPerBlock && kPlanes<Format> == 1) {
    typedef FewRows<Format, FewRounded> Few;
    if (count > 1 && count <= kFewRows && n1 - n0 <= kSliceColumns && Few::Fits(m)) {
      return Few{m, x, count}.Run(k0, k1, n0, n1, y);
    }
  }
#endif
  Int8Matmul<Format>(m, x, count, k0, k1, n0, n1, y);
}

template <class Format>
constexpr decltype(Kernels::int8_matmul) Int8FewMatmulOrNull() {
  if constexpr (Format::kInt8Steps > 0) {
    return Int8FewMatmul<Format>;
  } else {
    return nullptr;
  }
}

}  // namespace eformer::EFORMER_ISA
