// Up to 24 rows of float x times the transpose of a matrix, x @ q.T: dot products along rows of codes, which are
// decoded in registers and never stored. A tile sums the products of its rows of x with two or four rows of the matrix.
#pragma once

#include <memory>

#include "matrix/decode_rows.h"

namespace eformer::EFORMER_ISA {

// kTileSums: sums that fit into registers beside the decoded values. kDotTileRows: rows of x in a tile (MR).
constexpr int kTileSums = kLanes == 8 ? 8 : 16;
constexpr int kDotTileRows = kLanes == 8 ? 4 : 8;

// sums[i] += or = the sum of the lanes of v[i].
EFORMER_INLINE void AddSums(const Vec (&v)[4], bool starts, float (&sums)[4]) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 all = _mm256_add_ps(_mm512_castps512_ps256(abcd), (__m256)_mm512_extractf64x4_pd((__m512d)abcd, 1));
#elif defined(__AVX2__) && !defined(EFORMER_AVX512)
  const __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
#endif
#if defined(__AVX512F__) || (defined(__AVX2__) && !defined(EFORMER_AVX512))
  const __m128 found = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  _mm_storeu_ps(sums, starts ? found : _mm_add_ps(_mm_loadu_ps(sums), found));
#else
  for (int i = 0; i < 4; ++i) sums[i] = starts ? Sum(v[i]) : sums[i] + Sum(v[i]);
#endif
}

// x times the scales of columns, into `to`; the sum of x times offsets, if there are any.
EFORMER_NOINLINE static float ScaleRow(const float* x, const float* scales, const float* offsets, int64_t count,
                                       float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = x[i] * scales[i];
  if (offsets == nullptr) return 0;
  Vec sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += Load(x + i) * Load(offsets + i);
  float sum = Sum(sums);
  for (; i < count; ++i) sum += x[i] * offsets[i];
  return sum;
}

template <class Format>
class Dots {
 public:
  // How scales come to the values of a run of 64.
  enum Kind {
    kNone,    // there are none, or x has been multiplied by them
    kRuns,    // a run shares one
    kVectors  // a vector shares one, or its lanes are in several blocks
  };

  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kUnit = UnitRows<Format>();
  static constexpr int64_t kChunk = 16;  // rows of the matrix whose scales are read at once

  Dots(const Matrix& m, const PlainX& x, int64_t count, float* y)
      : m(m),
        x(x),
        count(count),
        y(y),
        decoder(m),
        along(m.packed_axis == 1),
        blocks(kInBlocks && along ? m.BlockScaleStride() : 0),
        whole(m.cols / kRunValues * kRunValues),
        depth(kNearX / Min(count, kDotTileRows) / kRunValues * kRunValues),
        scales(kChunk * blocks + kLanes),
        offsets(kChunk * blocks + kLanes),
        block_of(whole / kRunValues),
        tails(whole < m.cols && along ? kChunk * kRunValues : 0) {
    for (int i = 0; i < kRunValues; ++i) {
      const int place = kReorders<Format> ? LanePlace(i / kLanes, i % kLanes) : i;
      places[i] = kInBlocks && along && m.block < kRunValues ? static_cast<int32_t>(place / m.block) : 0;
    }
    for (int64_t k = 0; k < whole && blocks > 0; k += kRunValues) {
      block_of.values[k / kRunValues] = static_cast<int32_t>(k / m.block);
    }
  }

  void Run(int64_t n0, int64_t n1) {
    if (along) return RunRows(n0, n1);
    const int64_t block = kInBlocks ? m.block : n1;
    for (int64_t n = n0, end; n < n1; n = end) {
      end = Min(n1, (n / block + 1) * block);
      if constexpr (kInBlocks) ScaleX(n);
      RunRows(n, end);
    }
  }

 private:
  static constexpr int64_t kNearX = 6144;  // values of x that stay in L1

  const Matrix m;
  PlainX x;  // the caller's, or `scaled`
  const int64_t count;
  float* const y;
  const Decoder<Format> decoder;
  const bool along;
  const int64_t blocks, whole, depth;
  Floats scales, offsets;         // of a chunk of rows
  const Zeros<int32_t> block_of;  // the first block of each run
  const Floats tails;
  std::unique_ptr<const Floats> scaled;
  float of_offsets[kDotRows];  // sums of x times the offsets of a row of blocks
  int32_t places[kRunValues];  // the block of each column of a run
  const bool has_offsets = HasOffsets<Format>(m);

  // A tile's part of the depth.
  struct Part {
    PlanePlaces<Format> codes[4];
    int64_t stride;                       // of rows of bytes, across
    int first;                            // row of a unit, across
    const float *scales[4], *offsets[4];  // of the blocks of rows
    const int32_t* block_of;              // the first block of each run
    const float* tail[4];                 // decoded values behind the last whole run, or nullptr
    const int32_t* places;
    const float* x;
    int64_t x_stride, runs;
    const uint8_t* ahead;  // what to prefetch meanwhile
    bool starts;           // the sums
    float* sums;
  };

