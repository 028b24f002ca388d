// Tiles: some rows of x as bytes times a panel, with sums in registers.
#pragma once

#include <utility>

#include "matrix/pack_bytes.h"

#if defined(EFORMER_AMX)
#include "simd/amx.h"
#endif

namespace eformer::EFORMER_ISA {

// Rows of x, times their parts, whose sums fit into registers.
#if defined(EFORMER_BYTE_DOTS)
constexpr int kTileLines = 4;
#elif defined(EFORMER_NEON)
constexpr int kTileLines = 8;
#elif defined(__AVX2__)
constexpr int kTileLines = 6;
#else
constexpr int kTileLines = 4;
#endif

// Whether there are registers for the totals of a tile too, which are loaded and stored once for a panel.
#if defined(EFORMER_BYTE_DOTS)
constexpr bool kHoldsTotals = true;
#else
constexpr bool kHoldsTotals = false;
#endif

// Rows of x in a tile.
template <int kParts>
constexpr int kByteTileRows = kParts == 1           ? kTileLines
                              : kHoldsTotals        ? 2
                              : kTileLines < kParts ? 1
                                                    : kTileLines / kParts;

// Vectors of columns in a register tile of `rows` rows of x.
template <class Dots, int kParts>
constexpr int TileVectors(int rows) {
  const int lines = rows * kParts;
  if (sizeof(typename Dots::Codes) > kIntBytes) return lines <= 3 ? 2 : 1;
  return 2 * lines <= kTileLines || (kHoldsTotals && kParts > 1) ? 4 : 2;
}

// A panel and what belongs to it.
struct Part {
  const uint8_t* panel;
  int64_t quads;  // in a block of x
  bool has_scales, has_offsets;
  int64_t blocks;                            // of x
  const float* scales[kMaxPanelBlocks + 1];  // of each block
  const float* offsets[kMaxPanelBlocks + 1];
  const float* results;  // where the first row of the panel's results goes, if this is its last part; else nullptr
};

// Rows of x, and what they have for each block, as ByteX says.
struct TileX {
  const int8_t* values;
  const float* steps;
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

template <class Dots, int kParts, int kRows>
struct ByteTile {
  static constexpr int kLines = kRows * kParts, kVectors = TileVectors<Dots, kParts>(kRows);

  // totals[r] += x[r] @ panel for each row r of x.
  static void Add(const Part& part, const TileX& x, float* totals) {
    constexpr int kQuads = kRoundedBlock / 4;  // of most blocks
    if constexpr (!kHoldsTotals || kParts > 1) {
      for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes) AddToMemory(part, c, x, totals + c);
    } else if (part.quads == kQuads) {
      (part.has_scales ? AddToHeld<kQuads, true> : AddToHeld<kQuads, false>)(part, x, totals);
    } else {
      (part.has_scales ? AddToHeld<0, true> : AddToHeld<0, false>)(part, x, totals);
    }
  }

 private:
  typedef Reals Totals[kRows][kVectors];
  typedef Ints Sums[kLines][kVectors];

  // The sums of a block of x, from columns `c` on. kQuads are in a block, or part.quads if it is 0.
  template <int kQuads = 0>
  EFORMER_INLINE static void AddBlock(const Part& part, int64_t block, int64_t c, const TileX& x, Sums& dots) {
    const int64_t quads = kQuads > 0 ? kQuads : part.quads;
#pragma GCC unroll 12
    for (int r = 0; r < kLines; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dots[r][v] = x.starts[block * kLines + r] - Ints{};
    }
    AddAllQuads<Dots>(part.panel + block * quads * kQuadRowBytes + 4 * c, quads, x.values + block * quads * 4 * kLines,
                      dots);
  }

  // found += the sums of blocks of x from `start` to `end`.
  template <int kQuads>
  EFORMER_INLINE static void AddBlocks(const Part& part, int64_t start, int64_t end, int64_t c, const TileX& x,
                                       Totals& found) {
    for (int64_t b = start; b < end; ++b) {
      Sums dots;
      AddBlock<kQuads>(part, b, c, x, dots);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) found[r][v] += ToReals(dots[r][v]) * x.steps[b * kRows + r];
      }
    }
  }

  // Blocks of x that share the scales of the matrix are added first, and scaled together.
  template <int kQuads>
  EFORMER_INLINE static void AddScaled(const Part& part, int64_t c, const TileX& x, Totals& held) {
    for (int64_t start = 0, end; start < part.blocks; start = end) {
      end = Min(start + x.together, part.blocks);
      Totals found = {};
      AddBlocks<kQuads>(part, start, end, c, x, found);
      const float* x_totals = x.totals + (end - 1) * kRows;
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
  EFORMER_NOINLINE static void AddToHeld(const Part& part, const TileX& x, float* totals) {
    for (int64_t c = 0; c < kPanelColumns; c += kVectors * kIntLanes, totals += kVectors * kIntLanes) {
      Totals held;
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) held[r][v] = LoadVector<Reals>(totals + r * kPanelColumns + v * kIntLanes);
      }
      if constexpr (kScales) {
        AddScaled<kQuads>(part, c, x, held);
      } else {
        AddBlocks<kQuads>(part, 0, part.blocks, c, x, held);
      }
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) StoreVector(totals + r * kPanelColumns + v * kIntLanes, held[r][v]);
      }
    }
  }

  EFORMER_INLINE static void AddToMemory(const Part& part, int64_t c, const TileX& x, float* totals) {
    for (int64_t b = 0; b < part.blocks; ++b) {
      Sums dots;
      AddBlock(part, b, c, x, dots);
#pragma GCC unroll 4  // in full, or the compiler stores all sums first
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = c + v * kIntLanes;
        const Reals scale = part.has_scales ? LoadVector<Reals>(part.scales[b] + at) : 1 - Reals{};
        const Reals offset = part.has_offsets ? LoadVector<Reals>(part.offsets[b] + at) : Reals{};
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          float* to = totals + r * kPanelColumns + v * kIntLanes;
          const Reals sum = Joined<kParts>([&](int i) EFORMER_INLINED { return dots[r * kParts + i][v]; });
          Reals total = LoadVector<Reals>(to) + sum * (scale * x.steps[b * kRows + r]);
          if (part.has_offsets) total += offset * x.totals[b * kRows + r];
          StoreVector(to, total);
        }
      }
    }
  }
};

