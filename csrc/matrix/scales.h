// Scales and offsets of blocks, read as they are stored: in any type, perhaps under scales of their own.
//
// A block stands for scale * (value - zero), or for scale * value + offset. Loops that sum values before they scale
// them use ScalesAt and OffsetsAt; decode.h follows the order of roundings that `kernels/grouped.py` defines.
#pragma once

#include "matrix/numbers.h"

namespace eformer::EFORMER_ISA {

// Multiplies `count` numbers by factors; `each` neighbouring numbers share a factor. kLanes more can be read.
EFORMER_NOINLINE static void MultiplyByFactors(const float* factors, int64_t each, int64_t count, float* numbers) {
  if (each < kLanes && kLanes % each == 0) {
    Places of_lanes;
    for (int i = 0; i < kLanes; ++i) of_lanes[i] = i / static_cast<int32_t>(each);
    for (; count >= kLanes; count -= kLanes, numbers += kLanes, factors += kLanes / each) {
      Store(numbers, Load(numbers) * Pick(Load(factors), of_lanes));
    }
  }
  for (; count > 0; ++factors) {
    const float factor = *factors;
    const int64_t some = Min(each, count);
    int64_t i = 0;
    for (; i + kLanes <= some; i += kLanes) Store(numbers + i, Load(numbers + i) * factor);
    for (; i < some; ++i) numbers[i] *= factor;
    numbers += some;
    count -= some;
  }
}

// Multiplies entries of a row, from (row, col) on, by the factors that they share with their superblocks.
static inline void ScaleEntries(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col, int64_t count,
                                float* entries) {
  constexpr int64_t kAtOnce = 64;
  float factors[kAtOnce + kLanes] = {};
  const int64_t first = (m.packed_axis == 0 ? row / all.per_factor : row) * all.factor_row_step;
  const int64_t end = col + count;
  const int64_t each = all.factor_col_step == 0 ? end : m.packed_axis == 0 ? 1 : all.per_factor;  // neighbours
  for (int64_t some; col < end; col += some, entries += some) {
    const int64_t f = col / each, left = (f + 1) * each - col;  // in the superblock of `col`
    const bool is_whole = left == each;
    some = Min(end - col, is_whole ? kAtOnce * each : left);
    ReadNumbers(all.factor_type, all.factors, first + f * all.factor_col_step, 0, 1, is_whole ? CeilDiv(some, each) : 1,
                factors);
    MultiplyByFactors(factors, each, some, entries);
  }
}

// The same for few neighbouring entries in each of several rows, for codes packed along them: the factors of all rows
// are read at once.
static inline void ScaleRows(const BlockNumbers& all, int64_t row, int64_t rows, int64_t col, int64_t count,
                             float* entries) {
  constexpr int64_t kAtOnce = 256;
  float factors[kAtOnce];
  const int64_t first = col / all.per_factor, each = (col + count - 1) / all.per_factor + 1 - first;
  for (int64_t some; rows > 0; row += some, rows -= some) {
    some = Min(rows, kAtOnce / each);
    ReadNumbers(all.factor_type, all.factors, row * all.factor_row_step + first, all.factor_row_step, some, each,
                factors);
    const float* factor = factors;
    for (int64_t r = 0; r < some; ++r) {
      for (int64_t f = 0, c = col; f < each; ++f, ++factor) {
        for (const int64_t end = Min(col + count, (first + f + 1) * all.per_factor); c < end; ++c)
          *entries++ *= *factor;
      }
    }
  }
}

// Reads entries that a table of 256 floats gives values to, times a factor for each kMappedBlock of them, plus a mean.
EFORMER_NOINLINE static void ReadMapped(const BlockNumbers& all, int64_t start, int64_t count, float* floats) {
  const uint8_t* codes = static_cast<const uint8_t*>(all.entries) + start;
  const float* factors = static_cast<const float*>(all.factors);
  for (int64_t i = 0, some; i < count; i += some) {
    some = Min(count - i, kMappedBlock - (start + i) % kMappedBlock);
    for (int64_t j = i; j < i + some; ++j) floats[j] = all.map[codes[j]];
    MultiplyByFactors(factors + (start + i) / kMappedBlock, some, some, floats + i);
  }
  const float mean = *all.mean;
  for (int64_t i = 0; i < count; ++i) floats[i] += mean;  // the products are rounded, as the oracle's
}

// Copies `count` neighbouring entries in each of several rows, one row behind the other. They may run on into the
// following rows.
EFORMER_NOINLINE static void CopyNumbers(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t rows,
                                         int64_t col, int64_t count, float* to) {
  const int64_t stride = m.BlockScaleStride(), start = row * stride + col;
  if (all.map != nullptr) {
    for (int64_t i = 0; i < rows; ++i) ReadMapped(all, start + i * stride, count, to + i * count);
    return;
  }
  ReadNumbers(all.type, all.entries, start, stride, rows, count, to);
  if (all.factors == nullptr) return;
  const int64_t row_step = all.factor_row_step, col_step = all.factor_col_step;
  if (row_step == 0 && col_step == 0) return ScaleEntries(m, all, row, col, rows * count, to);  // by one factor
  constexpr int64_t kFew = 64;
  if (m.packed_axis == 1 && col_step == 1 && rows > 1 && count < kFew && col + count <= stride) {
    return ScaleRows(all, row, rows, col, count, to);
  }
  // Factors of whole superblocks run on into the following rows, too.
  const bool runs_on = m.packed_axis == 1 && col_step == 1 && row_step * all.per_factor == stride;
  for (int64_t i = 0; i < rows; ++i) {
    int64_t from = col;
    for (int64_t r = row + i, left = count, some; left > 0; ++r, from = 0, left -= some, to += some) {
      some = runs_on ? left : Min(left, stride - from);
      ScaleEntries(m, all, r, from, some, to);
    }
  }
}

// `count` neighbouring entries, which may run on into the following rows: where they are stored, if that is as float32,
// else in `buffer`.
static inline const float* NumbersAt(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col, int64_t count,
                                     float* buffer) {
  if (all.IsPlain()) {
    return static_cast<const float*>(all.entries) + row * m.BlockScaleStride() + col;
  }
  CopyNumbers(m, all, row, 1, col, count, buffer);
  return buffer;
}

// The scales of `count` neighbouring blocks: row `row` from column `col` on of the array of scales, which is
// (rows / block, cols) for packed_axis 0 and (rows, cols / block) for packed_axis 1. They may run on into the following
// rows. `buffer` has room for them.
static inline const float* ScalesAt(const Matrix& m, int64_t row, int64_t col, int64_t count, float* buffer) {
  return NumbersAt(m, m.scales, row, col, count, buffer);
}

EFORMER_INLINE void PrefetchBytes(const void* from, int64_t start, int64_t count) {
  constexpr int64_t kCacheLine = 64;
  const char* first = static_cast<const char*>(from) + start;
  for (int64_t i = 0; i < count; i += kCacheLine) __builtin_prefetch(first + i, 0, 2);
}

constexpr int64_t BytesOf(Number type) {
  return type == Number::kFloat32 ? 4 : type == Number::kBfloat16 || type == Number::kFloat16 ? 2 : 1;
}

// Prefetches what ScalesAt and OffsetsAt will read: too little at a time for the processor to find out by itself.
EFORMER_NOINLINE static void PrefetchScales(const Matrix& m, int64_t row, int64_t col, int64_t count) {
  const int64_t stride = m.BlockScaleStride(), all_rows = m.packed_axis == 0 ? CeilDiv(m.rows, m.block) : m.rows;
  if (row >= all_rows) return;
  for (const BlockNumbers* all : {&m.scales, &m.offsets}) {
    if (all->entries == nullptr) continue;
    const int64_t bytes = BytesOf(all->type);
    PrefetchBytes(all->entries, (row * stride + col) * bytes, count * bytes);
    if (all->factors == nullptr || all->map != nullptr || m.packed_axis == 0 || all->factor_col_step == 0) continue;
    const int64_t factor_bytes = BytesOf(all->factor_type);
    PrefetchBytes(all->factors, row * all->factor_row_step * factor_bytes, count / all->per_factor * factor_bytes);
  }
}

// What to add to scale * (value - centre) for the same blocks, where `value` is that of the format's header and
// `scales` are from ScalesAt; nullptr if nothing.
EFORMER_NOINLINE static const float* OffsetsAt(const Matrix& m, int64_t row, int64_t col, int64_t count, float centre,
                                               const float* scales, float* buffer) {
  if (m.offsets.entries == nullptr) {
    if (centre == m.centre) return nullptr;
    for (int64_t i = 0; i < count; ++i) buffer[i] = scales[i] * (centre - m.centre);
    return buffer;
  }
  const float* found = NumbersAt(m, m.offsets, row, col, count, buffer);
  if (m.offsets_are_zeros) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = scales[i] * (centre - found[i]);
    return buffer;
  }
  if (centre == 0) return found;
  for (int64_t i = 0; i < count; ++i) buffer[i] = found[i] + scales[i] * centre;
  return buffer;
}