  typedef void (*TileFunction)(const Decoder<Format>&, const Part&, int64_t);

  static constexpr int Columns(int64_t rows) { return 4 * rows <= kTileSums ? 4 : 2; }

  // Multiplies x by the scales of a row of blocks, which are of single columns.
  void ScaleX(int64_t n) {
    const int64_t stride = CeilDiv(m.cols, kRunValues) * kRunValues, row = n / m.block;
    if (scaled == nullptr) {
      given = x;
      scaled.reset(new Floats(count * stride));
      x = {scaled->values, stride};
    }
    constexpr int64_t kAtOnce = 512;
    float found[2][kAtOnce];
    std::memset(of_offsets, 0, sizeof of_offsets);
    for (int64_t c = 0; c < m.cols; c += kAtOnce) {
      const int64_t some = Min(kAtOnce, m.cols - c);
      const float* scale = ScalesAt(m, row, c, some, found[0]);
      const float* offset = OffsetsAt(m, row, c, some, Format::kCentre, scale, found[1]);
      for (int64_t r = 0; r < count; ++r) {
        of_offsets[r] +=
            ScaleRow(given.values + r * given.stride + c, scale, offset, some, scaled->values + r * stride + c);
      }
    }
  }
  PlainX given = {};

  void RunRows(int64_t n0, int64_t n1) {
    for (int64_t n = n0; n < n1; n += kChunk) {
      const int64_t rows = Min(kChunk, n1 - n);
      TakeChunk(n, rows);
      for (int64_t first = 0; first < count; first += kDotTileRows) Multiply(n, rows, first, n1);
    }
  }

  // Reads the scales of rows, and decodes what is behind their last whole run.
  void TakeChunk(int64_t n, int64_t rows) {
    if (!along) return;
    if constexpr (kInBlocks) {
      CopyNumbers(m, m.scales, n, 1, 0, rows * blocks, scales.values);
      const float* offset = OffsetsAt(m, n, 0, rows * blocks, Format::kCentre, scales.values, offsets.values);
      if (offset != nullptr && offset != offsets.values) {
        std::memcpy(offsets.values, offset, rows * blocks * sizeof(float));
      }
      PrefetchScales(m, n + kChunk, 0, rows * blocks);
    }
    for (int64_t i = 0; i < rows && whole < m.cols; ++i) {
      Matrix unscaled = m;
      if constexpr (!kInBlocks) unscaled.scale = nullptr;
      float tail[kRunValues], *to = tails.values + i * kRunValues;
      DecodeRun<Format>(unscaled, ExactDecoder<Format>(m), n + i, whole, m.cols - whole, tail);
      std::memset(tail + m.cols - whole, 0, (whole + kRunValues - m.cols) * sizeof(float));
      if constexpr (kReorders<Format>) {
        PutInLanes(tail, kRunValues, to);
      } else {
        std::memcpy(to, tail, sizeof tail);
      }
    }
  }

  // The sums of a chunk of rows of the matrix and a tile of rows of x.
  void Multiply(int64_t n, int64_t rows, int64_t first, int64_t end) {
    const int64_t size = Min(kDotTileRows, count - first);
    const int64_t padded_rows = PaddedRows(size), columns = Columns(padded_rows);
    const Kind kind = blocks == 0 ? kNone : m.block % kRunValues == 0 ? kRuns : kVectors;
    float sums[kDotTileRows * kChunk];
    // Rows of x behind the last one are that one again.
    const float* from = x.values + first * x.stride;
    const uint8_t* ahead = m.planes[0] + (n + kChunk) * RowBytes();
    for (int64_t k = 0; k < m.cols; k += depth) {
      const bool is_last = k + depth >= m.cols;
      // Across, the last run has codes of other rows or copies behind its last column, and x has zeros there.
      const int64_t runs = (Min(k + depth, whole) - k) / kRunValues;
      float* to = sums;
      for (int64_t i = 0; i < rows; i += columns, to += columns * padded_rows) {
        Part part = {};
        part.stride = m.cols;
        part.first = static_cast<int>((n + i) % kUnit);
        part.places = places;
        part.block_of = block_of.values + k / kRunValues;
        part.x = from + k;
        part.x_stride = x.stride;
        part.runs = runs;
        part.ahead = ahead;
        part.starts = k == 0;
        part.sums = to;
        TakeCodes(n + i, k, end, part);
        for (int64_t c = 0; c < columns && along; ++c) {
          const int64_t row = Min(i + c, rows - 1);
          part.scales[c] = scales.values + row * blocks;
          part.offsets[c] = has_offsets ? offsets.values + row * blocks : nullptr;
          part.tail[c] = is_last && whole < m.cols ? tails.values + row * kRunValues : nullptr;
        }
        const TileFunction tile = TileOf(kind, padded_rows);
        tile(decoder, part, size);
        if (!along && is_last && whole < m.cols) AddTail(n + i, tile, part, from, size);
        ahead += columns * runs * kRunValues / kValuesPerByte<Format>;
      }
    }
    Write(sums, n, rows, first, size, columns);
  }

