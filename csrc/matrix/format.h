// What a format declares, and the checks that it declares all of it.
//
// A format is a struct in formats/<name>.h, named as the file with a capital first letter. It must have:
//
//   static constexpr const char* kName       the file's name, by which calls choose the format
//   static constexpr int kPlaneBits[]        bits of a value in each plane: 1, 2, 4 or 8; the low bits of a code first
//   static constexpr ScaleKind kScales
//   static constexpr float Value(int code)   before the scale; the code is below 1 << (the sum of kPlaneBits)
//
// All else has the defaults below. A plane holds 8 / bits values a byte along the packed axis.
#pragma once

#include <cstddef>
#include <type_traits>

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

struct FormatDefaults {
  static constexpr bool kHighBitsFirst = false;         // whether the first value of a byte is in its highest bits
  static constexpr CodeType kCodes = CodeType::kUint8;  // the dtype of planes
  // Whether the format's own loops multiply codes behind the end of the packed axis by 0, so that all must be finite.
  static constexpr bool kClearPadding = false;
  // What is subtracted from values before they are scaled, in blocks that have neither an offset nor a zero point.
  static constexpr float kCentre = 0;
  static constexpr bool kIsInteger = false;  // whether each code is its own value

  // For x as bytes: an integer stands for each code, its value times this, rounded. 0: x is never bytes. Where values
  // of blocks are such integers exactly, float x is split into bytes too.
  static constexpr float kInt8Steps = 0;

  // Strip Values(const uint8_t* codes): the values of 32 codes of 8 bits that are neither integers nor in a table.
  static constexpr std::nullptr_t Values = nullptr;
};

template <class Format>
constexpr int kPlanes = sizeof Format::kPlaneBits / sizeof(int);

template <class Format>
constexpr int kValuesPerByte = 8 / Format::kPlaneBits[0];  // in the first plane, which is the only one for most

template <class Format>
constexpr int CodeBits() {
  int bits = 0;
  for (int plane_bits : Format::kPlaneBits) bits += plane_bits;
  return bits;
}

// What a code stands for in a matrix, before its scale.
template <class Format>
EFORMER_INLINE float ValueIn(const Matrix&, int code) {
  return Format::Value(code);
}

// Rows, or columns, whose codes share bytes in all planes.
template <class Format>
constexpr int UnitRows() {
  int rows = 1;
  for (int bits : Format::kPlaneBits) rows = 8 / bits > rows ? 8 / bits : rows;
  return rows;
}

template <class Format>
constexpr FormatInfo DescribeFormat() {
  FormatInfo info = {Format::kName,   kPlanes<Format>, {},           1, false, Format::kCodes, Format::kClearPadding,
                     Format::kScales, Format::kCentre, Format::Value};
  for (int plane = 0; plane < kPlanes<Format>; ++plane) {
    const int values = 8 / Format::kPlaneBits[plane];
    info.values_per_byte[plane] = values;
    if (values > info.max_values_per_byte) info.max_values_per_byte = values;
  }
  return info;
}

#define EFORMER_DETECT(member)          \
  template <class Format, class = void> \
  constexpr bool kHas_##member = false; \
  template <class Format>               \
  constexpr bool kHas_##member<Format, std::void_t<decltype(&Format::member)>> = true

EFORMER_DETECT(kName);
EFORMER_DETECT(kPlaneBits);
EFORMER_DETECT(kScales);
EFORMER_DETECT(Value);

template <class Format>
constexpr bool HasFittingPlanes() {
  for (int bits : Format::kPlaneBits) {
    if (bits != 1 && bits != 2 && bits != 4 && bits != 8) return false;
  }
  return kPlanes<Format> <= kMaxPlanes && CodeBits<Format>() <= 8;
}

// Fails to compile if something is missing or does not fit; false if the name is not that of the file.
template <class Format>
constexpr bool CheckFormat(const char* file_name) {
  static_assert(std::is_base_of_v<FormatDefaults, Format>, "a format must derive from FormatDefaults");
  static_assert(kHas_kName<Format>, "a format must have `static constexpr const char* kName`");
  static_assert(kHas_kPlaneBits<Format>, "a format must have `static constexpr int kPlaneBits[]`");
  static_assert(kHas_kScales<Format>, "a format must have `static constexpr ScaleKind kScales`");
  static_assert(kHas_Value<Format>, "a format must have `static constexpr float Value(int code)`");
  static_assert(HasFittingPlanes<Format>(),
                "kPlaneBits must be 1, 2, 4 or 8 each, at most 4 of them and 8 bits in all");
  static_assert(!Format::kClearPadding || (kPlanes<Format> == 1 && !Format::kHighBitsFirst),
                "kClearPadding is for one plane with the first value of a byte in its lowest bits");
  const char* name = Format::kName;
  while (*name != 0 && *name == *file_name) ++name, ++file_name;
  return *name == *file_name;
}

}  // namespace eformer::EFORMER_ISA