// Whether something is to be added to scale * (value - kCentre).
template <class Format>
EFORMER_INLINE bool HasOffsets(const Matrix& m) {
  return Format::kScales == ScaleKind::kPerBlock && (m.offsets.entries != nullptr || Format::kCentre != m.centre);
}

// Numbers of neighbouring blocks: where they are stored, as float32 or bfloat16, or in a buffer of floats.
struct RowOfNumbers {
  const void* entries = nullptr;
  bool is_narrow = false;  // bfloat16

  RowOfNumbers() = default;
  explicit RowOfNumbers(const float* floats) : entries(floats) {}
  RowOfNumbers(const BlockNumbers& all, int64_t start)
      : entries(static_cast<const uint8_t*>(all.entries) + start * BytesOf(all.type)),
        is_narrow(all.type == Number::kBfloat16) {}

  static bool Fits(const BlockNumbers& all) {
    return all.factors == nullptr && (all.type == Number::kFloat32 || all.type == Number::kBfloat16);
  }

  // A vector of them, from number `i` on.
  template <class Vector>
  EFORMER_INLINE Vector At(int64_t i) const {
    Vector found;
    const uint16_t* narrow = static_cast<const uint16_t*>(entries) + i;
    if (!is_narrow) {
      std::memcpy(&found, static_cast<const float*>(entries) + i, sizeof found);
    } else if constexpr (sizeof(Vector) == sizeof(Vec)) {
      found = (Vector)ReadBfloat16::Of(LoadWords(narrow));
    } else {
      uint32_t words[sizeof(Vector) / sizeof(float)];
      for (uint32_t& word : words) word = static_cast<uint32_t>(*narrow++) << 16;
      std::memcpy(&found, words, sizeof found);
    }
    return found;
  }
};