  int64_t RowBytes() const { return along ? m.RowBytes(kValuesPerByte<Format>) : m.cols / kValuesPerByte<Format>; }

  void TakeCodes(int64_t row, int64_t k, int64_t end, Part& part) const {
    if (!along) return PlacesAcross<Format>(m, row / kUnit * kUnit, k, part.codes[0]);
    for (int c = 0; c < 4; ++c) PlacesAlong<Format>(m, Min(row + c, end - 1), k, part.codes[c]);
  }

  // Adds the dot products of columns behind the last whole run, for codes packed across: a run of copies.
  EFORMER_NOINLINE void AddTail(int64_t row, TileFunction tile, Part part, const float* from, int64_t size) const {
    CopiedCodes<Format> copied;
    copied.CopyAcross(m, row / kUnit * kUnit, Max(kUnit, 4), whole, m.cols - whole);
    std::memcpy(part.codes[0], copied.places, sizeof copied.places);
    part.stride = copied.kStride;
    part.x = from + whole;
    part.runs = 1;
    part.starts = false;
    tile(decoder, part, size);
  }

  static constexpr int64_t PaddedRows(int64_t size) { return size == 1 ? 1 : size == 2 ? 2 : size <= 4 ? 4 : 8; }

  void Write(const float* sums, int64_t n, int64_t rows, int64_t first, int64_t size, int64_t columns) const {
    const bool adds = !along && has_offsets;
    for (int64_t i = 0; i < rows; i += columns, sums += columns * PaddedRows(size)) {
      for (int64_t r = 0; r < size; ++r) {
        float* to = y + (first + r) * m.Width() + n + i;
        for (int64_t c = 0; c < Min(columns, rows - i); ++c) {
          to[c] = sums[r * columns + c] + (adds ? of_offsets[first + r] : 0);
        }
      }
    }
  }

