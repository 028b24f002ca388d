// Rows of x rounded to int8 times any matrix: sums of a block are exact integers, and blocks are added as floats.
#pragma once

#include <utility>

#include "loops/gemv_bytes.h"

#if defined(EFORMER_AMX)
#include "simd/amx.h"
#endif

namespace eformer::EFORMER_ISA {

// Rows of x whose sums fit into registers. Tiles of AMX are loaded from rows that lie one behind the other.
#if defined(EFORMER_AMX)
constexpr int kInt8TileRows = 1;
#elif defined(EFORMER_BYTE_DOTS)
constexpr int kInt8TileRows = 4;
#elif defined(EFORMER_NEON)
constexpr int kInt8TileRows = 8;
#elif defined(__AVX2__)
constexpr int kInt8TileRows = 6;
#else
constexpr int kInt8TileRows = 4;
#endif

// Whether there are registers for the totals of a tile too, which are loaded and stored once for a panel.
#if defined(EFORMER_BYTE_DOTS)
constexpr bool kHoldsTotals = true;
#else
constexpr bool kHoldsTotals = false;
#endif

// Vectors of columns whose sums are in registers together with those of `rows` rows of x.
template <class Dots>
constexpr int TileVectors(int rows) {
  if (sizeof(typename Dots::Codes) > kIntBytes) return rows <= 3 ? 2 : 1;
  return 2 * rows <= kInt8TileRows ? 4 : 2;
}

// A panel and what belongs to it.
struct Int8Part {
  const uint8_t* panel;
  int64_t blocks;  // of x
  int64_t quads;   // in a block
  int32_t bias;    // as BiasOf says
  bool has_scales, has_offsets;
  const float* scales[kMaxPanelBlocks + 1];  // of each block
  const float* offsets[kMaxPanelBlocks + 1];
  const float* results;  // where the first row of the panel's results goes, if this is its last part; else nullptr
};

// What rows of x have for each block, as Int8X says.
struct Int8Blocks {
  const float* steps;
  const int32_t* sums;
  const int32_t* starts;  // of the sums of a block times the bytes of a panel: what undoes the bias of these
  const float* totals;
  int64_t together;  // blocks that are scaled together
};

// found[r][v] += four bytes of row r of x times quads of vector v, for each of `quads` rows of the panel.
template <class Dots, class Sum, int kRows, int kVectors>
EFORMER_INLINE void AddQuads(const uint8_t* panel, int64_t quads, const int8_t* x, Sum (&found)[kRows][kVectors]) {
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

#if defined(EFORMER_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)

constexpr bool kTakesPairs = true;

// As AddQuads, for an even number of quads, by instructions that multiply two columns by two rows of x, eight deep. A
// last row without another is paired with itself.
template <int kRows, int kVectors>
EFORMER_INLINE void AddPairs(const uint8_t* panel, int64_t quads, const int8_t* x, Ints (&found)[kRows][kVectors]) {
  constexpr int kPairs = (kRows + 1) / 2;
  int32x4_t sums[kPairs][2 * kVectors];
  for (int p = 0; p < kPairs; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      const int32x4_t one = (int32x4_t)found[2 * p][v], other = (int32x4_t)found[Min(2 * p + 1, kRows - 1)][v];
      sums[p][2 * v] = vzip1q_s32(one, other);
      sums[p][2 * v + 1] = vzip2q_s32(one, other);
    }
  }
  for (int64_t q = 0; q < quads; q += 2, panel += 2 * kQuadRowBytes, x += 8 * kRows) {
    int32x4_t codes[2 * kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int32x4_t first = (int32x4_t)vld1q_u8(panel + v * kIntBytes);
      const int32x4_t second = (int32x4_t)vld1q_u8(panel + kQuadRowBytes + v * kIntBytes);
      codes[2 * v] = vzip1q_s32(first, second);
      codes[2 * v + 1] = vzip2q_s32(first, second);
    }
    for (int p = 0; p < kPairs; ++p) {
      int32_t fours[2][2];  // of the two quads, for each of the two rows
      for (int i = 0; i < 2; ++i) {
        std::memcpy(fours[i], x + 4 * (i * kRows + 2 * p), 2 * p + 1 < kRows ? 8 : 4);
        if (2 * p + 1 == kRows) fours[i][1] = fours[i][0];
      }
      const int32x2_t none = vdup_n_s32(0);
      const int32x4_t rows = vzip1q_s32(vcombine_s32(vld1_s32(fours[0]), none), vcombine_s32(vld1_s32(fours[1]), none));
      for (int j = 0; j < 2 * kVectors; ++j) {
        sums[p][j] = vmmlaq_s32(sums[p][j], (int8x16_t)codes[j], (int8x16_t)rows);
      }
    }
  }
  for (int p = 0; p < kPairs; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      found[2 * p][v] = (Ints)vuzp1q_s32(sums[p][2 * v], sums[p][2 * v + 1]);
      if (2 * p + 1 < kRows) found[2 * p + 1][v] = (Ints)vuzp2q_s32(sums[p][2 * v], sums[p][2 * v + 1]);
    }
  }
}

