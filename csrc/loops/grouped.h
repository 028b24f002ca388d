// Integers in blocks: what the formats uint2 to uint8 share. A code is its own value, before its block's scale.
//
// A block's sum of x * (scale * code + offset) is scale * (sum of x * code) + offset * (sum of x), and a code is the
// sum of its planes' fields times powers of two. So the loops for one row of x multiply fields where they lie
// (fields.h), and scales and offsets are applied to whole blocks. Such a sum begins with -kCentre * (sum of x), which
// keeps it near the sum of values, and ends after kMaxSummed rows: little of its precision is lost.
#pragma once

#include "loops/fallback.h"
#include "matrix/fields.h"
#include "matrix/grouped_panels.h"
#include "matrix/scales.h"
#include "loops/split_row.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kMaxSummed = 64;

// Whether x times any code is finite, with room for sums. Else codes of 0 would turn infinities into NaN.
static inline bool AreModerate(const float* x, int64_t count) {
  constexpr float kLargest = 0x1p100f;
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= x[i] <= kLargest && x[i] >= -kLargest;
  return all;
}

static inline float SumOf(const float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

// Adds a row of blocks: sums[n] += scale * block_sums[n] + offset * x_sum, where block_sums are of x * (code - centre).
static inline void AddBlockRow(const Matrix& m, int64_t block_row, int64_t n0, int64_t count, float centre, float x_sum,
                               const float* block_sums, float* sums) {
  constexpr int64_t kAtOnce = 256;
  float scale_buffer[kAtOnce], offset_buffer[kAtOnce];
  for (int64_t n = 0; n < count; n += kAtOnce) {
    const int64_t some = Min(kAtOnce, count - n);
    const float* scales = ScalesAt(m, block_row, n0 + n, some, scale_buffer);
    const float* offsets = OffsetsAt(m, block_row, n0 + n, some, centre, scales, offset_buffer);
    if (offsets == nullptr) {
      for (int64_t i = 0; i < some; ++i) sums[n + i] += scales[i] * block_sums[n + i];
    } else {
      for (int64_t i = 0; i < some; ++i) sums[n + i] += scales[i] * block_sums[n + i] + offsets[i] * x_sum;
    }
  }
}

// One row of x times rows of bytes: kPlaneBits rows of bytes hold eight rows of a plane.
template <class Format>
struct PackedRowsLoop {
  // What x is multiplied by for the fields of eight rows in both bytes of half a word, in each plane.
  typedef float Factors[kPlanes<Format>][8][2];

  static void MakeFactors(const float* x, Factors& factors) {
    for (int plane = 0, below = 0; plane < kPlanes<Format>; below += Format::kPlaneBits[plane], ++plane) {
      const int bits = Format::kPlaneBits[plane], per_byte = 8 / bits;
      for (int k = 0; k < 8; ++k) {
        const int first = bits * (k % per_byte);
        for (int byte = 0; byte < 2; ++byte) {
          factors[plane][k][byte] = x[k] * static_cast<float>(1 << below) * InversePower(first + 8 * byte);
        }
      }
    }
  }

  // Adds up to eight rows of the plane, for 4 * kLanes columns.
  template <int kPlane>
  EFORMER_INLINE static void AddPlane(const uint8_t* codes, int64_t stride, int64_t ahead, int rows,
                                      const Factors& factors, const PlaneMasks<Format>& all_masks, Vec (&sums)[4]) {
    constexpr int kBits = Format::kPlaneBits[kPlane], kPerByte = 8 / kBits;
    const auto& masks = all_masks.template Of<kPlane>();
    const float (*factor)[2] = factors[kPlane];
    for (int row = 0; row < rows; row += kPerByte, codes += stride, factor += kPerByte) {
      __builtin_prefetch(codes + ahead);
      const Halves words(LoadBits<4>(codes));
      ForEach<2 * kPerByte>([&](auto i) {
        constexpr int kByte = i / kPerByte;
        const Vec x = Spread(factor[i % kPerByte][kByte]);
        sums[kByte] += words.template Field<i>(masks) * x;
        sums[kByte + 2] += words.template Field<i + 2 * kPerByte>(masks) * x;
      });
    }
  }

  // Adds eight rows from `k` on, or those before `k1`, to sums in the order of StoreByBytes; they may start with
  // `first`.
  static void AddRows(const Matrix& m, const float* x, int64_t k, int64_t k1, int64_t n0, int64_t n1, bool starts,
                      float first, float* block_sums) {
    const PlaneMasks<Format> masks;
    Factors factors;
    MakeFactors(x + k, factors);
    const int rows = static_cast<int>(Min(8, k1 - k));
    for (int64_t n = n0; n < n1; n += kWordBytes) {
      float* at = block_sums + n - n0;
      Vec sums[4];
      for (int i = 0; i < 4; ++i) sums[i] = starts ? Spread(first) : Load(at + i * kLanes);
      if (n + kWordBytes <= n1) {
        ForEach<kPlanes<Format>>([&](auto plane) {
          constexpr int kBits = Format::kPlaneBits[plane];
          AddPlane<plane>(m.planes[plane] + k * kBits / 8 * m.cols + n, m.cols, kBits * m.cols, rows, factors, masks,
                          sums);
        });
      } else {
        ForEach<kPlanes<Format>>([&](auto plane) {
          constexpr int kBits = Format::kPlaneBits[plane];
          const uint8_t* from = m.planes[plane] + k * kBits / 8 * m.cols + n;
          uint8_t copy[8][kWordBytes] = {};
          for (int r = 0; r * (8 / kBits) < rows; ++r) std::memcpy(copy[r], from + r * m.cols, n1 - n);
          AddPlane<plane>(copy[0], kWordBytes, 0, rows, factors, masks, sums);
        });
      }
      for (int i = 0; i < 4; ++i) Store(at + i * kLanes, sums[i]);
    }
  }

  static void Run(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums) {
    alignas(64) float block_sums[kSliceColumns + kWordBytes];
    for (int64_t k = k0, end; k < k1; k = end) {
      end = Min(Min(k1, (k / m.block + 1) * m.block), k + kMaxSummed);
      const float x_sum = SumOf(x + k, end - k);
      for (int64_t r = k; r < end; r += 8) {
        AddRows(m, x, r, end, n0, n1, r == k, -Format::kCentre * x_sum, block_sums);
      }
      for (int64_t n = 0; n < n1 - n0; n += kWordBytes) {
        const Vec found[4] = {Load(block_sums + n), Load(block_sums + n + kLanes), Load(block_sums + n + 2 * kLanes),
                              Load(block_sums + n + 3 * kLanes)};
        StoreByBytes(block_sums + n, found);
      }
      AddBlockRow(m, k / m.block, n0, n1 - n0, Format::kCentre, x_sum, block_sums, sums);
    }
  }
};

// Dot products of x with rows whose codes lie side by side. A lane of a vector has the codes of kLaneValues neighbours.
template <class Format>
struct PackedColumnsLoop {
  static constexpr int kLaneValues = 32 / Format::kPlaneBits[0];
  static constexpr int64_t kGroup = kLaneValues * kLanes;  // values in a vector of words

  template <int kPlane>
  static constexpr int kLaneBytes = kLaneValues * Format::kPlaneBits[kPlane] / 8;

  static bool Fits(const Matrix& m) { return m.block % kLaneValues == 0; }

  const Matrix& m;
  int64_t groups, blocks;
  Floats ordered;  // x for each plane, group and field, in lanes
  Floats first;    // what the sums of each group start with
  Floats x_sums;   // of blocks
  int64_t rows_at_once;
  Floats scales;  // of these rows, with room for a vector behind them
  Floats offsets;

  PackedColumnsLoop(const Matrix& m, const float* x)
      : m(m),
        groups(CeilDiv(m.cols, kGroup)),
        blocks(CeilDiv(m.cols, m.block)),
        ordered(kPlanes<Format> * groups * kGroup),
        first(groups * kLanes),
        x_sums(blocks),
        rows_at_once(Max(1, 512 / blocks)),
        scales(rows_at_once * blocks + kLanes),
        offsets(rows_at_once * blocks) {
    for (int64_t b = 0; b < blocks; ++b) {
      x_sums.values[b] = SumOf(x + b * m.block, Min(m.block, m.cols - b * m.block));
    }
    for (int64_t g = 0; g < groups; ++g) Order(x + g * kGroup, Min(kGroup, m.cols - g * kGroup), g);
  }

  void Order(const float* x, int64_t present, int64_t group) {
    alignas(64) float lanes[kGroup], copy[kGroup] = {};
    if (present < kGroup) {
      std::memcpy(copy, x, present * sizeof(float));
      x = copy;
    }
    if constexpr (kLaneValues % 8 == 0 && kLanes % 8 == 0) {
      for (int lane = 0; lane < kLanes; lane += 8) {
        for (int i = 0; i < kLaneValues; i += 8) {
          Transpose8(x + lane * kLaneValues + i, kLaneValues, lanes + i * kLanes + lane, kLanes);
        }
      }
    } else {
      for (int i = 0; i < kGroup; ++i) lanes[i % kLaneValues * kLanes + i / kLaneValues] = x[i];
    }
    Vec sum{};
    for (int i = 0; i < kLaneValues; ++i) sum += Load(lanes + i * kLanes);
    Store(first.values + group * kLanes, sum * -Format::kCentre);
    for (int plane = 0, below = 0; plane < kPlanes<Format>; below += Format::kPlaneBits[plane], ++plane) {
      float* to = ordered.values + (plane * groups + group) * kGroup;
      for (int i = 0; i < kLaneValues; ++i) {
        const float factor = static_cast<float>(1 << below) * InversePower(Format::kPlaneBits[plane] * i % 16);
        Store(to + i * kLanes, Load(lanes + i * kLanes) * factor);
      }
    }
  }

  // The sum of x * (code - kCentre) in each lane of a group, whose codes are at the places of `codes`.
  EFORMER_INLINE Vec DotOf(const uint8_t* const (&codes)[kPlanes<Format>], int64_t group,
                           const PlaneMasks<Format>& masks) const {
    Vec sums[2] = {Load(first.values + group * kLanes), Vec{}};
    ForEach<kPlanes<Format>>([&](auto plane) {
      const float* x = ordered.values + (plane * groups + group) * kGroup;
      const Halves words(LoadBits<kLaneBytes<plane>>(codes[plane]));
      ForEach<kLaneValues>(
          [&](auto i) { sums[i % 2] += words.template Field<i>(masks.template Of<plane>()) * Load(x + i * kLanes); });
    });
    return sums[0] + sums[1];
  }

  // The dot products of rows n0 to n1. `scale_of(scales, group)` are the scales of its lanes.
  template <class ScaleOf>
  EFORMER_INLINE void Run(int64_t n0, int64_t n1, float* y, const ScaleOf& scale_of) {
    const PlaneMasks<Format> masks;
    for (int64_t n = n0; n < n1; n += rows_at_once) {
      const int64_t rows = Min(rows_at_once, n1 - n);
      const float* found = ScalesAt(m, n, 0, rows * blocks, scales.values);
      if (found != scales.values) std::memcpy(scales.values, found, rows * blocks * sizeof(float));
      const float* added = OffsetsAt(m, n, 0, rows * blocks, Format::kCentre, scales.values, offsets.values);
      for (int64_t i = 0; i < rows; ++i) {
        const float* of_row = scales.values + i * blocks;
        y[n + i] = DotOfRow(n + i, of_row, masks, [&](int64_t g) { return scale_of(of_row, g); });
        if (added != nullptr) y[n + i] += DotOfSums(added + i * blocks);
      }
    }
  }

  EFORMER_INLINE float DotOfSums(const float* of_blocks) const {
    Vec sum{};
    float rest = 0;
    int64_t b = 0;
    for (; b + kLanes <= blocks; b += kLanes) sum += Load(of_blocks + b) * Load(x_sums.values + b);
    for (; b < blocks; ++b) rest += of_blocks[b] * x_sums.values[b];
    return Sum(sum) + rest;
  }

  template <class ScaleOf>
  EFORMER_INLINE float DotOfRow(int64_t n, const float* of_row, const PlaneMasks<Format>& masks,
                                const ScaleOf& scale_of) const {
    constexpr int64_t kPrefetchBytes = 2048;  // ahead in the stream that is read
    const int64_t whole = m.cols / kGroup;
    const uint8_t* codes[kPlanes<Format>];
    ForEach<kPlanes<Format>>(
        [&](auto plane) { codes[plane] = m.planes[plane] + n * CeilDiv(m.cols, 8 / Format::kPlaneBits[plane]); });
    Vec sum{};
    for (int64_t g = 0; g < whole; ++g) {
      __builtin_prefetch(codes[0] + kPrefetchBytes);
      sum += DotOf(codes, g, masks) * scale_of(g);
      ForEach<kPlanes<Format>>([&](auto plane) { codes[plane] += kLaneBytes<plane> * kLanes; });
    }
    return whole < groups ? Sum(sum) + DotOfRest(codes, of_row) : Sum(sum);
  }

  // The last group, which is shorter than the others.
  float DotOfRest(const uint8_t* const (&codes)[kPlanes<Format>], const float* of_row) const {
    const int64_t group = groups - 1;
    const uint8_t* copied[kPlanes<Format>];
    uint8_t copies[kPlanes<Format>][kWordBytes] = {};
    ForEach<kPlanes<Format>>([&](auto plane) {
      std::memcpy(copies[plane], codes[plane], CeilDiv(m.cols - group * kGroup, 8 / Format::kPlaneBits[plane]));
      copied[plane] = copies[plane];
    });
    float lanes[kLanes], sum = 0;
    Store(lanes, DotOf(copied, group, PlaneMasks<Format>()));
    for (int64_t c = group * kGroup, lane = 0; c < m.cols; c += kLaneValues, ++lane) {
      sum += lanes[lane] * of_row[c / m.block];  // lanes behind the end are left out: a scale may be infinite
    }
    return sum;
  }

  void Run(int64_t n0, int64_t n1, float* y) {
    const int64_t block = m.block, per_block = block / kGroup, per_group = kGroup / block;
    if (block == kGroup) return Run(n0, n1, y, [](const float* scale, int64_t g) { return Spread(scale[g]); });
    if (block % kGroup == 0) {
      return Run(n0, n1, y, [&](const float* scale, int64_t g) { return Spread(scale[g / per_block]); });
    }
    int32_t places[kLanes];
    for (int i = 0; i < kLanes; ++i) places[i] = static_cast<int32_t>(i * kLaneValues / block);
    const Places of_lanes = LoadPlaces(places);
    if (kGroup % block == 0) {
      return Run(n0, n1, y, [&](const float* scale, int64_t g) { return Pick(Load(scale + g * per_group), of_lanes); });
    }
    Run(n0, n1, y, [&](const float* scale, int64_t g) {
      float found[kLanes];
      for (int i = 0; i < kLanes; ++i) found[i] = scale[(g * kGroup + i * kLaneValues) / block];
      return Load(found);
    });
  }
};

// One row of x times rows with two codes a byte, side by side. Even and odd columns are summed apart, in lane order
// until the end; offsets, times x, are summed for each block.
template <class Format>
static void RowByPairs(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums) {
  alignas(64) float halves[2][kSliceColumns / 2 + kStripSize] = {};
  const LoadedTable table = CentredTable<Format>();
  const int64_t row_bytes = m.RowBytes(2), bytes = (n1 - n0 + 1) / 2;
  const int64_t first = n0 / m.block, blocks = CeilDiv(n1, m.block) - first;
  constexpr int64_t kRead = 8 * kByteRows;  // rows whose scales are read at once
  const Floats added(blocks + kLanes), factors(kRead * blocks), offsets(kRead * blocks + kLanes);
  Matrix some = m;  // with the scales of these rows, times x
  some.rows = kRead;
  some.cols = n1 - n0;
  some.scale = factors.values;
  const ScalePlaces places(some, 0, bytes);
  for (int64_t start = k0, end; start < k1; start = end) {
    end = Min(start + kRead, k1);
    const bool has_offsets =
        CopyScales(m, start, end - start, first, blocks, Format::kCentre, factors.values, offsets.values);
    for (int64_t k = start; k < end; ++k) {
      for (int64_t b = 0; b < blocks; ++b) factors.values[(k - start) * blocks + b] *= x[k];
    }
    for (int64_t b = 0; b < blocks && has_offsets; b += kLanes) {
      Vec sum = Load(added.values + b);
      for (int64_t k = start; k < end; ++k) sum += Load(offsets.values + (k - start) * blocks + b) * Spread(x[k]);
      Store(added.values + b, sum);
    }
    WithScales(some, places, [&](const auto& scales) {
      for (int64_t k = start; k < end; k += kByteRows) {
        const int rows = static_cast<int>(Min(kByteRows, end - k));
        const uint8_t* codes = m.planes[0] + k * row_bytes + n0 / 2;
        ForEachStrip(codes, row_bytes, rows, bytes, [&](const uint8_t* from, int64_t stride, int64_t n) {
          Strip low = LoadStrip(halves[0] + n), high = LoadStrip(halves[1] + n);
          const auto of_strip = scales.Of(n);
          for (int r = 0; r < rows; ++r, from += stride) {
            PrefetchAfter(from, kByteRows * stride);
            const Bytes pairs = LoadBytes(from);
            const auto factor = of_strip.At(k - start + r);
            AddProduct(low, LookUpLow(table, pairs), factor);
            AddProduct(high, LookUpHigh(table, pairs), factor);
          }
          StoreStrip(halves[0] + n, low);
          StoreStrip(halves[1] + n, high);
        });
      }
    });
  }
  for (float* half : {halves[0], halves[1]}) {
    for (int64_t n = 0; n < bytes; n += kStripSize) StoreStrip(half + n, ToNatural(LoadStrip(half + n)));
  }
  for (int64_t n = 0; n < n1 - n0; ++n) sums[n] = halves[n % 2][n / 2];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t end = Min(n1, (first + b + 1) * m.block) - n0;
    for (int64_t n = Max(0, (first + b) * m.block - n0); n < end; ++n) sums[n] += added.values[b];
  }
}