  // sums[r][c] += x[r] * values[c]
  template <int kRows, int kColumns>
  EFORMER_INLINE static void AddVector(const float* const (&x)[kRows], int64_t at, const Vec (&values)[kColumns],
                                       Vec (&sums)[kRows][kColumns]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vec xs = Load(x[r] + at);
#if defined(__AVX512F__)
      asm("" : "+v"(xs));  // GCC would load it for each column
#endif
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] += values[c] * xs;
    }
  }

  template <int kRows, Kind kKind, bool kAlong>
  static void Tile(const Decoder<Format>& decoder, const Part& part, int64_t size) {
    constexpr int kColumns = Columns(kRows);
    constexpr bool kScalesTable = kKind == kRuns && Decoder<Format>::kScalesTable;
    constexpr int64_t kReadBytes = kColumns * kRunValues / kValuesPerByte<Format>;
    Vec sums[kRows][kColumns] = {};
    const float* x[kRows];
    for (int64_t r = 0; r < kRows; ++r) x[r] = part.x + Min(r, size - 1) * part.x_stride;
    PlanePlaces<Format> codes[kAlong ? kColumns : 1];
    std::memcpy(codes, part.codes, sizeof codes);
    const Decoder<Format> local = decoder;
    for (int64_t run = 0; run < part.runs; ++run) {
      for (int64_t i = 0; i < kReadBytes; i += 64) __builtin_prefetch(part.ahead + run * kReadBytes + i, 0, 2);
      Decoder<Format> scaled[kScalesTable ? kColumns : 1];
      scaled[0] = local;
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kScalesTable) scaled[c] = local.With(Scaled(local.table.Values(), part, c, run));
      }
      Vec scales[kColumns], offsets[kColumns];  // of all vectors of a run, if they are alike
      if constexpr (kKind == kVectors && kReorders<Format>) {
        const Places at = LoadPlaces(part.places);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          scales[c] = Pick(Load(part.scales[c] + part.block_of[run]), at);
          offsets[c] = part.offsets[c] != nullptr ? Pick(Load(part.offsets[c] + part.block_of[run]), at) : Vec{};
        }
      }
      ForEach<2>([&](auto half) EFORMER_INLINED {
        Strip values[kColumns];
        if constexpr (kAlong) {
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) {
            values[c] = scaled[kScalesTable ? c : 0].template AlongInLanes<half>(codes[c]);
            if constexpr (kKind == kRuns && !kScalesTable) values[c] = Scaled(values[c], part, c, run);
          }
        } else {
          DecodeAcross<half>(local, codes[0], part.stride, part.first, values);
        }
        ForEach<kStripVecs>([&](auto i) EFORMER_INLINED {
          constexpr int kVector = half * kStripVecs + i;
          Vec of_columns[kColumns];
#pragma GCC unroll 4
          for (int c = 0; c < kColumns; ++c) {
            of_columns[c] = values[c].v[i];
            if constexpr (kKind == kVectors && kReorders<Format>) {
              of_columns[c] = of_columns[c] * scales[c] + offsets[c];
            } else if constexpr (kKind == kVectors) {
              ScaleVector<kVector>(part, c, run, of_columns[c]);
            }
          }
          AddVector(x, run * kRunValues + kVector * kLanes, of_columns, sums);
        });
      });
      for (auto& places : codes) {
        for (int plane = 0; plane < kPlanes<Format>; ++plane) {
          places[plane] += kAlong ? kRunValues * Format::kPlaneBits[plane] / 8 : kRunValues;
        }
      }
    }
    for (int v = 0; v < kRunVectors && part.tail[0] != nullptr; ++v) {
      Vec values[kColumns];
      for (int c = 0; c < kColumns; ++c) values[c] = Load(part.tail[c] + v * kLanes);
      AddVector(x, part.runs * kRunValues + v * kLanes, values, sums);
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

  // For runs that share a scale.
  EFORMER_INLINE static Strip Scaled(Strip values, const Part& part, int c, int64_t run) {
    values = Times(values, Spread(part.scales[c][part.block_of[run]]));
    return part.offsets[c] != nullptr ? Plus(values, SpreadStrip(part.offsets[c][part.block_of[run]])) : values;
  }

  template <int kVector>
  EFORMER_INLINE static void ScaleVector(const Part& part, int c, int64_t run, Vec& values) {
    const float *scale = part.scales[c] + part.block_of[run], *offset = part.offsets[c];
    if (offset != nullptr) offset += part.block_of[run];
    const int32_t block = part.places[kVector * kLanes];
    const Places at = LoadPlaces(part.places + kVector * kLanes) - block;  // zeros, if a vector is in one block
    values *= Pick(Load(scale + block), at);
    if (offset != nullptr) values += Pick(Load(offset + block), at);
  }

  // kColumns rows of a unit, or of several units, from row `first` of the unit on.
  template <int kHalf, int kColumns>
  EFORMER_INLINE static void DecodeAcross(const Decoder<Format>& decoder, const PlanePlaces<Format>& run,
                                          int64_t stride, int first, Strip (&values)[kColumns]) {
    PlanePlaces<Format> at;
    for (int plane = 0; plane < kPlanes<Format>; ++plane) at[plane] = run[plane] + kHalf * kStripSize;
    const auto decode = [&](auto from) EFORMER_INLINED {
      ForEach<kColumns>([&](auto c) EFORMER_INLINED {
        constexpr int kRow = from + c, kUnits = kRow / kUnit;
        PlanePlaces<Format> row;
        for (int plane = 0; plane < kPlanes<Format>; ++plane) {
          row[plane] = at[plane] + kUnits * (kUnit * Format::kPlaneBits[plane] / 8) * stride;
        }
        values[c] = decoder.template Across<kRow % kUnit>(row, stride);
      });
    };
    if (kUnit <= kColumns || first == 0) return decode(std::integral_constant<int, 0>());
    if constexpr (kUnit > kColumns) {
      if (first == kColumns) return decode(std::integral_constant<int, kColumns>());
    }
    if constexpr (kUnit > 2 * kColumns) {
      if (first == 2 * kColumns) return decode(std::integral_constant<int, 2 * kColumns>());
      decode(std::integral_constant<int, 3 * kColumns>());
    }
  }

  template <Kind kKind, bool kAlong>
  static TileFunction TileOf(int64_t rows) {
    if (rows <= 2) return rows == 1 ? Tile<1, kKind, kAlong> : Tile<2, kKind, kAlong>;
    return rows <= 4 ? Tile<4, kKind, kAlong> : Tile<kDotTileRows, kKind, kAlong>;
  }

  TileFunction TileOf(Kind kind, int64_t rows) const {
    if (!along) return TileOf<kNone, false>(rows);
    if constexpr (kInBlocks) {
      return kind == kRuns ? TileOf<kRuns, true>(rows) : TileOf<kVectors, true>(rows);
    } else {
      return TileOf<kNone, true>(rows);
    }
  }
};

// As Kernels::dots says.
template <class Format>
static void FloatDots(const Matrix& m, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y) {
  Dots<Format>(m, x, count, y).Run(n0, n1);
}

}  // namespace eformer::EFORMER_ISA
