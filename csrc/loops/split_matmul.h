// Rows of x, split as split_x.h says, times a matrix of integers in blocks: sums of a block are exact integers, and
// blocks are added as floats.
#pragma once

#include "loops/few_rows.h"

namespace eformer::EFORMER_ISA {

template <class Dots, int kRows>
struct SplitTile {
  static constexpr int kVectors = TileVectors<Dots>(kRows * kXParts);

  // totals[r] += x[r] @ panel for each row r of x.
  static void Add(const Int8Part& part, const int8_t* x, const float* steps, const float* sums, const int32_t* of_parts,
                  float* totals) {
    for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes) {
      AddColumns(part, c, x, steps, sums, of_parts, totals + c);
    }
  }

 private:
  EFORMER_INLINE static void AddColumns(const Int8Part& part, int64_t c, const int8_t* x, const float* steps,
                                        const float* sums, const int32_t* of_parts, float* totals) {
    const uint8_t* panel = part.panel + 4 * c;
    for (int64_t b = 0; b < part.blocks; ++b, steps += kRows, sums += kRows, of_parts += kRows * kXParts) {
      Ints dots[kRows * kXParts][kVectors];
      for (int r = 0; r < kRows * kXParts; ++r) {
        for (int v = 0; v < kVectors; ++v) dots[r][v] = -part.bias * of_parts[r] - Ints{};
      }
      AddAllQuads<Dots>(panel, part.quads, x, dots);
      panel += part.quads * kQuadRowBytes;
      x += part.quads * 4 * kRows * kXParts;
      for (int v = 0; v < kVectors; ++v) {
        const Reals scale = LoadVector<Reals>(part.scales[b] + c + v * kIntLanes);
        const Reals offset = part.has_offsets ? LoadVector<Reals>(part.offsets[b] + c + v * kIntLanes) : Reals{};
        for (int r = 0; r < kRows; ++r) {
          float* to = totals + r * kPanelColumns + v * kIntLanes;
          Reals sum = ToReals(dots[r * kXParts][v]) * kPartUnits[0];
          for (int i = 1; i < kXParts; ++i) sum += ToReals(dots[r * kXParts + i][v]) * kPartUnits[i];
          Reals total = LoadVector<Reals>(to) + sum * (scale * steps[r]);
          if (part.has_offsets) total += offset * sums[r];
          StoreVector(to, total);
        }
      }
    }
  }
};

template <class Dots, class Rows>
struct SplitTileFunctions;

template <class Dots, int... kRowsLessOne>
struct SplitTileFunctions<Dots, std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&SplitTile<Dots, 1>::Add) kOf[] = {nullptr, SplitTile<Dots, kRowsLessOne + 1>::Add...};
};

// As Kernels::split_matmul says.
template <class Format>
static void SplitMatmul(const Matrix& m, const SplitX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                        float* y) {
#if defined(EFORMER_BYTE_DOTS)
  if (n1 - n0 <= kSliceColumns && FewRows<Format, FewSplit>::Fits(m))
    return FewRows<Format, FewSplit>{m, x, count}.Run(k0, k1, n0, n1, y);
#endif
  const RowGroups groups(count, kSplitTileRows);
  const int64_t all_blocks = x.depth / x.block;
  PanelsByBlock<Format, true>(
      m, x.block, count, k0, k1, n0, n1, y, [&](const Int8Part& part, int64_t k, float* totals) {
        for (int64_t g = 0; g < groups.count; ++g) {
          const int64_t first = groups.First(g), rows = groups.Size(g), at = first * all_blocks + k / x.block * rows;
          SplitTileFunctions<DotsOf<Format>, std::make_integer_sequence<int, kSplitTileRows>>::kOf[rows](
              part, x.values + (first * x.depth + k * rows) * kXParts, x.steps + at, x.sums + at,
              x.of_parts + at * kXParts, totals + first * kPanelColumns);
        }
      });
}

template <class Format>
constexpr decltype(Kernels::split_matmul) SplitMatmulOrNull() {
  if constexpr (Format::kSplitsX) {
    return SplitMatmul<Format>;
  } else {
    return nullptr;
  }
}

// As Kernels::split_order says. Where no instruction sums four products, floats are as fast unless they have to be
// transposed, which AVX-512 need not do (word_dots.h).
template <class Format>
static Int8Order SplitOrderOf(const Matrix& m) {
#if defined(EFORMER_BYTE_DOTS)
  constexpr bool kByRows = true, kByColumns = false;
#elif !defined(EFORMER_AVX512) && (defined(__AVX2__) || (defined(EFORMER_NEON) && defined(__ARM_FEATURE_DOTPROD)))
  constexpr bool kByRows = false, kByColumns = true;
#else
  constexpr bool kByRows = false, kByColumns = false;
#endif
  const bool is_faster = m.contracted_axis == 0 ? kByRows : kByColumns;
  const bool fits = Format::kSplitsX && is_faster && m.block % 32 == 0;
  return fits ? Int8OrderOf<Format, kMaxInt8Block>(m, false) : Int8Order{};
}

}  // namespace eformer::EFORMER_ISA
