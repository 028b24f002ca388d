// What to prefetch while codes are read.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

// Byte distances to prefetch, since hardware prefetchers miss strides of a page: panels further on in the same rows of
// codes, or at the start of the next rows. Neighbouring rows use different distances, because the same column of rows a
// power of two apart may be in one memory channel.
struct PrefetchDistances {
  static constexpr int kMinPanels = 2, kCount = 8;
  int64_t bytes[kCount] = {};

  PrefetchDistances() = default;  // what is in cache already

  PrefetchDistances(const Matrix& m, int values_per_byte, int64_t depth, int64_t n, int64_t n0, int64_t n1) {
    const int64_t panel = m.packed_axis == 1 ? kPanelColumns / values_per_byte : kPanelColumns;
    const int64_t byte_rows = m.packed_axis == 0 ? CeilDiv(depth, values_per_byte) : depth;
    const int64_t next_rows = byte_rows * m.RowBytes(values_per_byte);
    const int64_t here = (n - n0) / kPanelColumns, panels = CeilDiv(n1 - n0, kPanelColumns);
    const int64_t fitting = Max(1, panels - kMinPanels + 1);
    for (int64_t i = 0; i < kCount; ++i) {
      const int64_t distance = kMinPanels + i;
      const int64_t wrapped = here + distance < panels ? distance * panel : next_rows + (distance - panels) * panel;
      bytes[i] = i < fitting ? wrapped : bytes[i - fitting];
    }
  }

  void Prefetch(const uint8_t* codes, int64_t row) const { __builtin_prefetch(codes + bytes[row % kCount]); }
};

// Prefetches rows of bytes one after the other, from end to end, while those before them are read side by side: of rows
// side by side, memory gives less.
struct LinesAhead {
  const uint8_t *at = nullptr, *end = nullptr;  // what is next, and where its row ends
  int64_t stride = 0, width = 0;                // of rows

  LinesAhead() = default;
  LinesAhead(const uint8_t* first, int64_t stride, int64_t width)
      : at(first), end(first + width), stride(stride), width(width) {}

  // The next kCount pieces of kBytes, into L1 or L2.
  template <int kCount, int kBytes = 64, bool kIntoL1 = true>
  EFORMER_INLINE void Prefetch() {
    if (end - at >= kBytes * kCount) {
      for (int i = 0; i < kCount; ++i) __builtin_prefetch(at + kBytes * i, 0, kIntoL1 ? 0 : 2);
      at += kBytes * kCount;
      return;
    }
    for (int i = 0; i < kCount; ++i) {
      if (at >= end) end += stride, at = end - width;
      __builtin_prefetch(at, 0, kIntoL1 ? 0 : 2);
      at += kBytes;
    }
  }
};

}  // namespace eformer::EFORMER_ISA
