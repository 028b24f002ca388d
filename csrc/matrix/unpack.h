// From the planes of a format to a byte for each code.
#pragma once

#include "matrix/format.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kRunValues = 2 * kStripSize;  // decoded at a time: a whole number of bytes in every plane

#if defined(__AVX2__) || defined(EFORMER_NEON)
EFORMER_INLINE void Interleave(Sixteen even, Sixteen odd, Sixteen& first, Sixteen& second) {
#if defined(__AVX2__)
  first = (Sixteen)_mm_unpacklo_epi8((__m128i)even, (__m128i)odd);
  second = (Sixteen)_mm_unpackhi_epi8((__m128i)even, (__m128i)odd);
#else
  first = (Sixteen)vzip1q_u8((uint8x16_t)even, (uint8x16_t)odd);
  second = (Sixteen)vzip2q_u8((uint8x16_t)even, (uint8x16_t)odd);
#endif
}
#endif

// Merges the 32 codes of even places and the 32 of odd places, in order.
EFORMER_INLINE void Interleave(Bytes even, Bytes odd, Bytes& first, Bytes& second) {
#if defined(__AVX2__)
  const __m256i low = _mm256_unpacklo_epi8((__m256i)even, (__m256i)odd);
  const __m256i high = _mm256_unpackhi_epi8((__m256i)even, (__m256i)odd);
  first = (Bytes)_mm256_permute2x128_si256(low, high, 0x20);
  second = (Bytes)_mm256_permute2x128_si256(low, high, 0x31);
#elif defined(EFORMER_NEON)
  const uint8x16x2_t evens = HalvesOf(even), odds = HalvesOf(odd);
  first = Joined(vzipq_u8(evens.val[0], odds.val[0]));
  second = Joined(vzipq_u8(evens.val[1], odds.val[1]));
#else
  for (int i = 0; i < kStripSize; ++i) {
    Bytes& half = i < kStripSize / 2 ? first : second;
    half[2 * i % kStripSize] = even[i];
    half[2 * i % kStripSize + 1] = odd[i];
  }
#endif
}

// Loads the 32 bytes from `codes` on. Only `present` of them can be read; the rest is 0.
EFORMER_INLINE Bytes LoadSome(const uint8_t* codes, int64_t present) {
  if (present >= kStripSize) return LoadBytes(codes);
  Bytes found{};
  if (present > 0) std::memcpy(&found, codes, present);
  return found;
}

// Spreads the first 64 codes of kBits each to bytes.
template <int kBits, bool kHighBitsFirst>
EFORMER_INLINE void Unpack(Bytes packed, Bytes& first, Bytes& second) {
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
EFORMER_INLINE int FirstBit(int bits, int64_t row) {
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

}  // namespace eformer::EFORMER_ISA