#else

constexpr bool kTakesPairs = false;

#endif

// The same for sums of 32 bits, whatever those of `Dots` are.
template <class Dots, int kRows, int kVectors>
EFORMER_INLINE void AddAllQuads(const uint8_t* panel, int64_t quads, const int8_t* x, Ints (&dots)[kRows][kVectors]) {
  if constexpr (kTakesPairs && kRows > 1) {
    AddPairs(panel, quads, x, dots);
  } else if constexpr (std::is_same_v<typename Dots::Sum, Ints>) {
    AddQuads<Dots>(panel, quads, x, dots);
  } else {
    for (int64_t q = 0; q < quads; q += Dots::kMaxTerms) {
      typename Dots::Sum some[kRows][kVectors] = {};
      AddQuads<Dots>(panel + q * kQuadRowBytes, Min(Dots::kMaxTerms, quads - q), x + q * 4 * kRows, some);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) dots[r][v] += Dots::Widen(some[r][v]);
      }
    }
  }
}

template <class Dots, int kRows>
struct Int8Tile {
  static constexpr int kVectors = TileVectors<Dots>(kRows);

  // totals[r] += x[r] @ panel for each row r of x.
  static void Add(const Int8Part& part, const int8_t* x, const Int8Blocks& of_x, float* totals) {
    constexpr int kQuads = kInt8Block / 4;  // of most blocks
    if constexpr (!kHoldsTotals) {
      for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes) AddToMemory(part, c, x, of_x, totals + c);
    } else if (part.quads == kQuads) {
      (part.has_scales ? AddToHeld<kQuads, true> : AddToHeld<kQuads, false>)(part, x, of_x, totals);
    } else {
      (part.has_scales ? AddToHeld<0, true> : AddToHeld<0, false>)(part, x, of_x, totals);
    }
  }

 private:
  typedef Reals Totals[kRows][kVectors];
  typedef Ints Sums[kRows][kVectors];

  // The sums of a block of x, from columns `c` on. kQuads are in a block, or part.quads if it is 0.
  template <int kQuads = 0>
  EFORMER_INLINE static void AddBlock(const Int8Part& part, int64_t block, int64_t c, const int8_t* x,
                                      const int32_t* starts, Sums& dots) {
    const int64_t quads = kQuads > 0 ? kQuads : part.quads;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dots[r][v] = starts[block * kRows + r] - Ints{};
    }
    AddAllQuads<Dots>(part.panel + block * quads * kQuadRowBytes + 4 * c, quads, x + block * quads * 4 * kRows, dots);
  }

  // found += the sums of blocks of x from `start` to `end`.
  template <int kQuads>
  EFORMER_INLINE static void AddBlocks(const Int8Part& part, int64_t start, int64_t end, int64_t c, const int8_t* x,
                                       const Int8Blocks& of_x, Totals& found) {
    for (int64_t b = start; b < end; ++b) {
      Sums dots;
      AddBlock<kQuads>(part, b, c, x, of_x.starts, dots);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) found[r][v] += ToReals(dots[r][v]) * of_x.steps[b * kRows + r];
      }
    }
  }

  // Blocks of x that share the scales of the matrix are added first, and scaled together.
  template <int kQuads>
  EFORMER_INLINE static void AddScaled(const Int8Part& part, int64_t c, const int8_t* x, const Int8Blocks& of_x,
                                       Totals& held) {
    for (int64_t start = 0, end; start < part.blocks; start = end) {
      end = Min(start + of_x.together, part.blocks);
      Totals found = {};
      AddBlocks<kQuads>(part, start, end, c, x, of_x, found);
      const float* x_totals = of_x.totals + (end - 1) * kRows;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Reals scale = LoadVector<Reals>(part.scales[start] + c + v * kIntLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) held[r][v] += found[r][v] * scale;
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors && part.has_offsets; ++v) {
        const Reals offset = LoadVector<Reals>(part.offsets[start] + c + v * kIntLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) held[r][v] += offset * x_totals[r];
      }
    }
  }

  // A function of its own for each case: GCC 12 would move sums between registers where several are in one.
  template <int kQuads, bool kScales>
  EFORMER_NOINLINE static void AddToHeld(const Int8Part& part, const int8_t* x, const Int8Blocks& of_x, float* totals) {
    for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes, totals += kVectors * kIntLanes) {
      Totals held;
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) held[r][v] = LoadVector<Reals>(totals + r * kPanelColumns + v * kIntLanes);
      }
      if constexpr (kScales) {
        AddScaled<kQuads>(part, c, x, of_x, held);
      } else {
        AddBlocks<kQuads>(part, 0, part.blocks, c, x, of_x, held);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) StoreVector(totals + r * kPanelColumns + v * kIntLanes, held[r][v]);
      }
    }
  }

  EFORMER_INLINE static void AddToMemory(const Int8Part& part, int64_t c, const int8_t* x, const Int8Blocks& of_x,
                                         float* totals) {
    const float* steps = of_x.steps;
    for (int64_t b = 0; b < part.blocks; ++b, steps += kRows) {
      Sums dots;
      AddBlock(part, b, c, x, of_x.starts, dots);
#pragma GCC unroll 4  // in full, or the compiler stores all sums first
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = c + v * kIntLanes;
        const Reals scale = part.has_scales ? LoadVector<Reals>(part.scales[b] + at) : 1 - Reals{};
        const Reals offset = part.has_offsets ? LoadVector<Reals>(part.offsets[b] + at) : Reals{};
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          float* to = totals + r * kPanelColumns + v * kIntLanes;
          Reals total = LoadVector<Reals>(to) + ToReals(dots[r][v]) * (scale * steps[r]);
          if (part.has_offsets) total += offset * (steps[r] * static_cast<float>(of_x.sums[b * kRows + r]));
          StoreVector(to, total);
        }
      }
    }
  }
};

