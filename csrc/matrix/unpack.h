// From the planes of a format to a byte for each code.
#pragma once

#include "matrix/format.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kRunValues = 2 * kStripSize;  // decoded at a time: a whole number of bytes in every plane

// Interleaves the bytes of each sixteen: `first` gets those of the lower eight.
EFORMER_INLINE void InterleaveLanes(Sixteen even, Sixteen odd, Sixteen& first, Sixteen& second) {
#if defined(__AVX2__)
  first = (Sixteen)_mm_unpacklo_epi8((__m128i)even, (__m128i)odd);
  second = (Sixteen)_mm_unpackhi_epi8((__m128i)even, (__m128i)odd);
#elif defined(EFORMER_NEON)
  first = (Sixteen)vzip1q_u8((uint8x16_t)even, (uint8x16_t)odd);
  second = (Sixteen)vzip2q_u8((uint8x16_t)even, (uint8x16_t)odd);
#else
  for (int i = 0; i < 8; ++i) {
    first[2 * i] = even[i], first[2 * i + 1] = odd[i];
    second[2 * i] = even[i + 8], second[2 * i + 1] = odd[i + 8];
  }
#endif
}

EFORMER_INLINE void InterleaveLanes(Bytes even, Bytes odd, Bytes& first, Bytes& second) {
#if defined(__AVX2__)
  first = (Bytes)_mm256_unpacklo_epi8((__m256i)even, (__m256i)odd);
  second = (Bytes)_mm256_unpackhi_epi8((__m256i)even, (__m256i)odd);
#else
  Sixteen in[2][2], out[2][2];
  std::memcpy(in[0], &even, sizeof even);
  std::memcpy(in[1], &odd, sizeof odd);
  for (int i = 0; i < 2; ++i) InterleaveLanes(in[0][i], in[1][i], out[0][i], out[1][i]);
  std::memcpy(&first, out[0], sizeof first);
  std::memcpy(&second, out[1], sizeof second);
#endif
}

#if defined(__AVX512F__)
typedef uint8_t WidestBytes __attribute__((vector_size(64)));

EFORMER_INLINE void InterleaveLanes(WidestBytes even, WidestBytes odd, WidestBytes& first, WidestBytes& second) {
  first = (WidestBytes)_mm512_unpacklo_epi8((__m512i)even, (__m512i)odd);
  second = (WidestBytes)_mm512_unpackhi_epi8((__m512i)even, (__m512i)odd);
}
#elif defined(__AVX2__)
typedef Bytes WidestBytes;
#else
typedef Sixteen WidestBytes;
#endif

// Merges the 32 codes of even places and the 32 of odd places, in order.
EFORMER_INLINE void Interleave(Bytes even, Bytes odd, Bytes& first, Bytes& second) {
  Bytes low, high;
  InterleaveLanes(even, odd, low, high);
#if defined(__AVX2__)
  first = (Bytes)_mm256_permute2x128_si256((__m256i)low, (__m256i)high, 0x20);
  second = (Bytes)_mm256_permute2x128_si256((__m256i)low, (__m256i)high, 0x31);
#else
  Sixteen lanes[2][2];
  std::memcpy(lanes[0], &low, sizeof low);
  std::memcpy(lanes[1], &high, sizeof high);
  for (int i = 0; i < 2; ++i) {
    const Sixteen both[2] = {lanes[0][i], lanes[1][i]};
    std::memcpy(i == 0 ? &first : &second, both, sizeof both);
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
