// Few rows of x times the transpose of a matrix, by dot products along rows of codes that are decoded in registers, and
// never stored: for small tables of values, a lookup costs less than to load what was decoded before.
//
// Words of codes are looked up where they lie: a vector has the codes at one place of each word. x has the same order,
// and the vectors of the rows in a tile alternate. A tile has the sums of its rows times two or four rows of the
// matrix.
#pragma once

#include <utility>

#include "loops/dot_tiles.h"

namespace eformer::EFORMER_ISA {

constexpr int kWordTileRows = 8;  // rows of x in a tile

#if defined(EFORMER_AVX512)

// The codes of a run, and the values of x that they are multiplied by.
template <int kBits>
struct WordOrder {
  static constexpr int64_t kRunBytes = kRunValues * kBits / 8;
  static constexpr int kVectors = kRunValues / kLanes, kWords = kRunBytes / 4, kWordValues = 32 / kBits;

  // The place in its word of lane `i` of vector `v`; the word is i % kWords.
  static constexpr int Place(int v, int i) { return i / kWords * kVectors + v; }

  // Its value, in a run.
  static Words Natural(int v) {
    Words from;
    for (int i = 0; i < kLanes; ++i) from[i] = i % kWords * kWordValues + Place(v, i);
    return from;
  }

  EFORMER_INLINE static Words Load(const uint8_t* codes) {
    if constexpr (kBits == 8) {
      return (Words)_mm512_loadu_si512(codes);
    } else if constexpr (kBits == 4) {
      return (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    } else {
      return (Words)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    }
  }

  // How far to shift words for vector `v`.
  template <bool kHighBitsFirst>
  EFORMER_INLINE static Words Shifts(int v) {
    constexpr int kPerByte = 8 / kBits;
    Words shifts;
    for (int i = 0; i < kLanes; ++i) shifts[i] = kBits * (kHighBitsFirst ? Place(v, i) ^ (kPerByte - 1) : Place(v, i));
    return shifts;
  }

  // Puts `count` values, a multiple of kRunValues, into this order, as row `row` of `rows` whose vectors alternate.
  static void Put(const float* x, int64_t count, int64_t row, int64_t rows, float* to) {
    to += row * kLanes;
    for (int64_t k = 0; k < count; k += kRunValues) {
      __m512 from[kVectors];
      for (int v = 0; v < kVectors; ++v) from[v] = (__m512)eformer::EFORMER_ISA::Load(x + k + v * kLanes);
      for (int v = 0; v < kVectors; ++v, to += rows * kLanes) {
        const Words natural = Natural(v);
        const Words low = (Words)_mm512_permutex2var_ps(from[0], (__m512i)natural, from[1]);
        const Words high = (Words)_mm512_permutex2var_ps(from[2], (__m512i)natural, from[3]);
        Store(to, (Vec)(natural < 2 * kLanes ? low : high));
      }
    }
  }
};

template <class Format>
struct WordDots {
  static constexpr int kBits = Format::kPlaneBits[0];
  static constexpr bool kExists = kPlanes<Format> == 1 && (kBits == 2 || kBits == 4);
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr bool kHasOffsets = kInBlocks && !Format::kFloatScales;

  enum Kind {
    kRuns,   // codes lie along rows, and all of a run share a scale
    kShort,  // codes lie along rows, in blocks shorter than a run
    kAcross  // codes of several rows share a byte, and there are no blocks
  };
  template <Kind kKind>
  using OrderOf = WordOrder<kKind == kAcross ? 8 : kBits>;
  typedef OrderOf<kRuns> Order;
  static constexpr int kPerByte = 8 / kBits;

  static constexpr int64_t kChunk = 16;    // rows of the matrix whose scales are read at once
  static constexpr int64_t kNearX = 6144;  // values of x that stay in L1

  // Rows of the matrix in a tile with so many rows of x.
  static constexpr int Columns(int64_t rows) { return rows <= 4 ? 4 : 2; }
  // What a tile has room for: a multiple of four sums.
  static constexpr int64_t TileSums(int64_t rows) { return CeilDiv(rows * Columns(rows), 4) * 4; }

  static Kind KindOf(const Matrix& m) {
    return m.packed_axis == 0 ? kAcross : kInBlocks && m.block < kRunValues ? kShort : kRuns;
  }