template <class Dots, class Rows>
struct Int8TileFunctions;

template <class Dots, int... kRowsLessOne>
struct Int8TileFunctions<Dots, std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&Int8Tile<Dots, 1>::Add) kOf[] = {nullptr, Int8Tile<Dots, kRowsLessOne + 1>::Add...};
};

// Writes the sums of a panel's columns, in their order in the matrix.
EFORMER_INLINE void WriteTotals(const float* totals, float* y) {
#if defined(EFORMER_BYTE_DOTS)
  __m512 lines[4], pairs[4];  // whole lines: lanes of sixteen bytes are transposed
  for (int i = 0; i < 4; ++i) lines[i] = _mm512_load_ps(totals + 16 * i);
  for (int i = 0; i < 2; ++i) {
    pairs[2 * i] = _mm512_shuffle_f32x4(lines[2 * i], lines[2 * i + 1], 0x88);      // lanes 0 and 2 of both
    pairs[2 * i + 1] = _mm512_shuffle_f32x4(lines[2 * i], lines[2 * i + 1], 0xdd);  // lanes 1 and 3
  }
  for (int i = 0; i < 2; ++i) {
    _mm512_storeu_ps(y + 16 * i, _mm512_shuffle_f32x4(pairs[i], pairs[2 + i], 0x88));
    _mm512_storeu_ps(y + 16 * (i + 2), _mm512_shuffle_f32x4(pairs[i], pairs[2 + i], 0xdd));
  }
#else
  for (int i = 0; i < 16; ++i) std::memcpy(y + kPanelFours[i], totals + 4 * i, 16);
#endif
}

