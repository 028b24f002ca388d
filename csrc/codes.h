// The values that codes stand for, and strips of codes, also where they end before a vector does.
#ifndef EFORMER_CODES_H_
#define EFORMER_CODES_H_

#include "kernels.h"
#include "simd.h"

namespace eformer {
namespace EFORMER_ISA {

// Quantiles of a normal distribution: Dettmers et al., "QLoRA", arXiv 2305.14314, appendix E.
constexpr float kNf4Values[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};

constexpr float kNaN = __builtin_nanf("");
constexpr float kTernaryValues[4] = {0, -1, kNaN, 1};
// The value of the lower, and of the higher two bits of four.
constexpr float kTernaryLow[16] = {0, -1, kNaN, 1, 0, -1, kNaN, 1, 0, -1, kNaN, 1, 0, -1, kNaN, 1};
constexpr float kTernaryHigh[16] = {0, 0, 0, 0, -1, -1, -1, -1, kNaN, kNaN, kNaN, kNaN, 1, 1, 1, 1};
// A byte of four codes, XOR this, has codes that are one more than the values; 3 is NaN.
constexpr uint8_t kTernaryOrder = 0x55;

// 64 codes in order, of those of even and of odd places.
static inline void Interleave(Bytes even, Bytes odd, Bytes& first, Bytes& second) {
#if defined(__AVX2__)
  const __m256i low = _mm256_unpacklo_epi8((__m256i)even, (__m256i)odd);
  const __m256i high = _mm256_unpackhi_epi8((__m256i)even, (__m256i)odd);
  first = (Bytes)_mm256_permute2x128_si256(low, high, 0x20);
  second = (Bytes)_mm256_permute2x128_si256(low, high, 0x31);
#else
  for (int i = 0; i < kStrip; ++i) {
    Bytes& half = i < kStrip / 2 ? first : second;
    half[2 * i % kStrip] = even[i];
    half[2 * i % kStrip + 1] = odd[i];
  }
#endif
}

// `count` rows of bytes, `stride` apart, copied so that a whole vector can be read of each.
constexpr int kMaxCopied = 8;
struct CopiedBytes {
  uint8_t bytes[kMaxCopied][kStrip] = {};

  CopiedBytes(const uint8_t* codes, int64_t stride, int count, int64_t length) {
    for (int i = 0; i < count; ++i) std::memcpy(bytes[i], codes + i * stride, length);
  }
};

// Rows of bytes at a time. With those asked for next, they fit into the ways of one set of the first cache, where rows
// whose length is a multiple of 4096 all fall.
constexpr int kRowGroup = 4;

static inline void PrefetchAfter(const uint8_t* codes, int64_t group_bytes) {
  __builtin_prefetch(codes + group_bytes);  // the same place in the next group
}

// Calls add(codes, stride, n) for each strip of columns, from `n` on, with codes of which 32 bytes of each row can be read.
template <class Add>
static inline void ForEachStrip(const uint8_t* codes, int64_t stride, int rows, int64_t bytes, const Add& add) {
  int64_t n = 0;
  for (; n + kStrip <= bytes; n += kStrip) add(codes + n, stride, n);
  if (n < bytes) {
    const CopiedBytes copied(codes + n, stride, rows, bytes - n);
    add(copied.bytes[0], kStrip, n);
  }
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_CODES_H_