  // Whether lanes have one scale each.
  static bool Fits(const Matrix& m) {
    if (m.contracted_axis == 0) return false;
    if (!kInBlocks) return m.scale_row_step == 0 || m.scale_col_step == 0;
    const bool fits = m.block % kRunValues == 0 || (kRunValues % m.block == 0 && m.block % Order::kWordValues == 0);
    return m.packed_axis == 1 && fits;
  }

  // What is multiplied over a part of the depth.
  struct Part {
    const uint8_t* codes[4];
    const float *scales[4], *offsets[4];  // of each run, or of each block if those are shorter
    const float* tail[4];                 // decoded values behind the last whole run, if has_tail
    int first_bit;                        // of codes across rows, in a byte
    int64_t run_blocks;                   // in a run, if blocks are shorter
    const int32_t* places;                // and which of them each lane is in
    const float* x;
    int64_t runs;
    bool has_tail;
    const uint8_t* ahead;  // what to prefetch meanwhile
    bool starts;           // the sums
    float* sums;
  };

  // The sums of kRows rows of x. Values of short blocks are scaled one by one; else a table of values is scaled for
  // each run.
  template <int kRows, Kind kKind>
  static void Add(const LoadedTable& table, const Part& part) {
    typedef OrderOf<kKind> Order;
    constexpr int kColumns = Columns(kRows);
    constexpr int64_t kReadBytes = (kKind == kAcross ? 1 : kColumns) * Order::kRunBytes;
    const Places places = LoadPlaces(part.places);
    Vec sums[kRows][kColumns] = {}, next[kColumns], decoded[kColumns];
    const float* x = part.x;
    ScaleTables<kKind>(table, part, 0, next);
    const auto across = [&](int64_t run) {
      return Order::Load(part.codes[0] + run * Order::kRunBytes) >> part.first_bit;
    };
    Words next_word = kKind == kAcross && part.runs > 0 ? across(0) : Words{};
    for (int64_t run = 0; run < part.runs; ++run, x += kRows * kRunValues) {
      Words words[kColumns];
      Vec tables[kColumns], scales[kColumns], offsets[kColumns];
      for (int64_t i = 0; i < kReadBytes; i += 64) __builtin_prefetch(part.ahead + run * kReadBytes + i, 0, 2);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        words[c] = kKind == kAcross ? next_word : Order::Load(part.codes[c] + run * Order::kRunBytes);
        tables[c] = next[c];
        if constexpr (kKind == kShort) scales[c] = Pick(Load(part.scales[c] + run * part.run_blocks), places);
        if constexpr (kKind == kShort && kHasOffsets) {
          offsets[c] = Pick(Load(part.offsets[c] + run * part.run_blocks), places);
        }
      }
      ScaleTables<kKind>(table, part, run + 1, next);  // so that lookups need not wait for it
      if constexpr (kKind == kAcross) next_word = across(Min(run + 1, part.runs - 1));
#pragma GCC unroll 4
      for (int v = 0; v < Order::kVectors; ++v) {
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          if constexpr (kKind == kAcross) {
            decoded[c] = LookUp((__m512)tables[c], words[0] >> (8 * v + kBits * c));
          } else {
            decoded[c] = LookUp((__m512)tables[c], words[c] >> Order::template Shifts<Format::kHighBitsFirst>(v));
          }
          if constexpr (kKind == kShort) decoded[c] *= scales[c];
          if constexpr (kKind == kShort && kHasOffsets) decoded[c] += offsets[c];
        }
        Multiply(x + v * kRows * kLanes, decoded, sums);
      }
    }
    for (int v = 0; v < Order::kVectors && part.has_tail; ++v) {
      for (int c = 0; c < kColumns; ++c) decoded[c] = Load(part.tail[c] + v * kLanes);
      Multiply(x + v * kRows * kLanes, decoded, sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kColumns; i += 4) {
      Vec four[4] = {};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (i + j < kRows * kColumns) four[j] = sums[(i + j) / kColumns][(i + j) % kColumns];
      }
      AddSums(four, part.starts, *reinterpret_cast<float (*)[4]>(part.sums + i));
    }
  }

  template <class Rows>
  struct Functions;

  template <int... kRowsLessOne>
  struct Functions<std::integer_sequence<int, kRowsLessOne...>> {
    static constexpr decltype(&Add<1, kRuns>) kOf[2][kWordTileRows + 1] = {
        {nullptr, Add<kRowsLessOne + 1, kRuns>...},
        {nullptr, Add < kRowsLessOne + 1, kInBlocks ? kShort : kAcross > ...}};  // formats have one of them
  };

