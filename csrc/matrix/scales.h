// Scales and offsets of blocks, read as they are stored: in any type, perhaps under scales of their own.
//
// A block stands for scale * (value - zero), or for scale * value + offset. Loops that sum values before they scale
// them use ScalesAt and OffsetsAt; decode.h follows the order of roundings that `kernels/grouped.py` defines.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

EFORMER_INLINE float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Each reads one number. They have no branches, so that loops over them become vector instructions; and they make no
// float32 of the bits of a subnormal, which XLA's threads treat as 0.
struct ReadFloat32 {
  typedef float Stored;
  EFORMER_INLINE static float Of(float x) { return x; }
};

struct ReadBfloat16 {
  typedef uint16_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) { return FromBits(x << 16); }
};

struct ReadFloat16 {
  typedef uint16_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    const uint32_t size = x & 0x7fff, sign = (x & 0x8000) << 16;
    const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small);
    const uint32_t normal = (size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23);
    return FromBits((size < 0x400 ? small_bits : normal) | sign);
  }
};

struct ReadE8m0 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    return FromBits(x == 0 ? 0x00400000u : x == 255 ? 0x7fc00000u : x << 23);
  }
};

struct ReadE4m3 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(uint32_t x) {
    const uint32_t size = x & 0x7f, sign = (x & 0x80) << 24;
    const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
    uint32_t small_bits;
    std::memcpy(&small_bits, &small, sizeof small);
    const uint32_t normal = size == 0x7f ? 0x7fc00000u : (size << 20) + (120u << 23);
    return FromBits((size < 8 ? small_bits : normal) | sign);
  }
};

struct ReadUint8 {
  typedef uint8_t Stored;
  EFORMER_INLINE static float Of(int32_t x) { return static_cast<float>(x); }
};

struct ReadInt8 {
  typedef int8_t Stored;
  EFORMER_INLINE static float Of(int32_t x) { return static_cast<float>(x); }
};

// Converts kLanes numbers.
template <class Read>
EFORMER_INLINE void ReadLanes(const typename Read::Stored* from, float* floats) {
  for (int i = 0; i < kLanes; ++i) floats[i] = Read::Of(from[i]);
}

#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
template <>  // GCC 12 makes no vectors of these loops
EFORMER_INLINE void ReadLanes<ReadFloat16>(const uint16_t* from, float* floats) {
  _mm512_storeu_ps(floats, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
template <>
EFORMER_INLINE void ReadLanes<ReadBfloat16>(const uint16_t* from, float* floats) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  _mm512_storeu_si512(floats, _mm512_slli_epi32(words, 16));
}
template <>
EFORMER_INLINE void ReadLanes<ReadUint8>(const uint8_t* from, float* floats) {
  const __m512i ints = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm512_storeu_ps(floats, _mm512_cvtepi32_ps(ints));
}
template <>
EFORMER_INLINE void ReadLanes<ReadInt8>(const int8_t* from, float* floats) {
  const __m512i ints = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm512_storeu_ps(floats, _mm512_cvtepi32_ps(ints));
}
#elif defined(EFORMER_NEON)
template <>
EFORMER_INLINE void ReadLanes<ReadFloat16>(const uint16_t* from, float* floats) {
  vst1q_f32(floats, vcvt_f32_f16((float16x4_t)vld1_u16(from)));
}
#endif

// Converts `count` numbers, from the one at `start` on.
template <class Read>
EFORMER_INLINE void ReadNumbers(const void* numbers, int64_t start, int64_t count, float* floats) {
  const typename Read::Stored* from = static_cast<const typename Read::Stored*>(numbers) + start;
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    ReadLanes<Read>(from + i, floats + i);
  }
  for (int64_t i = whole; i < count; ++i) floats[i] = Read::Of(from[i]);
}

// The same for `rows` times `count` numbers, `stride` apart.
template <class Read>
EFORMER_INLINE void ReadNumbers(const void* numbers, int64_t start, int64_t stride, int64_t rows, int64_t count,
                                float* floats) {
  for (int64_t row = 0; row < rows; ++row) {
    ReadNumbers<Read>(numbers, start + row * stride, count, floats + row * count);
  }
}