template <class Dots, int kParts, class Rows>
struct ByteTileFunctions;

template <class Dots, int kParts, int... kRowsLessOne>
struct ByteTileFunctions<Dots, kParts, std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&ByteTile<Dots, kParts, 1>::Add) kOf[] = {nullptr,
                                                                      ByteTile<Dots, kParts, kRowsLessOne + 1>::Add...};
};

// Multiplies `count` rows of x in RowGroups by a panel at depth `k`.
template <class Format, int kParts>
struct TileOfRows {
  const ByteX& x;
  const RowGroups groups;
  const int64_t width;  // of y
  const Zeros<int32_t> starts;

  TileOfRows(const Matrix& m, const ByteX& x, int64_t count)
      : x(x), groups(count, kByteTileRows<kParts>), width(m.Width()), starts(count * x.Blocks() * kParts) {
    const int32_t bias = BiasOf<Format>(m);
    for (int64_t i = 0; i < count * x.Blocks() * kParts && bias != 0; ++i) starts.values[i] = -bias * x.sums[i];
  }

  void operator()(const Part& part, int64_t k, float* totals) const {
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t first = groups.First(g), rows = groups.Size(g), at = first * x.Blocks() + k / x.order.block * rows;
      // Lines of y are fetched while the tile is multiplied: stores would wait for them.
      for (int64_t r = first; r < first + rows && part.results != nullptr; ++r) {
        for (int i = 0; i < kPanelColumns; i += 16) __builtin_prefetch(part.results + r * width + i, 1, 2);
      }
      const TileX of_x = {x.values + (first * x.depth + k * rows) * kParts, x.steps + at, starts.values + at * kParts,
                          x.totals + at, x.order.scaled / x.order.block};
      ByteTileFunctions<DotsOf<Format>, kParts, std::make_integer_sequence<int, kByteTileRows<kParts>>>::kOf[rows](
          part, of_x, totals + first * kPanelColumns);
    }
  }
};

#if defined(EFORMER_AMX)

// The same on AMX: tiles of up to 16 rows of rounded x by a block, times tiles of a block by 16 columns.
template <class Format>
struct AmxTileOfRows {
  const ByteX& x;
  const int64_t count;
  const int32_t bias;

  AmxTileOfRows(const Matrix& m, const ByteX& x, int64_t count) : x(x), count(count), bias(BiasOf<Format>(m)) {}

  void operator()(const Part& part, int64_t k, float* totals) const {
    const int rest = static_cast<int>(count % kAmxRows);
    if (count > rest) Add(part, k, 0, count - rest, kAmxRows, totals);
    if (rest > 0) Add(part, k, count - rest, count, rest, totals);
  }

 private:
  // Adds rows `first` to `last` of x, in tiles of `size`.
  void Add(const Part& part, int64_t k, int64_t first, int64_t last, int size, float* all_totals) const {
    alignas(64) int32_t dots[kAmxRows][kPanelColumns];
    const Tiles registers(size, static_cast<int>(x.order.block));
    for (int64_t row = first; row < last; row += size) {
      const int8_t* values = x.values + row * x.depth + k;
      const int64_t at = row * x.Blocks() + k / x.order.block;
      const uint8_t* panel = part.panel;
      for (int64_t b = 0; b < part.blocks; ++b, panel += part.quads * kQuadRowBytes) {
        MultiplyBytes<Int8Codes<Format>::kSigned>(values + b * x.order.block, x.depth, panel, dots[0]);
        for (int r = 0; r < size; ++r) {
          float* totals = all_totals + (row + r) * kPanelColumns;
          const float step = x.steps[at + r * x.Blocks() + b];
          const int32_t sum = x.sums[at + r * x.Blocks() + b];
          for (int64_t c = 0; c < kPanelColumns; c += kIntLanes) {
            const Ints found = LoadVector<Ints>(&dots[r][c]) - bias * sum;
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
  }
};

#endif

// What multiplies panels on this instruction set, and how many rows of rounded x lie side by side for it: tiles of AMX
// are loaded from rows that lie one behind the other.
#if defined(EFORMER_AMX)
template <class Format, int kParts>
using TileOf = std::conditional_t<kParts == 1, AmxTileOfRows<Format>, TileOfRows<Format, kParts>>;
constexpr int64_t kAdjacentRows = 1;
#else
template <class Format, int kParts>
using TileOf = TileOfRows<Format, kParts>;
constexpr int64_t kAdjacentRows = kByteTileRows<1>;
#endif

}  // namespace eformer::EFORMER_ISA
