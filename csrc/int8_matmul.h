// Rows of x rounded to int8 times any matrix: sums of a block are exact integers, and blocks are added as floats.
#pragma once

#include <utility>

#include "int8_panels.h"

namespace eformer::EFORMER_ISA {

// Rows of x whose sums fit into registers.
#if defined(EFORMER_BYTE_DOTS)
constexpr int kInt8TileRows = 12;
#elif defined(__AVX2__)
constexpr int kInt8TileRows = 6;
#else
constexpr int kInt8TileRows = 4;
#endif

// Vectors of columns whose sums are in registers together with those of `rows` rows of x.
template <class Format>
constexpr int TileVectors(int rows) {
  if (Int8Codes<Format>::kSigned) return rows <= 3 ? 2 : 1;
  return 2 * rows <= kInt8TileRows ? 4 : 2;
}

template <class Format, int kRows>
struct Int8Tile {
  static constexpr int kVectors = TileVectors<Format>(kRows);
  typedef DotsOf<Format> Dots;

  // totals[r] += x[r] @ panel for each row r of x: `blocks` blocks of `quads` quads.
  static void Add(const uint8_t* panel, int64_t blocks, int64_t quads, const int8_t* x, const float* steps,
                  const int32_t* sums, const float* scales, const float* offsets, float* totals) {
    for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes) {
      AddColumns(panel + 4 * c, blocks, quads, x, steps, sums, scales + c, offsets == nullptr ? nullptr : offsets + c,
                 totals + c);
    }
  }

 private:
  EFORMER_INLINE static void AddColumns(const uint8_t* panel, int64_t blocks, int64_t quads, const int8_t* x,
                                        const float* steps, const int32_t* sums, const float* scales,
                                        const float* offsets, float* totals) {
    constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
    for (int64_t b = 0; b < blocks; ++b, steps += kRows, sums += kRows) {
      Ints dots[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) dots[r][v] = -Int8Codes<Format>::kBias * sums[r] - Ints{};
      }
      if constexpr (std::is_same_v<typename Dots::Sum, Ints>) {
        AddQuads(panel, quads, x, dots);
      } else {
        for (int64_t q = 0; q < quads; q += Dots::kMaxTerms) {
          typename Dots::Sum some[kRows][kVectors] = {};
          AddQuads(panel + q * kQuadRowBytes, Min(Dots::kMaxTerms, quads - q), x + q * 4 * kRows, some);
          for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < kVectors; ++v) dots[r][v] += Dots::Widen(some[r][v]);
          }
        }
      }
      panel += quads * kQuadRowBytes;
      x += quads * 4 * kRows;
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = b * kPanelColumns + v * kIntLanes;
        const Reals scale = kInBlocks ? LoadVector<Reals>(scales + at) : Reals{};
        for (int r = 0; r < kRows; ++r) {
          float* to = totals + r * kPanelColumns + v * kIntLanes;
          const Reals factor = kInBlocks ? scale * steps[r] : steps[r] - Reals{};
          Reals total = LoadVector<Reals>(to) + ToReals(dots[r][v]) * factor;
          if (kInBlocks && offsets != nullptr) {
            total += LoadVector<Reals>(offsets + at) * (steps[r] * static_cast<float>(sums[r]));
          }
          StoreVector(to, total);
        }
      }
    }
  }

  template <class Sum>
  EFORMER_INLINE static void AddQuads(const uint8_t* panel, int64_t quads, const int8_t* x,
                                      Sum (&found)[kRows][kVectors]) {
    Sum sums[kRows][kVectors];
    std::memcpy(sums, found, sizeof sums);
    for (int64_t q = 0; q < quads; ++q, panel += kQuadRowBytes, x += 4 * kRows) {
      typename Dots::Codes codes[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) codes[v] = Dots::Prepare(LoadVector<IntBytes>(panel + v * kIntBytes));
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Ints four = SpreadFour(x + 4 * r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Dots::Add(sums[r][v], codes[v], four);
      }
    }
    std::memcpy(found, sums, sizeof sums);
  }
};

template <class Format, class Rows>
struct Int8TileFunctions;