EFORMER_NOINLINE static void ReadNumbers(Number type, const void* numbers, int64_t start, int64_t stride, int64_t rows,
                                         int64_t count, float* floats) {
  switch (type) {
    case Number::kFloat32:
      return ReadNumbers<ReadFloat32>(numbers, start, stride, rows, count, floats);
    case Number::kBfloat16:
      return ReadNumbers<ReadBfloat16>(numbers, start, stride, rows, count, floats);
    case Number::kFloat16:
      return ReadNumbers<ReadFloat16>(numbers, start, stride, rows, count, floats);
    case Number::kE8m0:
      return ReadNumbers<ReadE8m0>(numbers, start, stride, rows, count, floats);
    case Number::kE4m3:
      return ReadNumbers<ReadE4m3>(numbers, start, stride, rows, count, floats);
    case Number::kUint8:
      return ReadNumbers<ReadUint8>(numbers, start, stride, rows, count, floats);
    case Number::kInt8:
      return ReadNumbers<ReadInt8>(numbers, start, stride, rows, count, floats);
  }
}

// Multiplies entries of one row, from (row, col) on, by the factors that they share with their superblocks.
static inline void ScaleEntries(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col, int64_t count,
                                float* entries) {
  const int64_t first = (m.packed_axis == 0 ? row / all.per_factor : row) * all.factor_row_step;
  const int64_t shared = m.packed_axis == 0 ? 1 : all.per_factor;  // by neighbours
  constexpr int64_t kAtOnce = 64;
  float factors[kAtOnce];
  for (int64_t i = 0; i < count;) {
    const int64_t start = (col + i) / shared * all.factor_col_step;
    const int64_t left = all.factor_col_step == 0 ? count - i : CeilDiv(count - i + (col + i) % shared, shared);
    const int64_t some = all.factor_col_step == 0 ? 1 : Min(kAtOnce, left);
    ReadNumbers(all.factor_type, all.factors, first + start, 0, 1, some, factors);
    if (all.factor_col_step == 0) {
      for (; i < count; ++i) entries[i] *= factors[0];
    } else if (shared == 1) {
      for (int64_t j = 0; j < some; ++j) entries[i + j] *= factors[j];
      i += some;
    } else {
      for (int64_t j = 0; j < some; ++j) {
        const int64_t end = Min(count, ((col + i) / shared + 1) * shared - col);
        for (; i < end; ++i) entries[i] *= factors[j];
      }
    }
  }
}

// Reads entries of whole superblocks, whose factors are neighbours too, and multiplies them. kShared is how many
// entries share a factor.
template <class Read, int kShared>
EFORMER_NOINLINE static void ReadSuperblocks(const BlockNumbers& all, int64_t first, int64_t count, float* floats) {
  constexpr int64_t kAtOnce = 64;
  float factors[kAtOnce + kLanes];
  int32_t places[kLanes];
  for (int i = 0; i < kLanes; ++i) places[i] = i / kShared;
  const Places of_lanes = LoadPlaces(places);
  const typename Read::Stored* from = static_cast<const typename Read::Stored*>(all.entries) + first * kShared;
  for (int64_t f = 0; f < count; f += kAtOnce) {
    const int64_t some = Min(kAtOnce, count - f);
    std::memset(factors + some, 0, kLanes * sizeof(float));
    ReadNumbers(all.factor_type, all.factors, first + f, 0, 1, some, factors);
    int64_t i = 0;
    for (; i + kLanes <= some * kShared; i += kLanes, from += kLanes, floats += kLanes) {
      float found[kLanes];
      ReadLanes<Read>(from, found);
      const float* factor = factors + i / kShared;
      Store(floats, Load(found) * (kShared >= kLanes ? Spread(*factor) : Pick(Load(factor), of_lanes)));
    }
    for (; i < some * kShared; ++i) *floats++ = Read::Of(*from++) * factors[i / kShared];
  }
}

