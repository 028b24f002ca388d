// Rows of x as bytes, as ByteX says: rounded, or split into three parts.
#pragma once

#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

// Rounds kLanes floats to the nearest integers, halves to the even one.
static inline Places Round(Vec v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Places)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__) && !defined(EFORMER_AVX512)
  return (Places)_mm256_cvtps_epi32((__m256)v);
#elif defined(EFORMER_NEON)
  return (Places)vcvtnq_s32_f32((float32x4_t)v);
#else
  Places rounded;
  for (int i = 0; i < kLanes; ++i) rounded[i] = static_cast<int32_t>(__builtin_rintf(v[i]));
  return rounded;
#endif
}

static inline int32_t Largest(Places v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(EFORMER_NEON)
  return vmaxvq_s32((int32x4_t)v);
#else
  int32_t largest = v[0];
  for (int i = 1; i < kLanes; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
#endif
}

static inline int32_t Total(Places v) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// The low bytes of sixteen integers.
static inline Sixteen LowBytes(const Places (&integers)[16 / kLanes]) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Sixteen)_mm512_cvtepi32_epi8((__m512i)integers[0]);
#else
  int32_t each[16];
  std::memcpy(each, integers, sizeof each);
  Sixteen bytes;
  for (int j = 0; j < 16; ++j) bytes[j] = static_cast<uint8_t>(each[j]);
  return bytes;
#endif
}

// Writes sixteen values from value `k` on of line `line` of `lines`, in the order of ByteOrder.
template <int kPlaces, int kSpan>
EFORMER_INLINE void PutSixteen(Sixteen values, int64_t k, int64_t line, int64_t lines, int8_t* to) {
  constexpr int kBytes = 16 / kPlaces, kPiece = kBytes < kSpan ? kBytes : kSpan;
  Sixteen order;
  for (int byte = 0; byte < kBytes; ++byte) {
    for (int place = 0; place < kPlaces; ++place) {
      order[byte / kPiece * kPiece * kPlaces + place * kPiece + byte % kPiece] =
          static_cast<uint8_t>(kPlaces * byte + place);
    }
  }
#if defined(__clang__)  // it has no shuffle whose places are a variable, and makes a constant one of this
  Sixteen ordered;
  for (int i = 0; i < 16; ++i) ordered[i] = values[order[i]];
#else
  const Sixteen ordered = __builtin_shuffle(values, order);
#endif
  if (kSpan == 4 && lines == 1) return (void)std::memcpy(to + k, &ordered, sizeof ordered);
  for (int i = 0; i < 16 / kPiece; ++i) {
    const int64_t byte = k / kPlaces + i / kPlaces * kPiece;
    int8_t* piece = to + ((byte / kSpan * kPlaces + i % kPlaces) * lines + line) * kSpan + byte % kSpan;
    std::memcpy(piece, reinterpret_cast<const char*>(&ordered) + i * kPiece, kPiece);
  }
}

// The step of a block whose largest absolute value has these bits, and what its values are multiplied by; false if
// sums of x that are times offsets, or steps, could overflow.
template <int kParts>
EFORMER_INLINE bool StepOf(int32_t bits, float& step, float& factor) {
  constexpr int32_t kTooLarge = 0x71800000, kTooSmall = 0x0d800000;  // the bits of 2^100 and 2^-100
  float top;
  std::memcpy(&top, &bits, sizeof top);
  if constexpr (kParts == 1) {
    step = top / 127;
    factor = top > 0 ? 127 / top : 0;
    return bits < kTooLarge && factor <= __FLT_MAX__;
  }
  if (bits >= kTooLarge || (bits < kTooSmall && bits != 0)) return false;
  top *= 1.0042f;  // the integers of what is close to the next power of two would have a first part of 128
  std::memcpy(&bits, &top, sizeof bits);
  const int32_t exponent = bits >> 23, factor_bits = (276 - exponent) << 23, step_bits = (exponent - 22) << 23;
  step = factor = 0;
  if (bits == 0) return true;
  std::memcpy(&factor, &factor_bits, sizeof factor);
  std::memcpy(&step, &step_bits, sizeof step);
  return true;
}

// As InstructionSet::to_bytes says.
template <int kParts, int kPlaces, int kSpan>
static bool ToBytesOf(const float* x, int64_t depth, const ByteOrder& order, int64_t row, int64_t rows, int8_t* values,
                      float* steps, int32_t* sums, float* totals) {
  const int64_t block = order.block, together = order.scaled / block;
  float total = 0;
  for (int64_t k = 0, at = row, left = together; k < depth; k += block, at += rows) {
    float padded[kSplitBlock];
    const float* from = x + k;
    if (depth - k < block) {
      std::memset(padded, 0, sizeof padded);
      from = static_cast<const float*>(std::memcpy(padded, from, (depth - k) * sizeof(float)));
    }
    Places largest{};  // bits of absolute values are in the order of the values, and those of NaN are above all
    for (int64_t i = 0; i < block; i += kLanes) {
      const Places size = (Places)Load(from + i) & 0x7fffffff;
      largest = size > largest ? size : largest;
    }
    float step, factor;
    if (!StepOf<kParts>(Largest(largest), step, factor)) return false;
    Places of_parts[kParts] = {};
    for (int64_t i = 0; i < block; i += 16) {
      Places integers[kParts][16 / kLanes];
      for (int v = 0; v < 16 / kLanes; ++v) {
        integers[kParts - 1][v] = Round(Load(from + i + v * kLanes) * factor);
        for (int part = kParts - 1; part > 0; --part) integers[part - 1][v] = (integers[part][v] + 128) >> 8;
        for (int part = 0; part < kParts; ++part) of_parts[part] += integers[part][v];
      }
      for (int part = 0; part < kParts; ++part) {
        PutSixteen<kPlaces, kSpan>(LowBytes(integers[part]), k + i, row * kParts + part, rows * kParts, values);
      }
    }
    float sum = 0;
    int32_t of_parts_before = 0;
    for (int part = 0; part < kParts; ++part) {
      const int32_t all = Total(of_parts[part]);
      sums[at * kParts + part] = all - 256 * of_parts_before;
      sum += kPartUnits[kXParts - kParts + part] * static_cast<float>(sums[at * kParts + part]);
      of_parts_before = all;
    }
    total = step * sum + (left == together ? 0.0f : total);
    left = left == 1 ? together : left - 1;
    steps[at] = step;
    totals[at] = total;
  }
  return true;
}

static inline bool ToBytes(const float* x, int64_t depth, const ByteOrder& order, int64_t row, int64_t rows,
                           int8_t* values, float* steps, int32_t* sums, float* totals) {
  static constexpr decltype(&ToBytesOf<1, 1, 4>) kOf[2][2][3] = {
      {{ToBytesOf<1, 1, 4>, ToBytesOf<1, 2, 4>, ToBytesOf<1, 4, 4>},
       {ToBytesOf<1, 1, 64>, ToBytesOf<1, 2, 64>, ToBytesOf<1, 4, 64>}},
      {{ToBytesOf<3, 1, 4>, ToBytesOf<3, 2, 4>, ToBytesOf<3, 4, 4>},
       {ToBytesOf<3, 1, 64>, ToBytesOf<3, 2, 64>, ToBytesOf<3, 4, 64>}}};
  return kOf[order.parts == kXParts][order.span == 64][order.places / 2](x, depth, order, row, rows, values, steps,
                                                                         sums, totals);
}

}  // namespace eformer::EFORMER_ISA