// One row of x times rows whose codes lie side by side, for blocks of whole parts of 16 columns: the scales of a row
// are read at once.
template <class Format>
static void RowByPackedColumns(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                               float* sums) {
  constexpr int64_t kPart = 16;
  const LoadedTable table = TableOf<Format>();
  const int64_t first = n0 / m.block, blocks = CeilDiv(n1, m.block) - first;
  const Floats scale_buffer(blocks), offset_buffer(blocks);
  const Zeros<int32_t> block_of(CeilDiv(n1 - n0, kPart));
  for (int64_t i = 0; i < n1 - n0; i += kPart) {
    block_of.values[i / kPart] = static_cast<int32_t>((n0 + i) / m.block - first);
  }
  for (int64_t k = k0; k < k1; ++k) {
    const float* scales = ScalesAt(m, k, first, blocks, scale_buffer.values);
    const float* offsets = OffsetsAt(m, k, first, blocks, 0, scales, offset_buffer.values);
    for (int64_t n = n0; n < n1; n += kRunValues) {
      const int64_t present = Min(kRunValues, n1 - n);
      float values[kRunValues];
      Strip run[2];
      DecodeCodes<Format>(m, table, k, n, present, run);
      for (int i = 0; i < 2; ++i) StoreStrip(values + i * kStripSize, run[i]);
      for (int64_t i = 0; i < present; i += kPart) {
        const int32_t block = block_of.values[(n - n0 + i) / kPart];
        const Vec factor = Spread(scales[block] * x[k]), added = Spread(offsets != nullptr ? offsets[block] * x[k] : 0);
        for (int64_t j = i; j < i + kPart; j += kLanes) {
          float* sum = sums + n - n0 + j;
          Store(sum, Load(sum) + (Load(values + j) * factor + added));
        }
      }
    }
  }
}

