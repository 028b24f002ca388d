// Rows of x split into three bytes a value, so that instructions for bytes multiply them by codes that are integers.
//
// The values of a block share a step, a power of two: x is about step * (65536 a + 256 b + c), with a, b and c from
// -128 to 127, and off by at most half a step, 2^-23 of the largest x of its block. Sums over a block are exact.
#pragma once

#include "loops/round_x.h"

namespace eformer::EFORMER_ISA {

constexpr float kPartUnits[kXParts] = {65536, 256, 1};  // in steps

// What is the same for all values of a block.
struct BlockOfX {
  float step = 0;
  int32_t sums[kXParts] = {};  // of each part

  float Sum() const {
    float sum = 0;
    for (int part = 0; part < kXParts; ++part) sum += kPartUnits[part] * static_cast<float>(sums[part]);
    return step * sum;
  }
};

// Splits `count` values, a multiple of 16, into parts[i] + 0, 1, ...; false if they are not finite, or so large or
// small that steps or sums could overflow.
EFORMER_INLINE bool SplitBlock(const float* x, int64_t count, int8_t* const (&parts)[kXParts], BlockOfX& block) {
  Places largest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Places size = (Places)Load(x + i) & 0x7fffffff;
    largest = size > largest ? size : largest;
  }
  int32_t bits = Largest(largest);
  block = BlockOfX();
  if (bits == 0) {
    for (int8_t* part : parts) std::memset(part, 0, count);
    return true;
  }
  constexpr int32_t kTooSmall = 0x0d800000;  // the bits of 2^-100
  if (bits >= kTooLarge || bits < kTooSmall) return false;
  float top;
  std::memcpy(&top, &bits, sizeof top);
  top *= 1.0042f;  // the integers of what is close to the next power of two would have a first part of 128
  std::memcpy(&bits, &top, sizeof bits);
  const int32_t exponent = bits >> 23, factor_bits = (276 - exponent) << 23, step_bits = (exponent - 22) << 23;
  float factor;
  std::memcpy(&factor, &factor_bits, sizeof factor);
  std::memcpy(&block.step, &step_bits, sizeof block.step);
  Places sums[kXParts] = {};
  for (int64_t i = 0; i < count; i += 16) {
    int32_t integers[kXParts][16];
    for (int j = 0; j < 16; j += kLanes) {
      const Places last = Round(Load(x + i + j) * factor), middle = (last + 128) >> 8, first = (middle + 128) >> 8;
      const Places each[kXParts] = {first, middle, last};
      for (int part = 0; part < kXParts; ++part) {
        sums[part] += each[part];
        std::memcpy(integers[part] + j, &each[part], sizeof each[part]);
      }
    }
    for (int part = 0; part < kXParts; ++part) {
      for (int j = 0; j < 16; ++j) parts[part][i + j] = static_cast<int8_t>(integers[part][j]);
    }
  }
  for (int part = 0; part < kXParts; ++part) {
    for (int i = 0; i < kLanes; ++i) block.sums[part] += sums[part][i];
  }
  for (int part = kXParts - 1; part > 0; --part) block.sums[part] -= 256 * block.sums[part - 1];
  return true;
}

// Calls use(block, parts, BlockOfX) for blocks of `length` values, zeros behind the last; false as SplitBlock.
template <class Use>
EFORMER_INLINE bool SplitEach(const float* x, int64_t depth, int64_t length, const Use& use) {
  int8_t bytes[kXParts][kMaxInt8Block];
  int8_t* const parts[kXParts] = {bytes[0], bytes[1], bytes[2]};
  for (int64_t k = 0; k < depth; k += length) {
    float padded[kMaxInt8Block];
    const float* from = x + k;
    if (depth - k < length) {
      std::memset(padded, 0, sizeof padded);
      from = static_cast<const float*>(std::memcpy(padded, from, (depth - k) * sizeof(float)));
    }
    BlockOfX found;
    if (!SplitBlock(from, length, parts, found)) return false;
    use(k / length, bytes, found);
  }
  return true;
}

// Puts a part of a block into the order of Int8Order.
template <int kPlaces, int kSpan>
EFORMER_INLINE void PutPart(const int8_t* part, int64_t length, int64_t k, int8_t* to) {
  for (int64_t i = 0; i < length; i += 16) {
    Sixteen values;
    std::memcpy(&values, part + i, sizeof values);
    PutSixteen<kPlaces, kSpan>(values, k + i, to);
  }
}

template <int kPlaces>
static bool SplitRowOf(const float* x, int64_t depth, int64_t length, int8_t* values, float* steps, float* sums,
                       int32_t* of_parts) {
  return SplitEach(x, depth, length, [&](int64_t block, const auto& parts, const BlockOfX& found) {
    for (int part = 0; part < kXParts; ++part) {
      PutPart<kPlaces, 4>(parts[part], length, block * length, values + part * depth);
      of_parts[block * kXParts + part] = found.sums[part];
    }
    steps[block] = found.step;
    sums[block] = found.Sum();
  });
}

// As InstructionSet::split says.
static inline bool SplitRow(const float* x, int64_t depth, const Int8Order& order, int8_t* values, float* steps,
                            float* sums, int32_t* of_parts) {
  static constexpr decltype(&SplitRowOf<1>) kOf[3] = {SplitRowOf<1>, SplitRowOf<2>, SplitRowOf<4>};
  return kOf[order.places / 2](x, depth, order.block, values, steps, sums, of_parts);
}

}  // namespace eformer::EFORMER_ISA