// The same from row `row` of entries on, if any number of them share a factor, the last ones of a row perhaps fewer.
template <class Read>
EFORMER_NOINLINE static void ReadSuperblocksOfRows(const BlockNumbers& all, int64_t row, int64_t stride, int64_t count,
                                                   float* floats) {
  const typename Read::Stored* from = static_cast<const typename Read::Stored*>(all.entries) + row * stride;
  constexpr int64_t kAtOnce = 64;
  float factors[kAtOnce];
  int64_t left = stride;  // in this row
  for (int64_t f = 0; f < count; f += kAtOnce) {
    const int64_t some = Min(kAtOnce, count - f);
    ReadNumbers(all.factor_type, all.factors, row * all.factor_row_step + f, 0, 1, some, factors);
    for (int64_t i = 0; i < some; ++i) {
      const int64_t shared = Min(all.per_factor, left);
      const Vec factor = Spread(factors[i]);
      int64_t j = 0;
      for (; j + kLanes <= shared; j += kLanes) {
        float found[kLanes];
        ReadLanes<Read>(from + j, found);
        Store(floats + j, Load(found) * factor);
      }
      for (; j < shared; ++j) floats[j] = Read::Of(from[j]) * factors[i];
      from += shared;
      floats += shared;
      left = left == shared ? stride : left - shared;
    }
  }
}

// Reads `count` entries that run on into the following rows, and multiplies them by their factors, if there is a loop
// that does both: for bytes that begin a row, in whole superblocks along the rows, or in whole rows.
template <class Read>
static inline bool ReadSuperblocks(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t count,
                                   float* floats) {
  const int64_t stride = m.BlockScaleStride(), superblocks = CeilDiv(stride, all.per_factor);
  if (all.factor_row_step != superblocks) return false;
  if (superblocks * all.per_factor != stride) {
    if (count % stride != 0) return false;
    ReadSuperblocksOfRows<Read>(all, row, stride, count / stride * superblocks, floats);
    return true;
  }
  if (count % all.per_factor != 0) return false;
  const int64_t first = row * superblocks, some = count / all.per_factor;
  if (all.per_factor == 8) {
    ReadSuperblocks<Read, 8>(all, first, some, floats);
  } else if (all.per_factor == 16) {
    ReadSuperblocks<Read, 16>(all, first, some, floats);
  } else {
    ReadSuperblocksOfRows<Read>(all, row, stride, some, floats);
  }
  return true;
}

static inline bool ReadSuperblocks(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col, int64_t count,
                                   float* floats) {
  if (m.packed_axis != 1 || col != 0 || count == 0) return false;
  if (all.type == Number::kUint8) return ReadSuperblocks<ReadUint8>(m, all, row, count, floats);
  return all.type == Number::kInt8 && ReadSuperblocks<ReadInt8>(m, all, row, count, floats);
}

// The same for entries that run on into the following rows.
EFORMER_NOINLINE static void ScaleAllEntries(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col,
                                             int64_t count, float* entries) {
  const int64_t stride = m.BlockScaleStride();
  for (; count > 0; ++row, col = 0) {
    const int64_t some = Min(count, stride - col);
    ScaleEntries(m, all, row, col, some, entries);
    entries += some;
    count -= some;
  }
}

// Reads entries that a table of 256 floats gives values to, times a factor for each kMappedBlock of them, plus a mean.
EFORMER_NOINLINE static void ReadMapped(const BlockNumbers& all, int64_t start, int64_t count, float* floats) {
  const uint8_t* codes = static_cast<const uint8_t*>(all.entries) + start;
  const float* factors = static_cast<const float*>(all.factors);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = Min(kLanes, count - i);
    float values[kLanes] = {}, factor[kLanes];
    for (int64_t j = 0; j < some; ++j) values[j] = all.map[codes[i + j]];
    const int64_t first = (start + i) / kMappedBlock, last = (start + i + some - 1) / kMappedBlock;
    for (int64_t j = 0; j < kLanes; ++j) factor[j] = factors[(start + i + j) / kMappedBlock <= first ? first : last];
    Strip found{};
    found.v[0] = Load(values) * Load(factor);
    Store(values, Rounded(found).v[0] + Spread(*all.mean));  // rounded twice, as the oracle does
    std::memcpy(floats + i, values, some * sizeof(float));
  }
}

