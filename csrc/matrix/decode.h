// Generic decoding: from the planes of a format to the values of a row.
#pragma once

#include "matrix/codes.h"
#include "matrix/format.h"
#include "matrix/stored_scales.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kRunValues = 2 * kStripSize;  // decoded at a time: a whole number of bytes in every plane

// Loads the 32 bytes from `codes` on. Only `present` of them can be read; the rest is 0.
static inline Bytes LoadSome(const uint8_t* codes, int64_t present) {
  if (present >= kStripSize) return LoadBytes(codes);
  Bytes found{};
  if (present > 0) std::memcpy(&found, codes, present);
  return found;
}

// Returns 32 bytes that can be read: those from `codes` on, or a copy of the `present` ones in `copy`.
static inline const uint8_t* Readable(const uint8_t* codes, int64_t present, Bytes& copy) {
  if (present >= kStripSize) return codes;
  copy = LoadSome(codes, present);
  return reinterpret_cast<const uint8_t*>(&copy);
}

// Spreads the first 64 codes of kBits each to bytes.
template <int kBits, bool kHighBitsFirst>
static inline void Unpack(Bytes packed, Bytes& first, Bytes& second) {
  if constexpr (kBits < 4) {
    Bytes rest;
    Unpack<2 * kBits, kHighBitsFirst>(packed, packed, rest);
  }
  constexpr uint8_t kMask = (1 << kBits) - 1;
  const Bytes low = packed & kMask, high = ShiftDown(packed, kBits) & kMask;
  kHighBitsFirst ? Interleave(high, low, first, second) : Interleave(low, high, first, second);
}

// The first bit of a row's values in the bytes of a plane that is packed along axis 0.
template <class Format>
static inline int FirstBit(int bits, int64_t row) {
  const int place = static_cast<int>(row % (8 / bits));
  return bits * (Format::kHighBitsFirst ? 8 / bits - 1 - place : place);
}

// Adds the bits that a plane has of 64 codes of a row, from column `c` on; only `present` of them are in the matrix.
template <class Format, int kPlane = 0, int kBelow = 0>
EFORMER_INLINE void AddPlanes(const Matrix& m, int64_t row, int64_t c, int64_t present, Bytes (&codes)[2]) {
  constexpr int kBits = Format::kPlaneBits[kPlane], kPerByte = 8 / kBits;
  Bytes found[2];
  if (m.packed_axis == 0) {
    const uint8_t* from = m.planes[kPlane] + row / kPerByte * m.cols + c;
    for (int i = 0; i < 2; ++i) {
      const Bytes bytes = LoadSome(from + i * kStripSize, present - i * kStripSize);
      found[i] = ShiftDown(bytes, FirstBit<Format>(kBits, row)) & static_cast<uint8_t>((1 << kBits) - 1);
    }
  } else {
    const int64_t row_bytes = CeilDiv(m.cols, kPerByte);
    const uint8_t* from = m.planes[kPlane] + row * row_bytes + c / kPerByte;
    if constexpr (kBits == 8) {
      for (int i = 0; i < 2; ++i) found[i] = LoadSome(from + i * kStripSize, present - i * kStripSize);
    } else {
      Unpack<kBits, Format::kHighBitsFirst>(LoadSome(from, row_bytes - c / kPerByte), found[0], found[1]);
    }
  }
  for (int i = 0; i < 2; ++i) codes[i] |= kBelow == 0 ? found[i] : ShiftUp(found[i], kBelow);
  if constexpr (kPlane + 1 < kPlanes<Format>) AddPlanes<Format, kPlane + 1, kBelow + kBits>(m, row, c, present, codes);
}

// The values of 32 codes, which start at `first_bit` of each byte.
template <class Format>
static inline Strip ValuesOf(const LoadedTable& table, const uint8_t* codes, int first_bit) {
  if constexpr (!std::is_null_pointer_v<decltype(Format::Values)>) {
    return Format::Values(codes);
  } else if constexpr (kHasTable<Format>) {
    return LookUpInOrder(table, codes, first_bit);
  } else {
    float values[kStripSize];
    for (int i = 0; i < kStripSize; ++i) values[i] = Format::Value(codes[i]);
    return LoadStrip(values);
  }
}

// Unscaled values of 64 columns of a row; those behind the last column may be any.
template <class Format>
EFORMER_INLINE void DecodeCodes(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t present,
                                Strip (&values)[2]) {
  constexpr int kBits = Format::kPlaneBits[0];
  constexpr bool kLooksUp = kHasTable<Format> && std::is_null_pointer_v<decltype(Format::Values)>;
  if (kPlanes<Format> == 1 && (kBits == 8 || (kLooksUp && m.packed_axis == 0))) {  // there is nothing to unpack
    const uint8_t* from = m.planes[0] + row / kValuesPerByte<Format> * m.cols + c;
    Bytes copy;
    for (int i = 0; i < 2; ++i) {
      const uint8_t* codes = Readable(from + i * kStripSize, present - i * kStripSize, copy);
      values[i] = ValuesOf<Format>(table, codes, FirstBit<Format>(kBits, row));
    }
    return;
  }
  Bytes codes[2] = {};
  AddPlanes<Format>(m, row, c, present, codes);
  for (int i = 0; i < 2; ++i) values[i] = ValuesOf<Format>(table, reinterpret_cast<const uint8_t*>(&codes[i]), 0);
}

