// A group of rows of x, or many, times any matrix: a part of the matrix is decoded into cache and used for all rows.
#ifndef EFORMER_MULTIPLY_H_
#define EFORMER_MULTIPLY_H_

#include "decode.h"
#include "scales.h"

namespace eformer {
namespace EFORMER_ISA {

constexpr int kTall = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;  // rows of a tile of the result, which fits in registers
constexpr int64_t kStride = kGrain + 16;  // of rows of a part: no power of two, so that they do not share cache sets
constexpr int64_t kFew = 16;              // rows of x for which decoding counts as much as multiplying

// How much of the depth is decoded at a time: for few rows of x it stays in the first level of cache.
constexpr int64_t kDeepest = 128;
static inline int64_t Deep(int64_t count) { return count <= kFew ? 64 : kDeepest; }

// sums[r] += x[:, r] @ part * scale, of a part of `depth` rows; a scale of nullptr is 1.
template <int Rows>
struct Tile {
  static constexpr int kVectors = 2 * Rows <= kTall ? 4 : 2;

  static void Add(const float* part, const float* x, int64_t depth, const float* scale, float* sums) {
    Vec found[Rows][kVectors] = {};
    for (int64_t k = 0; k < depth; ++k, part += kStride, x += Rows) {
      Vec values[kVectors];
      for (int j = 0; j < kVectors; ++j) values[j] = Load(part + j * kLanes);
      for (int r = 0; r < Rows; ++r) {
        const Vec factor = Spread(x[r]);
        for (int j = 0; j < kVectors; ++j) found[r][j] += values[j] * factor;
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      const Vec factor = scale != nullptr ? Load(scale + j * kLanes) : Spread(1);
      for (int r = 0; r < Rows; ++r) {
        float* sum = sums + r * kGrain + j * kLanes;
        Store(sum, Load(sum) + found[r][j] * factor);
      }
    }
  }

  // The same for several columns.
  static void AddAll(const float* part, int64_t columns, const float* x, int64_t depth, const float* scale, float* sums) {
    for (int64_t i = 0; i < columns; i += kVectors * kLanes) {
      Add(part + i, x, depth, scale != nullptr ? scale + i : nullptr, sums + i);
    }
  }
};

typedef void (*TileFunction)(const float*, int64_t, const float*, int64_t, const float*, float*);

template <int... Rows>
struct TileFunctions {
  static constexpr TileFunction kOf[] = {nullptr, Tile<Rows>::AddAll...};
};

static inline TileFunction TileOf(int64_t rows) {
#if defined(EFORMER_AVX512)
  return TileFunctions<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>::kOf[rows];
#else
  return TileFunctions<1, 2, 3, 4, 5, 6>::kOf[rows];
#endif
}

// A part: kGrain columns of the result, and some of the depth.
enum class Decoding {
  kNatural,        // values in order
  kLookUpRows,     // without the scales of blocks, in order of lookup
  kLookUpColumns,  // even columns, then odd ones, both in order of lookup
};

// For many rows of x nothing is gained by decoding faster.
static inline Decoding DecodingOf(const Matrix& m, int64_t count) {
  if (m.format != Format::kNf4 || m.contracted_axis == 1 || count > kFew) return Decoding::kNatural;
  if (m.packed_axis == 0) return m.block >= 32 ? Decoding::kLookUpRows : Decoding::kNatural;
  return Decoding::kLookUpColumns;
}

// Of which column of a part each of its values is.
static inline void OrderOf(Decoding decoding, uint8_t (&columns)[kGrain]) {
  float places[kStrip];
  for (int i = 0; i < kStrip; ++i) places[i] = static_cast<float>(i);
  if (decoding != Decoding::kNatural) StoreStrip(places, FromNatural(LoadStrip(places)));
  for (int i = 0; i < kGrain; ++i) {
    const int place = static_cast<int>(places[i % kStrip]), half = i / kStrip;
    columns[i] = static_cast<uint8_t>(decoding == Decoding::kLookUpColumns ? 2 * place + half : kStrip * half + place);
  }
}

// Rows are pages apart, which no processor foresees: how far from the codes of a part lie those to ask for, in the same
// rows or at the start of the next. Rows that follow each other ask for different columns, since one column of rows a
// power of two apart may lie in one channel of the memory.
struct Ahead {
  static constexpr int kLeast = 2, kDistances = 8;  // parts
  int64_t bytes[kDistances] = {};