// The scales of a row of blocks, for up to kSliceColumns columns, and what to add to scale * (value - centre). Vectors
// of them are made where they are used: copies of both would take half of L1.
struct RowOfScales {
  RowOfNumbers scales, offsets;
  float centre = 0;  // offsets are still to be corrected for it
  bool has_offsets = false;

  template <class Vector>
  EFORMER_INLINE Vector Scale(int64_t i) const {
    return scales.At<Vector>(i);
  }

  template <class Vector>
  EFORMER_INLINE Vector Offset(int64_t i, Vector scale) const {
    const Vector offset = offsets.At<Vector>(i);
    return centre != 0 ? offset + scale * centre : offset;  // scale * 0 may be NaN
  }
};

// Memory for scales that can't be read where they are stored.
struct ScaleBuffers {
  alignas(64) float scales[kSliceColumns];
  alignas(64) float offsets[kSliceColumns];

  // Those of block row `row`, for `count` columns from `col` on. Zeros follow them up to a multiple of kPanelColumns.
  EFORMER_NOINLINE RowOfScales Take(const Matrix& m, int64_t row, int64_t col, int64_t count, float centre) {
    const int64_t start = row * m.BlockScaleStride() + col, padding = -count & (kPanelColumns - 1);
    const bool has_stored = m.offsets.entries != nullptr;
    RowOfScales found;
    if (padding == 0 && RowOfNumbers::Fits(m.scales) &&
        (has_stored ? RowOfNumbers::Fits(m.offsets) && !m.offsets_are_zeros : centre == m.centre)) {
      found.scales = RowOfNumbers(m.scales, start);
      found.has_offsets = has_stored;
      if (has_stored) found.offsets = RowOfNumbers(m.offsets, start);
      found.centre = centre;
      return found;
    }
    const float* scale = ScalesAt(m, row, col, count, scales);
    const float* offset = OffsetsAt(m, row, col, count, centre, scale, offsets);
    if (scale != scales) std::memcpy(scales, scale, count * sizeof(float));
    if (offset != nullptr && offset != offsets) std::memcpy(offsets, offset, count * sizeof(float));
    for (float* floats : {scales, offsets}) std::memset(floats + count, 0, padding * sizeof(float));
    found.scales = RowOfNumbers(scales);
    found.offsets = RowOfNumbers(offsets);
    found.has_offsets = offset != nullptr;
    return found;
  }
};

// Prefetches the scales and offsets of a row of blocks, a little at a time while the row before it is multiplied.
struct ScalesAhead {
  const char* at[2] = {};
  const char* end[2] = {};

  ScalesAhead() = default;
  EFORMER_NOINLINE ScalesAhead(const Matrix& m, int64_t row, int64_t col, int64_t count) {
    if (row >= CeilDiv(m.rows, m.block)) return;
    for (int i = 0; i < 2; ++i) {
      const BlockNumbers& all = i == 0 ? m.scales : m.offsets;
      if (all.entries == nullptr) continue;
      const int64_t bytes = BytesOf(all.type);
      at[i] = static_cast<const char*>(all.entries) + (row * m.BlockScaleStride() + col) * bytes;
      end[i] = at[i] + count * bytes;
    }
  }

  // The next cache line of both.
  EFORMER_INLINE void Prefetch() {
    constexpr int64_t kCacheLine = 64;
    for (int i = 0; i < 2; ++i) {
      if (at[i] >= end[i]) continue;
      __builtin_prefetch(at[i], 0, 2);
      at[i] += kCacheLine;
    }
  }
};

}  // namespace eformer::EFORMER_ISA