// Calls multiply(part, k, totals) for each panel, from depth k on, to add `count` rows of x times it to `totals`, and
// writes those to y. Blocks of x are `length` long.
template <class Format, bool kPacked, class Multiply>
EFORMER_INLINE void PanelsByBlock(const Matrix& m, int64_t length, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                                  int64_t n1, float* y, const Multiply& multiply_all) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  Int8Panels<Format, kPacked> panels(m);
  const bool by_rows = m.contracted_axis == 0;
  const int64_t columns = CeilDiv(n1 - n0, kPanelColumns) * kPanelColumns;
  // For few rows of x, codes are read along their rows, in panels that do not cut blocks.
  const int64_t whole = kInBlocks ? Min(m.block, kInt8PanelDepth) : length;
  const int64_t max_depth = by_rows && count <= kFewRows ? Max(whole, 32 * panels.kPlaces) : kInt8PanelDepth;
  const int64_t next_rows = max_depth / panels.kPlaces * m.cols - columns;
  const int64_t first_scale = k0 / m.block;
  const Floats all_totals((by_rows ? columns : kPanelColumns) * count);
  const Zeros<uint32_t> nan(Int8Codes<Format>::kHasNaN ? columns : 0);  // bits of each column
  const int64_t scale_rows = by_rows ? kMaxPanelBlocks + 1 : CeilDiv(k1, m.block) - first_scale;
  Int8PanelScales<Format> scales(m, kInBlocks ? scale_rows : 0);
  Int8Part part = {panels.bytes, 0, length / 4, BiasOf<Format>(m), kInBlocks, false, {}, {}, nullptr};
  const auto multiply = [&](int64_t k, int64_t end, int64_t n, float* totals) {
    part.blocks = CeilDiv(end - k, length);
    part.results = end == k1 ? y + n : nullptr;
    if constexpr (kInBlocks) {
      const int64_t first = by_rows ? k / m.block : first_scale;
      if (by_rows) scales.Take(first, CeilDiv(end, m.block) - first, n);
      part.has_offsets = scales.has_offsets;
      for (int64_t b = 0; b < part.blocks; ++b) {
        const int64_t at = ((k + b * length) / m.block - first) * kPanelColumns;
        part.scales[b] = scales.scales.values + at;
        part.offsets[b] = scales.offsets.values + at;
      }
    }
    alignas(64) uint8_t found[kQuadRowBytes] = {};
    panels.Unpack(k, part.blocks * length, n, PanelsAhead(n, n1, next_rows), found);
    if constexpr (Int8Codes<Format>::kHasNaN) {
      for (int i = 0; i < 8; ++i) {
        uint32_t* to = nan.values + (n - n0) + 8 * i;
        StoreVector(to, LoadVector<Bytes>(to) | LoadVector<Bytes>(found + 32 * i));
      }
    }
    multiply_all(part, k, totals);
  };
  const auto write = [&](int64_t n, float* totals) {
    for (int64_t r = 0; r < count; ++r, totals += kPanelColumns) {
      if constexpr (Int8Codes<Format>::kHasNaN) {
        for (int i = 0; i < kPanelColumns; ++i) {
          if (nan.values[n - n0 + i] != 0) totals[i] = __builtin_nanf("");
        }
      }
      float row[kPanelColumns], *to = y + r * m.Width() + n;
      const bool is_whole = n + kPanelColumns <= n1;
      WriteTotals(totals, is_whole ? to : row);
      if (!is_whole) std::memcpy(to, row, (n1 - n) * sizeof(float));
    }
  };
  if (by_rows) {
    const auto totals_of = [&](int64_t n) { return all_totals.values + (n - n0) * count; };
    for (int64_t k = k0; k < k1; k += max_depth) {
      for (int64_t n = n0; n < n1; n += kPanelColumns) multiply(k, Min(k + max_depth, k1), n, totals_of(n));
    }
    for (int64_t n = n0; n < n1; n += kPanelColumns) write(n, totals_of(n));
  } else {
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      if constexpr (kInBlocks) scales.Take(first_scale, scale_rows, n);
      if (n > n0) std::memset(all_totals.values, 0, kPanelColumns * count * sizeof(float));
      for (int64_t k = k0; k < k1; k += max_depth) multiply(k, Min(k + max_depth, k1), n, all_totals.values);
      write(n, all_totals.values);
    }
  }
}

template <class Format, bool kPacked>
static void Int8MatmulOf(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                         float* y) {
  const RowGroups groups(count, kInt8TileRows);
  const int64_t all_blocks = x.depth / x.block, width = m.Width();
  const int32_t bias = BiasOf<Format>(m);
  const Zeros<int32_t> starts(count * all_blocks);
  for (int64_t i = 0; i < count * all_blocks && bias != 0; ++i) starts.values[i] = -bias * x.sums[i];
  PanelsByBlock<Format, kPacked>(
      m, x.block, count, k0, k1, n0, n1, y, [&](const Int8Part& part, int64_t k, float* totals) {
        for (int64_t g = 0; g < groups.count; ++g) {
          const int64_t first = groups.First(g), rows = groups.Size(g), at = first * all_blocks + k / x.block * rows;
          // Lines of y are fetched while the tile is multiplied: stores would wait for them.
          for (int64_t r = first; r < first + rows && part.results != nullptr; ++r) {
            for (int i = 0; i < kPanelColumns; i += 16) __builtin_prefetch(part.results + r * width + i, 1, 2);
          }
          const Int8Blocks of_x = {x.steps + at, x.sums + at, starts.values + at, x.totals + at, x.scaled / x.block};
          Int8TileFunctions<DotsOf<Format>, std::make_integer_sequence<int, kInt8TileRows>>::kOf[rows](
              part, x.values + first * x.depth + k * rows, of_x, totals + first * kPanelColumns);
        }
      });
}