  Ahead(const Matrix& m, int64_t depth, int64_t n, int64_t n0, int64_t n1) {
    const int64_t part = m.packed_axis == 1 ? m.Codes(kGrain) : kGrain;
    const int64_t next_rows = (m.packed_axis == 0 ? m.Codes(depth) : depth) * m.RowBytes();
    const int64_t here = (n - n0) / kGrain, parts = CeilDiv(n1 - n0, kGrain);
    const int64_t fitting = Max(1, parts - kLeast + 1);
    for (int64_t i = 0; i < kDistances; ++i) {
      const int64_t distance = kLeast + i;
      const int64_t wrapped = here + distance < parts ? distance * part : next_rows + (distance - parts) * part;
      bytes[i] = i < fitting ? wrapped : bytes[i - fitting];
    }
  }

  void Prefetch(const uint8_t* codes, int64_t row) const { __builtin_prefetch(codes + bytes[row % kDistances]); }
};

// In these, part[k] = matrix[k0 + k, n : n + kGrain].

static inline void Int8Rows(const Matrix& m, int64_t k0, int64_t depth, int64_t n, const Ahead& ahead, float* part) {
  const uint8_t* codes = m.codes + k0 * m.cols + n;
  for (int64_t k = 0; k < depth; ++k, codes += m.cols, part += kStride) {
    ahead.Prefetch(codes, k);
    for (int64_t i = 0; i < kGrain; i += kStrip) StoreStrip(part + i, FromInt8(reinterpret_cast<const int8_t*>(codes + i)));
  }
}

// May write three rows too many.
static inline void TernaryRows(const Matrix& m, int64_t k0, int64_t depth, int64_t n, const Ahead& ahead, float* part) {
  const uint8_t* codes = m.codes + k0 / 4 * m.cols + n;
  for (int64_t k = 0; k < depth; k += 4, codes += m.cols, part += 4 * kStride) {
    ahead.Prefetch(codes, k / 4);
    for (int64_t i = 0; i < kGrain; i += kLanes) {
      for (int r = 0; r < 4; ++r) Store(part + r * kStride + i, LookUpPair(kTernaryValues, codes + i, 2 * r));
    }
  }
}

static inline void DecodeRows(const Matrix& m, const LoadedTable& table, int64_t k0, int64_t depth, int64_t n,
                              int64_t width, const Ahead& ahead, float* part) {
  const bool whole = width == kGrain && m.scale == nullptr;
  if (whole && m.format == Format::kInt8) return Int8Rows(m, k0, depth, n, ahead, part);
  if (whole && m.format == Format::kTernary && m.packed_axis == 0) return TernaryRows(m, k0, depth, n, ahead, part);
  for (int64_t k = 0; k < depth; ++k) {
    ahead.Prefetch(m.CodesAt(k0 + k, n), k);
    DecodeRow(m, table, k0 + k, n, width, part + k * kStride);
  }
}

static inline void LookUpRows(const Matrix& m, const LoadedTable& table, int64_t k0, int64_t depth, int64_t n,
                              const Ahead& ahead, float* part) {
  const uint8_t* codes = m.codes + k0 / 2 * m.cols + n;
  for (int64_t k = 0; k < depth; k += 2, codes += m.cols, part += 2 * kStride) {
    ahead.Prefetch(codes, k / 2);
    for (int64_t i = 0; i < kGrain; i += kStrip) {
      const Bytes pairs = LoadSome(codes + i, m.cols - n - i);
      StoreStrip(part + i, LookUpHigh(table, pairs));
      StoreStrip(part + i + kStride, LookUpLow(table, pairs));
    }
  }
}

static inline void LookUpColumns(const Matrix& m, const LoadedTable& table, const Positions& positions, int64_t k0,
                                 int64_t depth, int64_t n, const Ahead& ahead, float* part) {
  const int64_t row_bytes = m.RowBytes();
  const uint8_t* codes = m.codes + k0 * row_bytes + n / 2;
  WithScales(m, positions, [&](const auto& scales) {
    const auto of_strip = scales.Of(n / 2);
    for (int64_t k = 0; k < depth; ++k) {
      ahead.Prefetch(codes + k * row_bytes, k);
      const Bytes pairs = LoadSome(codes + k * row_bytes, row_bytes - n / 2);
      const auto factors = of_strip.At(k0 + k);
      StoreStrip(part + k * kStride, Times(LookUpHigh(table, pairs), factors));
      StoreStrip(part + k * kStride + kStrip, Times(LookUpLow(table, pairs), factors));
    }
  });
}

// to[k][i] = from[i][k] for 8 x 8 floats.
static inline void Transpose8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
#else
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 8; ++k) to[k * to_stride + i] = from[i * from_stride + k];
  }
#endif
}