  // As Kernels::dot_matmul says.
  static void Run(const Matrix& m, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y) {
    const RowGroups groups(count, kWordTileRows);
    const int64_t depth = kNearX / Min(count, kWordTileRows) / kRunValues * kRunValues;  // the same for all rows
    Chunk chunk(m);
    for (int64_t n = n0; n < n1; n += kChunk) {
      const int64_t rows = Min(kChunk, n1 - n);
      chunk.Take(n, rows);
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t first = groups.First(g), size = groups.Size(g);
        chunk.Multiply(x.values + first * x.stride, size, depth);
        (Columns(size) == 4 ? Write<4> : Write<2>)(chunk.sums, size, rows, m.Width(), y + first * m.Width() + n);
      }
    }
  }

 private:
  template <Kind kKind, int kColumns>
  EFORMER_INLINE static void ScaleTables(const LoadedTable& table, const Part& part, int64_t run,
                                         Vec (&tables)[kColumns]) {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      tables[c] = (Vec)table.values;
      if constexpr (kInBlocks && kKind == kRuns) tables[c] *= Spread(part.scales[c][run]);
      if constexpr (kHasOffsets && kKind == kRuns) tables[c] += Spread(part.offsets[c][run]);
    }
  }

  // sums[r][c] += x[r] * values[c]
  template <int kRows, int kColumns>
  EFORMER_INLINE static void Multiply(const float* x, const Vec (&values)[kColumns], Vec (&sums)[kRows][kColumns]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vec xs = Load(x + r * kLanes);
#if defined(__AVX512F__)
      asm("" : "+v"(xs));  // GCC would load it for each column
#endif
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] += values[c] * xs;
    }
  }

  // Writes the sums of tiles with `size` rows of x.
  template <int kColumns>
  static void Write(const float* sums, int64_t size, int64_t rows, int64_t width, float* y) {
    for (int64_t i = 0; i < rows; i += kColumns, sums += TileSums(size)) {
      for (int64_t r = 0; r < size; ++r) {
        const float* from = sums + r * kColumns;
        if (i + kColumns <= rows) {
          std::memcpy(y + r * width + i, from, kColumns * sizeof(float));
        } else {
          std::memcpy(y + r * width + i, from, (rows - i) * sizeof(float));
        }
      }
    }
  }

  // Some rows of the matrix, with their scales and offsets as float32: one for each run, or each block if those are
  // shorter.
  struct Chunk {
    const Matrix m;
    const Kind kind = KindOf(m);
    const int64_t row_bytes = m.RowBytes(kPerByte), whole = m.cols / kRunValues * kRunValues;
    const int64_t byte_rows = kind == kAcross ? kPerByte : 1, byte_values = kPerByte / byte_rows;  // in a byte
    const int64_t run_blocks = kind == kShort ? kRunValues / m.block : 1;
    const int64_t blocks = kInBlocks ? m.BlockScaleStride() : 0,
                  numbers = kind == kShort ? blocks : CeilDiv(m.cols, kRunValues);
    const Floats stored_scales{kInBlocks ? kChunk * blocks : 0}, stored_offsets{kHasOffsets ? kChunk * blocks : 0};
    const Floats scales{kInBlocks ? kChunk * numbers + kLanes : 0};
    const Floats offsets{kHasOffsets ? kChunk * numbers + kLanes : 0};
    const Floats tails{whole < m.cols ? kChunk * kRunValues : 0};
    LoadedTable table = TableOf<Format>();
    int32_t places[kLanes];
    int64_t n = 0, rows = 0;
    float sums[kWordTileRows * kChunk];

    explicit Chunk(const Matrix& matrix) : m(matrix) {
      for (int i = 0; i < kLanes; ++i) {
        places[i] = kind == kShort ? static_cast<int32_t>(i % Order::kWords * Order::kWordValues / m.block) : 0;
      }
      if (kHasOffsets && m.offsets.entries == nullptr) table.values = (__m512)((Vec)table.values - m.centre);
    }

    void Take(int64_t first, int64_t count) {
      n = first;
      rows = count;
      if constexpr (kInBlocks) {
        const float* found = ScalesAt(m, n, 0, rows * blocks, stored_scales.values);
        RepeatForRuns(found, scales.values);
        if (kHasOffsets && m.offsets.entries != nullptr) {
          RepeatForRuns(OffsetsAt(m, n, 0, rows * blocks, 0, found, stored_offsets.values), offsets.values);
        }
        PrefetchScales(m, n + kChunk, 0, rows * blocks);
      }
      for (int64_t i = 0; i < rows && whole < m.cols; ++i) {
        float run[kRunValues];
        DecodeRun<Format>(m, TableOf<Format>(), n + i, whole, m.cols - whole, run);
        std::memset(run + m.cols - whole, 0, (whole + kRunValues - m.cols) * sizeof(float));
        (kind == kAcross ? OrderOf<kAcross>::Put : Order::Put)(run, kRunValues, 0, 1, tails.values + i * kRunValues);
      }
    }

    void RepeatForRuns(const float* stored, float* to) const {
      if (numbers == blocks) {
        std::memcpy(to, stored, rows * blocks * sizeof(float));
        return;
      }
      const int64_t each = m.block / kRunValues;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t b = 0, run = 0; b < blocks; ++b, ++stored) {
          for (const int64_t end = Min(run + each, numbers); run < end; ++run) *to++ = *stored;
        }
      }
    }

    // The sums of `size` rows of x, tile by tile, in parts of the depth.
    void Multiply(const float* x, int64_t size, int64_t depth) {
      const int64_t columns = Columns(size);
      const auto add = Functions<std::make_integer_sequence<int, kWordTileRows>>::kOf[kind != kRuns][size];
      const uint8_t* ahead = m.planes[0] + (n + kChunk) / byte_rows * row_bytes;
      for (int64_t k = 0; k < m.cols; k += depth) {
        const int64_t runs = (Min(k + depth, whole) - k) / kRunValues, number = k / kRunValues * run_blocks;
        const bool has_tail = k + depth >= m.cols && whole < m.cols;
        float* to = sums;
        for (int64_t i = 0; i < rows; i += columns, to += TileSums(size)) {
          const int first_bit = static_cast<int>((n + i) % byte_rows) * kBits;
          Part part = {{}, {}, {}, {}, first_bit, run_blocks, places, x + k * size, runs, has_tail, ahead, k == 0, to};
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t row = Min(i + c, rows - 1);
            part.codes[c] = m.planes[0] + (n + row) / byte_rows * row_bytes + k / byte_values;
            part.scales[c] = scales.values + row * numbers + number;
            part.offsets[c] = offsets.values + row * numbers + number;
            part.tail[c] = tails.values + row * kRunValues;
          }
          add(table, part);
          ahead += columns * runs * kRunValues / kPerByte;
        }
      }
    }
  };
};