// A number for each of 64 columns.
struct Run {
  Strip half[2];
};

// Reads 64 numbers, of which only `present` can be read; the rest is 0.
EFORMER_INLINE Run LoadRun(const float* numbers, int64_t present) {
  float some[kRunValues] = {};
  if (present < kRunValues) {
    std::memcpy(some, numbers, present * sizeof(float));
    numbers = some;
  }
  return {{LoadStrip(numbers), LoadStrip(numbers + kStripSize)}};
}

EFORMER_INLINE Strip SpreadStrip(float number) {
  Strip strip;
  for (Vec& v : strip.v) v = Spread(number);
  return strip;
}

// The numbers of the blocks that 64 columns of a row from column `c` on are in.
EFORMER_INLINE Run NumbersOfRun(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t c, int64_t present) {
  float found[kRunValues];
  if (m.packed_axis == 0) return LoadRun(NumbersAt(m, all, row / m.block, c, present, found), present);
  const int64_t first = c / m.block, last = (c + present - 1) / m.block;
  const float* numbers = NumbersAt(m, all, row, first, last - first + 1, found);
  if (m.block % kStripSize == 0) {
    return {{SpreadStrip(*numbers), SpreadStrip(numbers[Min(last, (c + kStripSize) / m.block) - first])}};
  }
  float spread[kRunValues] = {};
  for (int64_t i = 0, end = Min(present, m.block - c % m.block); i < present;
       ++numbers, end = Min(present, end + m.block)) {
    for (; i < end; ++i) spread[i] = *numbers;
  }
  return LoadRun(spread, kRunValues);
}

// The same out of line, for numbers of all types.
EFORMER_NOINLINE static void ReadNumbersOfRun(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t c,
                                              int64_t present, float* numbers) {
  const Run run = NumbersOfRun(m, all, row, c, present);
  for (int i = 0; i < 2; ++i) StoreStrip(numbers + i * kStripSize, run.half[i]);
}

// Turns values into what they stand for, given the scales of their blocks, and their offsets or zeros if there are any.
template <class Format>
EFORMER_INLINE Strip ScaleStrip(const Matrix& m, Strip values, const Strip& scales, const Strip& offsets) {
  if constexpr (Format::kFloatScales) {
    return Times(values, scales);
  } else {
    const bool has_offsets = m.offsets.entries != nullptr, zeros = has_offsets && m.offsets_are_zeros;
    if (Format::kCentre != 0 && m.centre != 0) values = Plus(values, SpreadStrip(-m.centre));
    if (zeros) values = Minus(values, offsets);
    values = Times(values, scales);
    return has_offsets && !zeros ? Plus(Rounded(values), offsets) : values;
  }
}

// Turns the values of 64 columns of a row into what they stand for.
template <class Format>
EFORMER_INLINE void ScaleRun(const Matrix& m, int64_t row, int64_t c, int64_t present, Strip (&values)[2]) {
  if constexpr (Format::kScales == ScaleKind::kPerBlock && Format::kFloatScales) {
    const Run scales = NumbersOfRun(m, m.scales, row, c, present);
    for (int i = 0; i < 2; ++i) values[i] = Times(values[i], scales.half[i]);
  } else if constexpr (Format::kScales == ScaleKind::kPerBlock) {
    float scales[kRunValues], offsets[kRunValues] = {};
    ReadNumbersOfRun(m, m.scales, row, c, present, scales);
    if (m.offsets.entries != nullptr) ReadNumbersOfRun(m, m.offsets, row, c, present, offsets);
    for (int i = 0; i < 2; ++i) {
      values[i] =
          ScaleStrip<Format>(m, values[i], LoadStrip(scales + i * kStripSize), LoadStrip(offsets + i * kStripSize));
    }
  } else if (m.scale != nullptr) {
    const float* scale = m.scale + row * m.scale_row_step + c * m.scale_col_step;
    const Run scales =
        m.scale_col_step != 0 ? LoadRun(scale, present) : Run{{SpreadStrip(*scale), SpreadStrip(*scale)}};
    for (int i = 0; i < 2; ++i) values[i] = Times(values[i], scales.half[i]);
  }
}

// Writes 64 values of a row from column `c` on, a multiple of 32; only `present` of them are in the matrix.
template <class Format>
EFORMER_INLINE void DecodeRun(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t present,
                              float* values) {
  Strip run[2];
  DecodeCodes<Format>(m, table, row, c, present, run);
  ScaleRun<Format>(m, row, c, present, run);
  StoreStrip(values, run[0]);
  StoreStrip(values + kStripSize, run[1]);
}

// Writes `count` values of a row from column `c` on, and maybe more, up to a multiple of kRunValues.
template <class Format>
static inline void DecodeRow(const Matrix& m, const LoadedTable& table, int64_t row, int64_t c, int64_t count,
                             float* values) {
  int64_t i = 0;
  for (; i < count && c + i + kRunValues <= m.cols; i += kRunValues) {
    DecodeRun<Format>(m, table, row, c + i, kRunValues, values + i);
  }
  if (i < count) DecodeRun<Format>(m, table, row, c + i, m.cols - c - i, values + i);
}

}  // namespace eformer::EFORMER_ISA
