// Loops over rows of bytes, also where they end before a vector does.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

#if defined(__AVX2__) || defined(EFORMER_NEON)
static inline void Interleave(Sixteen even, Sixteen odd, Sixteen& first, Sixteen& second) {
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
static inline void Interleave(Bytes even, Bytes odd, Bytes& first, Bytes& second) {
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

// Up to kMaxCopied rows of `length` bytes, `stride` apart, copied so that a whole vector of each can be read.
constexpr int kMaxCopied = 8;
struct CopiedBytes {
  uint8_t bytes[kMaxCopied][kStripSize] = {};

  CopiedBytes(const uint8_t* codes, int64_t stride, int count, int64_t length) {
    for (int i = 0; i < count; ++i) std::memcpy(bytes[i], codes + i * stride, length);
  }
};

// Rows of bytes that a loop reads side by side. With the four that are prefetched they fit into one set of the L1
// cache, where rows fall whose length is a multiple of 4096.
constexpr int kByteRows = 4;

// Prefetches the same place in the next rows.
static inline void PrefetchAfter(const uint8_t* codes, int64_t bytes) { __builtin_prefetch(codes + bytes); }

// Calls add(codes, stride, n) for each strip of `rows` rows of bytes, from byte `n` on; 32 bytes of each can be read.
template <class Add>
static inline void ForEachStrip(const uint8_t* codes, int64_t stride, int rows, int64_t bytes, const Add& add) {
  int64_t n = 0;
  for (; n + kStripSize <= bytes; n += kStripSize) add(codes + n, stride, n);
  if (n < bytes) {
    const CopiedBytes copied(codes + n, stride, rows, bytes - n);
    add(copied.bytes[0], kStripSize, n);
  }
}

// Calls add(codes, c) for each 32 bytes of one row, from byte `c` on; all 32 can be read.
template <class Add>
static inline void ForEachBytes(const uint8_t* codes, int64_t bytes, const Add& add) {
  constexpr int64_t kPrefetchBytes = 2048;  // ahead in the one stream that is read
  int64_t c = 0;
  for (; c + kStripSize <= bytes; c += kStripSize) {
    if (c % 64 == 0) __builtin_prefetch(codes + c + kPrefetchBytes);
    add(codes + c, c);
  }
  if (c < bytes) {
    const CopiedBytes copied(codes + c, 0, 1, bytes - c);
    add(copied.bytes[0], c);
  }
}

}  // namespace eformer::EFORMER_ISA