template <class Format, int... kRowsLessOne>
struct Int8TileFunctions<Format, std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&Int8Tile<Format, 1>::Add) kOf[] = {nullptr, Int8Tile<Format, kRowsLessOne + 1>::Add...};
};

template <class Format, bool kPacked>
static void Int8MatmulOf(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                         float* y) {
  Int8Panels<Format, kPacked> panels(m, x.block);
  const int64_t max_depth = count <= kFewRows ? Max(x.block, 32 * panels.kPlaces) : kInt8PanelDepth;
  const int64_t quads = x.block / 4, all_blocks = x.depth / x.block;
  const RowGroups groups(count, kInt8TileRows);
  const int64_t columns = CeilDiv(n1 - n0, kPanelColumns) * kPanelColumns;
  const Floats all_totals(columns * count);
  const Zeros<uint32_t> nan(Int8Codes<Format>::kHasNaN ? columns : 0);  // bits of each column
  for (int64_t k = k0, end; k < k1; k = end) {
    end = Min(k + max_depth, k1);
    const int64_t first_block = k / x.block, blocks = CeilDiv(end - k, x.block);
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      const PrefetchDistances ahead(m, panels.kPlaces, end - k, n, n0, n1);
      Bytes found[8] = {};
      panels.Unpack(k, end, n, ahead, found);
      if constexpr (Int8Codes<Format>::kHasNaN) {
        for (int i = 0; i < 8; ++i) {
          uint32_t* to = nan.values + (n - n0) + 8 * i;
          StoreVector(to, LoadVector<Bytes>(to) | found[i]);
        }
      }
      float* totals = all_totals.values + (n - n0) * count;
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.First(g), rows = groups.Size(g);
        const int64_t at = first * all_blocks + first_block * rows;
        const auto add = Int8TileFunctions<Format, std::make_integer_sequence<int, kInt8TileRows>>::kOf[rows];
        add(panels.bytes, blocks, quads, x.values + first * x.depth + k * rows, x.steps + at, x.sums + at,
            panels.scales[0], panels.has_offsets ? panels.offsets[0] : nullptr, totals + first * kPanelColumns);
      }
    }
  }
  for (int64_t n = n0; n < n1; n += kPanelColumns) {
    float* totals = all_totals.values + (n - n0) * count;
    for (int64_t r = 0; r < count; ++r, totals += kPanelColumns) {
      float row[kPanelColumns];
      if constexpr (Int8Codes<Format>::kHasNaN) {
        for (int i = 0; i < kPanelColumns; ++i) {
          if (nan.values[n - n0 + i] != 0) totals[i] = __builtin_nanf("");
        }
      }
      for (int i = 0; i < 16; ++i) std::memcpy(row + i / 8 * 32 + kFourColumns[i % 8], totals + 4 * i, 16);
      std::memcpy(y + r * m.Width() + n, row, Min(kPanelColumns, n1 - n) * sizeof(float));
    }
  }
}

template <class Format>
static void Int8Matmul(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                       float* y) {
  if (IsPackedAlongDepth<Format>(m)) return Int8MatmulOf<Format, true>(m, x, count, k0, k1, n0, n1, y);
  if constexpr (kPlanes<Format> > 1 || kValuesPerByte<Format> > 1) {
    Int8MatmulOf<Format, false>(m, x, count, k0, k1, n0, n1, y);
  }
}

template <class Format>
constexpr decltype(Kernels::int8_matmul) Int8MatmulOrNull() {
  if constexpr (Format::kInt8Steps > 0) {
    return Int8Matmul<Format>;
  } else {
    return nullptr;
  }
}

// As Kernels::int8_order says. Blocks of x divide those of the matrix.
template <class Format>
static Int8Order Int8OrderOf(const Matrix& m, bool dots) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  int64_t block = kMaxInt8Block;
  if (Format::kInt8Steps == 0 || (kInBlocks && (m.packed_axis != m.contracted_axis || m.block % 16 != 0))) return {};
  while (kInBlocks && m.block % block != 0) block /= 2;
  return {block, IsPackedAlongDepth<Format>(m) ? kValuesPerByte<Format> : 1, dots ? 64 : 4};
}

}  // namespace eformer::EFORMER_ISA
