// Values of a row of the matrix.
#ifndef EFORMER_DECODE_H_
#define EFORMER_DECODE_H_

#include "codes.h"

namespace eformer {
namespace EFORMER_ISA {

constexpr int64_t kGrain = 64;

// The 32 bytes from `codes` on, of which `present` can be read; the rest is 0.
static inline Bytes LoadSome(const uint8_t* codes, int64_t present) {
  if (present >= kStrip) return LoadBytes(codes);
  Bytes found{};
  if (present > 0) std::memcpy(&found, codes, present);
  return found;
}

static inline Strip FromInt8(Bytes bytes) {
  int8_t values[kStrip];
  std::memcpy(values, &bytes, sizeof values);
  return FromInt8(values);
}

// Each `...Values` writes `count` values of a row from column `c` on, a multiple of kGrain, and may write up to the next
// multiple of kGrain behind them.

static inline void Int8Values(const Matrix& m, int64_t row, int64_t c, int64_t count, float* values) {
  const uint8_t* codes = m.codes + row * m.cols + c;
  for (int64_t i = 0; i < count; i += kStrip) {
    StoreStrip(values + i, FromInt8(LoadSome(codes + i, m.cols - c - i)));
  }
}

// Codes of two rows a byte, and a scale for each column.
static inline void Nf4ValuesOfPackedRows(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t count, float* values) {
  const uint8_t* codes = m.codes + row / 2 * m.cols + c;
  const float* scale = m.scale + row / m.block * m.cols + c;
  for (int64_t i = 0; i < count; i += kStrip) {
    const int64_t present = m.cols - c - i;
    const Bytes pairs = LoadSome(codes + i, present);
    Strip found = ToNatural(row % 2 ? LookUpLow(table, pairs) : LookUpHigh(table, pairs));
    if (present >= kStrip) {
      const Strip scales = LoadStrip(scale + i);
      for (int j = 0; j < kVecs; ++j) found.v[j] *= scales.v[j];
      StoreStrip(values + i, found);
    } else {
      StoreStrip(values + i, found);
      for (int64_t j = 0; j < present; ++j) values[i + j] *= scale[i + j];
    }
  }
}

// Codes of two columns a byte, and a scale for so many columns.
static inline void Nf4ValuesOfPackedColumns(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t count, float* values) {
  const int64_t row_bytes = m.RowBytes();
  const uint8_t* codes = m.codes + row * row_bytes + c / 2;
  const float* scale = m.scale + row * m.BlockScaleStride();
  for (int64_t i = 0; i < count; i += kGrain) {
    const Bytes pairs = LoadSome(codes + i / 2, row_bytes - (c + i) / 2);
    Bytes first, second;
    Interleave(HighNibbles(pairs), LowNibbles(pairs), first, second);
    Strip halves[2] = {LookUpLow(table, first), LookUpLow(table, second)};
    if (m.block % kGrain == 0) {
      const Vec factor = Spread(scale[(c + i) / m.block]);
      for (int j = 0; j < kVecs; ++j) {
        halves[0].v[j] *= factor;
        halves[1].v[j] *= factor;
      }
    }
    StoreStrip(values + i, ToNatural(halves[0]));
    StoreStrip(values + i + kStrip, ToNatural(halves[1]));
  }
  if (m.block % kGrain == 0) return;
  for (int64_t start = c, end = c + count; start < end;) {
    const int64_t block = start / m.block, stop = Min((block + 1) * m.block, end);
    for (int64_t i = start; i < stop; ++i) values[i - c] *= scale[block];
    start = stop;
  }
}

static inline void TernaryValuesOfPackedRows(const Matrix& m, const LoadedTable&, int64_t row, int64_t c, int64_t count, float* values) {
  const uint8_t* codes = m.codes + row / 4 * m.cols + c;
  const int shift = 2 * static_cast<int>(row % 4);
  for (int64_t i = 0; i < count; i += kStrip) {
    const Bytes fours = LoadSome(codes + i, m.cols - c - i);
    uint8_t bytes[kStrip];
    std::memcpy(bytes, &fours, sizeof bytes);
    for (int j = 0; j < kStrip; j += kLanes) Store(values + i + j, LookUpPair(kTernaryValues, bytes + j, shift));
  }
}

static inline void TernaryValuesOfPackedColumns(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t count, float* values) {
  const int64_t row_bytes = m.RowBytes();
  const uint8_t* codes = m.codes + row * row_bytes + c / 4;
  for (int64_t i = 0; i < count; i += kGrain) {
    const Bytes fours = LoadSome(codes + i / 4, row_bytes - (c + i) / 4);  // of which the first half counts
    Bytes pairs, first, second, rest;
    Interleave(LowNibbles(fours), HighNibbles(fours), pairs, rest);
    Interleave(pairs & 3, ShiftDown(pairs, 2) & 3, first, second);
    StoreStrip(values + i, ToNatural(LookUpLow(table, first)));
    StoreStrip(values + i + kStrip, ToNatural(LookUpLow(table, second)));
  }
}

static inline void ScaleValues(const Matrix& m, int64_t row, int64_t c, int64_t count, float* values) {
  if (m.scale == nullptr) return;
  const float* scale = m.scale + row * m.scale_row_step + c * m.scale_col_step;
  if (m.scale_col_step != 0) {
    for (int64_t i = 0; i < count; ++i) values[i] *= scale[i];
  } else {
    for (int64_t i = 0; i < count; ++i) values[i] *= *scale;
  }
}

// `table` is TableOf(m).
static inline void DecodeRow(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t count,
                             float* values) {
  switch (m.format) {
    case Format::kInt8:
      Int8Values(m, row, c, count, values);
      return ScaleValues(m, row, c, count, values);
    case Format::kNf4:
      return (m.packed_axis == 0 ? Nf4ValuesOfPackedRows : Nf4ValuesOfPackedColumns)(m, table, row, c, count, values);
    case Format::kTernary:
      (m.packed_axis == 0 ? TernaryValuesOfPackedRows : TernaryValuesOfPackedColumns)(m, table, row, c, count, values);
      return ScaleValues(m, row, c, count, values);
  }
}

// The values of codes.
static inline LoadedTable TableOf(const Matrix& m) {
  return LoadTable(MakeTable(m.format == Format::kTernary ? kTernaryLow : kNf4Values));
}

// As Kernels::decode says.
static void Decode(const Matrix& m, int64_t row, float* values) {
  const LoadedTable table = TableOf(m);
  const int64_t whole = m.cols / kGrain * kGrain;
  DecodeRow(m, table, row, 0, whole, values);
  if (whole == m.cols) return;
  float rest[kGrain];
  DecodeRow(m, table, row, whole, m.cols - whole, rest);
  std::memcpy(values + whole, rest, (m.cols - whole) * sizeof(float));
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_DECODE_H_