#endif

// As Kernels::dot_order says.
template <class Format>
static DotOrder DotOrderOf(const Matrix& m) {
#if defined(EFORMER_AVX512)
  if constexpr (WordDots<Format>::kExists) {
    constexpr DotOrder kAlong = WordDots<Format>::kBits == 4 ? DotOrder::kWordsOf8 : DotOrder::kWordsOf16;
    if (WordDots<Format>::Fits(m)) return m.packed_axis == 0 ? DotOrder::kWordsOf4 : kAlong;
  }
#endif
  return RowParts<Format>::DotOrderOf(m);
}

// As InstructionSet::order says.
static inline void OrderX(DotOrder order, const float* x, int64_t count, int64_t row, int64_t rows, float* to) {
  (void)row, (void)rows;
  switch (order) {
#if defined(EFORMER_AVX512)
    case DotOrder::kWordsOf4:
      return WordOrder<8>::Put(x, count, row, rows, to);
    case DotOrder::kWordsOf8:
      return WordOrder<4>::Put(x, count, row, rows, to);
    case DotOrder::kWordsOf16:
      return WordOrder<2>::Put(x, count, row, rows, to);
#endif
    case DotOrder::kPairs:
      return OrderPairs(x, count, to);
    default:
      std::memcpy(to, x, count * sizeof(float));
  }
}

// As Kernels::dot_matmul says.
template <class Format>
static void DotMatmul(const Matrix& m, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y) {
#if defined(EFORMER_AVX512)
  if constexpr (WordDots<Format>::kExists) {
    if (WordDots<Format>::Fits(m)) return WordDots<Format>::Run(m, x, count, n0, n1, y);
  }
#endif
  DecodedDotMatmul<Format>(m, x, count, n0, n1, y);
}

}  // namespace eformer::EFORMER_ISA