// `count` neighbouring entries, as float32: in place if they are stored so, else in `buffer`. They may run on into the
// following rows.
static inline const float* NumbersAt(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t col, int64_t count,
                                     float* buffer) {
  const int64_t start = row * m.BlockScaleStride() + col;
  if (all.type == Number::kFloat32 && all.factors == nullptr) return static_cast<const float*>(all.entries) + start;
  if (all.map != nullptr) {
    ReadMapped(all, start, count, buffer);
    return buffer;
  }
  if (all.factors != nullptr && ReadSuperblocks(m, all, row, col, count, buffer)) return buffer;
  ReadNumbers(all.type, all.entries, start, 0, 1, count, buffer);
  if (all.factors != nullptr) ScaleAllEntries(m, all, row, col, count, buffer);
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
static inline void PrefetchScales(const Matrix& m, int64_t row, int64_t col, int64_t count) {
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

// What to add to scale * (value - centre), given `found`, the offsets or zeros of these blocks as they are stored.
static inline const float* OffsetsOf(const Matrix& m, int64_t count, float centre, const float* scales,
                                     const float* found, float* buffer) {
  if (m.offsets_are_zeros) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = scales[i] * (centre - found[i]);
    return buffer;
  }
  if (centre == 0) return found;
  for (int64_t i = 0; i < count; ++i) buffer[i] = found[i] + scales[i] * centre;
  return buffer;
}

// What to add to scale * (value - centre) for the same blocks, where `value` is that of the format's header and
// `scales` are from ScalesAt; nullptr if nothing.
static inline const float* OffsetsAt(const Matrix& m, int64_t row, int64_t col, int64_t count, float centre,
                                     const float* scales, float* buffer) {
  if (m.offsets.entries == nullptr) {
    if (centre == m.centre) return nullptr;
    for (int64_t i = 0; i < count; ++i) buffer[i] = scales[i] * (centre - m.centre);
    return buffer;
  }
  return OffsetsOf(m, count, centre, scales, NumbersAt(m, m.offsets, row, col, count, buffer), buffer);
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
    constexpr int kCount = sizeof(Vector) / sizeof(float);
    Vector found;
    if (is_narrow) {
      const uint16_t* from = static_cast<const uint16_t*>(entries) + i;
      float floats[kCount];
      if constexpr (kCount == kLanes) {
        ReadLanes<ReadBfloat16>(from, floats);
      } else {
        for (int j = 0; j < kCount; ++j) floats[j] = ReadBfloat16::Of(from[j]);
      }
      std::memcpy(&found, floats, sizeof found);
    } else {
      std::memcpy(&found, static_cast<const float*>(entries) + i, sizeof found);
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
  RowOfScales Take(const Matrix& m, int64_t row, int64_t col, int64_t count, float centre) {
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
  ScalesAhead(const Matrix& m, int64_t row, int64_t col, int64_t count) {
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

// Copies numbers of `count` neighbouring blocks in each of several rows, one row behind the other.
static inline void CopyNumbers(const Matrix& m, const BlockNumbers& all, int64_t row, int64_t rows, int64_t col,
                               int64_t count, float* to) {
  const int64_t stride = m.BlockScaleStride();
  for (int64_t i = 0; i < rows && all.map != nullptr; ++i) {
    ReadMapped(all, (row + i) * stride + col, count, to + i * count);
  }
  if (all.map != nullptr) return;
  ReadNumbers(all.type, all.entries, row * stride + col, stride, rows, count, to);
  for (int64_t i = 0; i < rows && all.factors != nullptr; ++i) {
    ScaleAllEntries(m, all, row + i, col, count, to + i * count);
  }
}

// The scales of `count` neighbouring blocks in each of several rows, one row behind the other, and what to add to
// scale * (value - centre); false if nothing.
static inline bool CopyScales(const Matrix& m, int64_t row, int64_t rows, int64_t col, int64_t count, float centre,
                              float* scales, float* offsets) {
  CopyNumbers(m, m.scales, row, rows, col, count, scales);
  if (m.offsets.entries != nullptr) {
    CopyNumbers(m, m.offsets, row, rows, col, count, offsets);
    OffsetsOf(m, rows * count, centre, scales, offsets, offsets);
    return true;
  }
  for (int64_t i = 0; i < rows * count; ++i) offsets[i] = scales[i] * (centre - m.centre);
  return centre != m.centre;
}

}  // namespace eformer::EFORMER_ISA