#if defined(EFORMER_AMX)

// The same on AMX: tiles of up to 16 rows by a block of x, times tiles of a block by 16 columns.
template <class Format, bool kPacked>
static void Int8TilesOf(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                        float* y) {
  const int64_t all_blocks = x.depth / x.block;
  alignas(64) int32_t dots[kAmxRows][kPanelColumns];
  // Adds rows `first` to `last` of x, in tiles of `size`.
  const auto add = [&](const Int8Part& part, int64_t k, int64_t first, int64_t last, int size, float* all_totals) {
    const Tiles registers(size, static_cast<int>(x.block));
    for (int64_t row = first; row < last; row += size) {
      const int8_t* values = x.values + row * x.depth + k;
      const float* steps = x.steps + row * all_blocks + k / x.block;
      const int32_t* sums = x.sums + row * all_blocks + k / x.block;
      const uint8_t* panel = part.panel;
      for (int64_t b = 0; b < part.blocks; ++b, panel += part.quads * kQuadRowBytes) {
        MultiplyBytes<Int8Codes<Format>::kSigned>(values + b * x.block, x.depth, panel, dots[0]);
        for (int r = 0; r < size; ++r) {
          float* totals = all_totals + (row + r) * kPanelColumns;
          const float step = steps[r * all_blocks + b];
          const int32_t sum = sums[r * all_blocks + b];
          for (int64_t c = 0; c < kPanelColumns; c += kIntLanes) {
            const Ints found = LoadVector<Ints>(&dots[r][c]) - part.bias * sum;
            const Reals scale = part.has_scales ? LoadVector<Reals>(part.scales[b] + c) : 1 - Reals{};
            Reals total = LoadVector<Reals>(totals + c) + ToReals(found) * (scale * step);
            if (part.has_offsets) {
              total += LoadVector<Reals>(part.offsets[b] + c) * (step * static_cast<float>(sum));
            }
            StoreVector(totals + c, total);
          }
        }
      }
    }
  };
  const int rest = static_cast<int>(count % kAmxRows);
  PanelsByBlock<Format, kPacked>(m, x.block, count, k0, k1, n0, n1, y,
                                 [&](const Int8Part& part, int64_t k, float* totals) {
                                   if (count > rest) add(part, k, 0, count - rest, kAmxRows, totals);
                                   if (rest > 0) add(part, k, count - rest, count, rest, totals);
                                 });
}

#endif

template <class Format>
static void Int8Matmul(const Matrix& m, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                       float* y) {
  WithPacking<Format>(m, [&](auto packed) {
    if (count == 1 && m.contracted_axis == 0) return Int8RowMatmulOf<Format, packed>(m, x, k0, k1, n0, n1, y);
#if defined(EFORMER_AMX)
    Int8TilesOf<Format, packed>(m, x, count, k0, k1, n0, n1, y);
#else
    Int8MatmulOf<Format, packed>(m, x, count, k0, k1, n0, n1, y);
#endif
  });
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
template <class Format, int64_t kLongest = kInt8Block>
static Int8Order Int8OrderOf(const Matrix& m, bool dots) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  int64_t block = kLongest;
  if (Format::kInt8Steps == 0 || (kInBlocks && (m.packed_axis != m.contracted_axis || m.block % 16 != 0))) return {};
  while (kInBlocks && m.block % block != 0) block /= 2;
  int64_t scaled = block;  // or as long as a panel and the matrix have the same scales
  if (kHoldsTotals && kInBlocks && kInt8PanelDepth % m.block == 0) scaled = m.block;
  if (kHoldsTotals && kInBlocks && m.block % kInt8PanelDepth == 0) scaled = kInt8PanelDepth;
  return {block, IsPackedAlongDepth<Format>(m) ? kValuesPerByte<Format> : 1, dots ? 64 : 4, scaled};
}

}  // namespace eformer::EFORMER_ISA
