// The codes of a format as bytes, for matmuls of x as bytes.
//
// A format with kInt8Steps > 0 has an integer for each code: its value times kInt8Steps, rounded. A byte holds that
// integer plus kBias, so that multiplications can take it: from 0 on, or, where those of the instruction set would
// overflow, from -128 to 127. Sums of bytes times x are corrected by kBias times the sum of x.
#pragma once

#include "matrix/unpack.h"

namespace eformer::EFORMER_ISA {

#if defined(EFORMER_VNNI) && defined(__AVX512VNNI__)
constexpr bool kHasByteDots = true;  // instructions that sum unsigned times signed bytes in 32 bits
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
constexpr bool kHasByteDots = false;  // they sum two of them in 16 bits, and saturate
#elif defined(EFORMER_NEON)
constexpr bool kHasByteDots = false;  // both bytes are signed
#else
constexpr bool kHasByteDots = true;
#endif

constexpr int kMaxInt8 = 127;  // of x

// Sums of two products of x and bytes from 0 to `range` that fit into 16 bits.
constexpr int ShortSums(int range) { return range == 0 ? 64 : 32767 / (2 * kMaxInt8 * range); }

template <class Format>
struct Int8Codes {
  static constexpr int kBits = CodeBits<Format>();
  static constexpr int kCount = 1 << kBits;

  static constexpr bool IsNaN(int code) { return Format::Value(code) != Format::Value(code); }
  static constexpr int Integer(int code) {
    if (IsNaN(code)) return 0;
    const float value = Format::Value(code) * Format::kInt8Steps;
    return static_cast<int>(value < 0 ? value - 0.5f : value + 0.5f);
  }
  static constexpr int Least() {
    int least = Integer(0);
    for (int code = 1; code < kCount; ++code) least = Integer(code) < least ? Integer(code) : least;
    return least;
  }
  static constexpr int Most() {
    int most = Integer(0);
    for (int code = 1; code < kCount; ++code) most = Integer(code) > most ? Integer(code) : most;
    return most;
  }
  static constexpr int kRange = Most() - Least();
  static_assert(kRange <= 255, "the integers of a format must fit into a byte");

  static constexpr int kShortSums = ShortSums(kRange);  // with fewer than two of them, bytes are signed
  static constexpr bool kSigned = !kHasByteDots && kShortSums < 2;
  static constexpr int kBias = !kSigned ? -Least() : Most() > 127 ? -128 : 0;

  static constexpr int Byte(int code) { return (Integer(code) + kBias) & 0xff; }

  // The bits that turn every code into its byte, or -1 if none do. A code of NaN turns into any byte.
  static constexpr int FlippedBits() {
    const int bits = Byte(0);
    for (int code = 1; code < kCount; ++code) {
      if (!IsNaN(code) && Byte(code) != (code ^ bits)) return -1;
    }
    return bits;
  }
  static constexpr bool kLooksUp = FlippedBits() < 0;
  static_assert(!kLooksUp || kBits <= 4, "a table has 16 bytes");

  static constexpr bool HasNaN() {
    for (int code = 0; code < kCount; ++code) {
      if (IsNaN(code)) return true;
    }
    return false;
  }
  static constexpr bool kHasNaN = HasNaN();
  static_assert(!kHasNaN || (kBits == 2 && !kLooksUp && IsNaN(3 ^ FlippedBits())), "the byte of NaN must be 3");
};

struct alignas(32) ByteTable {
  uint8_t bytes[32];  // sixteen, for both halves of a vector
};

template <class Format>
constexpr ByteTable ByteTableOf() {
  ByteTable table = {};
  for (int i = 0; i < 32; ++i) {
    table.bytes[i] = static_cast<uint8_t>(Int8Codes<Format>::Byte(i % Int8Codes<Format>::kCount));
  }
  return table;
}

// What loops subtract from the integers of a matrix before they scale them; offsets are for what is left then.
template <class Format>
EFORMER_INLINE float CentreOf(const Matrix& m) {
  return Format::kScales == ScaleKind::kPerBlock && m.offsets.entries == nullptr ? m.centre : 0;
}

// What to subtract from bytes, to be multiplied by sums of x.
template <class Format>
EFORMER_INLINE int32_t BiasOf(const Matrix& m) {
  return Int8Codes<Format>::kBias + static_cast<int32_t>(CentreOf<Format>(m) * Format::kInt8Steps);
}

// Where x in three parts is faster than floats: where no instruction sums four products, floats are as fast unless they
// have to be transposed, which AVX-512 need not do.
#if defined(EFORMER_VNNI) && defined(__AVX512VNNI__)
constexpr bool kSplitsRows = true, kSplitsColumns = false;
#elif !defined(EFORMER_AVX512) && (defined(__AVX2__) || (defined(EFORMER_NEON) && defined(__ARM_FEATURE_DOTPROD)))
constexpr bool kSplitsRows = false, kSplitsColumns = true;
#else
constexpr bool kSplitsRows = false, kSplitsColumns = false;
#endif

// Whether x may be split: integers stand for the values as they are, and none is NaN.
template <class Format>
constexpr bool SplitsX() {
  if (!kSplitsRows && !kSplitsColumns) return false;
  if (Format::kInt8Steps == 0 || Format::kScales != ScaleKind::kPerBlock || kPlanes<Format> > 1) return false;
  for (int code = 0; code < 1 << CodeBits<Format>(); ++code) {
    const float value = Format::Value(code) * Format::kInt8Steps;
    if (value != static_cast<float>(static_cast<int>(value))) return false;
  }
  return true;
}

// Calls use(std::integral_constant<int, parts>) with the parts of x.
template <class Format, class Use>
EFORMER_INLINE void WithParts(const ByteX& x, const Use& use) {
  if constexpr (SplitsX<Format>()) {
    if (x.order.parts == kXParts) return use(std::integral_constant<int, kXParts>());
  }
  use(std::integral_constant<int, 1>());
}

// Whether the bytes in memory can be taken as they are, several values a byte: those of one plane, packed along the
// contracted axis, as blocks always are. Else codes are unpacked first.
template <class Format>
EFORMER_INLINE bool IsPackedAlongDepth(const Matrix& m) {
  return kPlanes<Format> == 1 && (kValuesPerByte<Format> == 1 || m.packed_axis == m.contracted_axis);
}

// The same of several planes, for dot products along rows: four bytes of each plane are in one block of x.
template <class Format>
constexpr bool ArePlanesInPlace(int64_t block) {
  return kPlanes<Format> > 1 && block >= 4 * DescribeFormat<Format>().max_values_per_byte;
}

// Calls use(std::bool_constant) with the answer of IsPackedAlongDepth, and compiles only what can happen.
template <class Format, class Use>
EFORMER_INLINE void WithPacking(const Matrix& m, const Use& use) {
  constexpr bool kAlways = kValuesPerByte<Format> == 1 || Format::kScales == ScaleKind::kPerBlock;
  if constexpr (kPlanes<Format> > 1) {
    use(std::false_type());
  } else if constexpr (kAlways) {
    use(std::true_type());
  } else {
    IsPackedAlongDepth<Format>(m) ? use(std::true_type()) : use(std::false_type());
  }
}

}  // namespace eformer::EFORMER_ISA