#if defined(EFORMER_BYTE_DOTS)

// One row of x by bytes; false if it does not fit.
template <class Format>
static bool SplitRowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                           float* sums) {
  if (!Format::kSplitsX || m.packed_axis != 0 || m.block % 32 != 0) return false;
  if constexpr (Format::kSplitsX) {
    SplitPackedRows<Format> split(m, x, k0, k1);
    if (!split.fits) return false;
    ScaleBuffers buffers;
    for (int64_t k = k0, block = 0; k < k1; k += split.length, ++block) {
      split.AddBlock(block, n0, n1, buffers.Take(m, k / m.block, n0, n1 - n0, Format::kCentre), sums);
    }
  }
  return true;
}

template <class Format>
static bool SplitRowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
  if (!Format::kSplitsX || m.packed_axis != 1 || m.block % 32 != 0) return false;
  if constexpr (Format::kSplitsX) {
    const SplitPackedColumns<Format> split(m, x);
    if (!split.fits) return false;
    split.Run(n0, n1, y);
  }
  return true;
}

#endif

template <class Format, int kBits>
struct GroupedIntegers : FormatDefaults {
  static constexpr ScaleKind kScales = ScaleKind::kPerBlock;
  static constexpr float kCentre = 1 << (kBits - 1);
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return static_cast<float>(code); }

  typedef GroupedPanels<Format> Panels;

  static Strip Values(const uint8_t* codes) { return FromUint8(codes); }

  static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums) {
#if defined(EFORMER_BYTE_DOTS)
    if (SplitRowMatmul<Format>(m, x, k0, k1, n0, n1, sums)) return;
#endif
    if (m.block % (m.packed_axis == 0 ? 8 : 16) != 0 || !AreModerate(x + k0, k1 - k0)) {
      return DecodedRowMatmul<Format>(m, x, k0, k1, n0, n1, sums);
    }
    if (m.packed_axis == 0) return PackedRowsLoop<Format>::Run(m, x, k0, k1, n0, n1, sums);
    if constexpr (kHasPairs<Format>) {
      if (n0 % m.block == 0) return RowByPairs<Format>(m, x, k0, k1, n0, n1, sums);
    }
    RowByPackedColumns<Format>(m, x, k0, k1, n0, n1, sums);
  }

  static void RowMatmulTransposed(const Matrix& m, const float* x, int64_t n0, int64_t n1, float* y) {
    typedef PackedColumnsLoop<Format> Loop;
#if defined(EFORMER_BYTE_DOTS)
    if (SplitRowMatmulTransposed<Format>(m, x, n0, n1, y)) return;
#endif
    if (m.packed_axis == 0 || !Loop::Fits(m) || !AreModerate(x, m.cols)) {
      return DecodedRowMatmulTransposed<Format>(m, x, n0, n1, y);
    }
    Loop(m, x).Run(n0, n1, y);
  }
};

}  // namespace eformer::EFORMER_ISA