// part[k] = matrix[n : n + width, k0 + k]
static inline void DecodeColumns(const Matrix& m, const LoadedTable& table, int64_t k0, int64_t depth, int64_t n,
                                 int64_t width, const Ahead&, float* part) {
  alignas(64) float values[8][kDeepest + 16];
  for (int64_t row = 0; row < width; row += 8) {
    const int64_t rows = Min(8, width - row);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = n + row + i, later = k0 + (Ahead::kLeast + at % Ahead::kDistances) * kGrain;
      __builtin_prefetch(m.CodesAt(at, later));
      DecodeRow(m, table, at, k0, depth, values[i]);
    }
    if (rows < 8) std::memset(values[rows], 0, (8 - rows) * sizeof values[0]);
    for (int64_t k = 0; k < depth; k += 8) Transpose8(&values[0][k], kDeepest + 16, part + k * kStride + row, kStride);
  }
}

// The scales of a block of rows for a part, in order of lookup.
static inline void BlockScales(const Matrix& m, int64_t k, int64_t n, float (&scales)[kGrain]) {
  const float* from = m.scale + k / m.block * m.cols + n;
  const int64_t present = Min(kGrain, m.cols - n);
  if (present < kGrain) std::memset(scales, 0, sizeof scales);
  std::memcpy(scales, from, present * sizeof(float));
  for (int i = 0; i < kGrain; i += kStrip) StoreStrip(scales + i, FromNatural(LoadStrip(scales + i)));
}

// As Kernels::multiply says.
static void Multiply(const Matrix& m, const float* x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                     float* y) {
  const Decoding decoding = DecodingOf(m, count);
  const int64_t deep = Deep(count), depth = m.Depth(), parts = CeilDiv(n1 - n0, kGrain);
  const RowGroups groups(count, kTall);
  const int64_t at_once = count <= kFew ? kGrain : 2 * kLanes;  // for many rows, as much of a part as the first cache holds
  const Floats part((deep + 8) * kStride), all_sums(parts * count * kGrain);
  const LoadedTable table = TableOf(m);
  const Positions positions(m, n0 / 2, decoding == Decoding::kLookUpColumns ? CeilDiv(n1 - n0, 2) : 0);
  alignas(64) float scales[kGrain];
  for (int64_t k = k0, end; k < k1; k = end) {
    end = Min(k + deep, k1);
    if (decoding == Decoding::kLookUpRows) end = Min(end, (k / m.block + 1) * m.block);
    for (int64_t n = n0; n < n1; n += kGrain) {
      const Ahead ahead(m, end - k, n, n0, n1);
      switch (decoding) {
        case Decoding::kNatural:
          (m.contracted_axis == 0 ? DecodeRows : DecodeColumns)(m, table, k, end - k, n, Min(kGrain, n1 - n), ahead,
                                                                part.values);
          break;
        case Decoding::kLookUpRows:
          BlockScales(m, k, n, scales);
          LookUpRows(m, table, k, end - k, n, ahead, part.values);
          break;
        case Decoding::kLookUpColumns:
          LookUpColumns(m, table, positions, k, end - k, n, ahead, part.values);
          break;
      }
      float* sums = all_sums.values + (n - n0) * count;
      for (int64_t i = 0; i < kGrain; i += at_once) {
        for (int64_t g = 0; g < groups.count; ++g) {
          const int64_t first = groups.First(g), rows = groups.Size(g);
          TileOf(rows)(part.values + i, at_once, x + first * depth + k * rows, end - k,
                       decoding == Decoding::kLookUpRows ? scales + i : nullptr, sums + first * kGrain + i);
        }
      }
    }
  }
  uint8_t columns[kGrain];
  OrderOf(decoding, columns);
  for (int64_t n = n0; n < n1; n += kGrain) {
    const float* sums = all_sums.values + (n - n0) * count;
    for (int64_t r = 0; r < count; ++r, sums += kGrain) {
      float row[kGrain];
      for (int i = 0; i < kGrain; ++i) row[columns[i]] = sums[i];
      std::memcpy(y + r * m.Width() + n, row, Min(kGrain, n1 - n) * sizeof(float));
    }
  }
}

static int64_t Panel(const Matrix& m, int64_t count) {
  if (count > kFew) return 4 * kGrain;
  return m.contracted_axis == 0 ? 8 * kGrain : 2 * kGrain;
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_MULTIPLY_H_
