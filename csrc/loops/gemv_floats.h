// One row of float x times a matrix, x @ q: rows of codes are read side by side, and the sums of a slice of columns
// wait in L1. Where blocks run along the sum, their values are summed before they are scaled.
#pragma once

#include "matrix/decode_rows.h"

namespace eformer::EFORMER_ISA {

EFORMER_NOINLINE static float SumOf(const float* x, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  return sum;
}

// A line of columns: one cache line of bytes where there are registers for its sums.
constexpr int64_t kGemvColumns = kLanes == 8 ? kStripSize : kRunValues;
constexpr int kGemvStrips = kGemvColumns / kStripSize;

// Sums of `kGemvColumns` columns.
struct Line {
  Strip v[kGemvStrips];

  EFORMER_INLINE static Line From(const float* sums) {
    Line line;
    for (int i = 0; i < kGemvStrips; ++i) line.v[i] = LoadStrip(sums + i * kStripSize);
    return line;
  }
  EFORMER_INLINE void To(float* sums) const {
    for (int i = 0; i < kGemvStrips; ++i) StoreStrip(sums + i * kStripSize, v[i]);
  }
};

// For codes packed along the rows, or along neither axis.
template <class Format>
struct GemvAcross {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kUnit = UnitRows<Format>();
  // Rows whose codes are read side by side: 8 rows of bytes, or 4 if each byte is a value. With 8 more in the same set
  // of L1, there is no room.
  static constexpr int64_t kGroup = (kValuesPerByte<Format> == 1 ? 4 : 8) * kValuesPerByte<Format>;
  // Two codes of two bits are looked up at once, in a table of what they add for two values of x.
  static constexpr bool kPairs = kLanes == 16 && kPlanes<Format> == 1 && Format::kPlaneBits[0] == 2;

  const Matrix m;
  const float* const x;
  const Decoder<Format> decoder;
  alignas(64) float pairs[kPairs ? kGroup / 2 : 1][16];
  alignas(64) float block_sums[kSliceColumns + kGemvColumns];

  GemvAcross(const Matrix& m, const float* x) : m(m), x(x), decoder(m) {}

  // Some rows of a block.
  struct Group {
    int64_t row, units;
    bool starts, ends;  // the block
    const RowOfScales* scales;
    float x_sum;  // of the block
  };

  // `sums` are zero at first, with room for a line behind them.
  void Run(int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* sums) {
    ScaleBuffers buffers;
    for (int64_t k = k0, end; k < k1; k = end) {
      end = kInBlocks ? Min(k1, (k / m.block + 1) * m.block) : k1;
      RowOfScales scales;
      if constexpr (kInBlocks) scales = buffers.Take(m, k / m.block, n0, n1 - n0, Format::kCentre);
      const float x_sum = scales.has_offsets ? SumOf(x + k, end - k) : 0;
      ScalesAhead scales_ahead;
      if constexpr (kInBlocks) scales_ahead = ScalesAhead(m, k / m.block + 1, n0, n1 - n0);
      for (int64_t row = k; row < end; row += kGroup) {
        const int64_t rows = Min(kGroup, end - row);
        const bool ends = kInBlocks && row + rows == end;
        AddGroup({row, CeilDiv(rows, kUnit), row == k, ends, &scales, x_sum}, n0, n1, scales_ahead, sums);
      }
    }
  }

 private:
  void AddGroup(const Group& group, int64_t n0, int64_t n1, ScalesAhead& scales_ahead, float* sums) {
    if constexpr (kPairs) MakePairs(x + group.row, group.units * kUnit);
    const int64_t width = n1 - n0;
    PlanePlaces<Format> next;
    PlacesAcross<Format>(m, group.row + kGroup, n0, next);
    LinesAhead ahead[kPlanes<Format>];
    for (int plane = 0; plane < kPlanes<Format>; ++plane) ahead[plane] = LinesAhead(next[plane], m.cols, width);
    ScalesAhead of_scales = scales_ahead;
    int64_t n = 0;
    const bool is_whole = group.row + group.units * kUnit <= m.rows, is_full = group.units == kGroup / kUnit;
    for (; n + kGemvColumns <= width && is_whole; n += kGemvColumns) {
      if (kGemvColumns == 64 || n % 64 == 0) {
        ForEach<kPlanes<Format>>([&](auto plane) EFORMER_INLINED {
          ahead[plane].template Prefetch<kGroup * Format::kPlaneBits[plane] / 8>();
        });
      }
      of_scales.Prefetch();
      PlanePlaces<Format> places;
      PlacesAcross<Format>(m, group.row, n0 + n, places);
      is_full ? AddLine<true>(group, places, m.cols, n, sums) : AddLine<false>(group, places, m.cols, n, sums);
    }
    for (; n < width; n += kGemvColumns) {
      AddLastLine(group, n0 + n, Min(kGemvColumns, width - n), n, sums);
    }
    scales_ahead = of_scales;
  }

  EFORMER_NOINLINE void AddLastLine(const Group& group, int64_t c, int64_t present, int64_t n, float* sums) {
    CopiedCodes<Format> copied;
    copied.CopyAcross(m, group.row, group.units * kUnit, c, present);
    AddLine<false>(group, copied.places, copied.kStride, n, sums);
  }

  void MakePairs(const float* xs, int64_t count) {
    float values[4];
    for (int i = 0; i < 4; ++i) values[i] = ValueIn<Format>(m, i) - Format::kCentre;
    float low[16], high[16];
    for (int i = 0; i < 16; ++i) low[i] = values[i % 4], high[i] = values[i / 4];
    for (int64_t i = 0; i < count; i += 2) {
      for (int j = 0; j < 16; j += kLanes) {
        Store(pairs[i / 2] + j, Load(low + j) * Spread(xs[i]) + Load(high + j) * Spread(xs[i + 1]));
      }
    }
  }

  // kFull: the group has as many rows as there can be.
  template <bool kFull>
  EFORMER_INLINE void AddLine(const Group& group, PlanePlaces<Format>& places, int64_t stride, int64_t n, float* sums) {
    float* const held = kInBlocks ? block_sums : sums;
    Line line = kInBlocks && group.starts ? Line{} : Line::From(held + n);
    const float* xs = x + group.row;
    const Decoder<Format> local = decoder;
    const auto add_unit = [&](int64_t u) EFORMER_INLINED {
#pragma GCC unroll 2
      for (int i = 0; i < kGemvStrips; ++i) {
        PlanePlaces<Format> at;
        for (int plane = 0; plane < kPlanes<Format>; ++plane) {
          at[plane] = places[plane] + u * (kUnit * Format::kPlaneBits[plane] / 8) * stride + i * kStripSize;
        }
        if constexpr (kPairs) {
          AddPairs(at[0], u, line.v[i]);
        } else {
          ForEach<kUnit>([&](auto row) EFORMER_INLINED {
            AddProduct(line.v[i], local.template Across<row>(at, stride), Spread(xs[u * kUnit + row]));
          });
        }
      }
    };
    if constexpr (kFull && kUnit < 8) {  // more would not fit into registers
      ForEach<kGroup / kUnit>([&](auto u) EFORMER_INLINED { add_unit(u); });
    } else {
      for (int64_t u = 0; u < group.units; ++u) add_unit(u);
    }
    if (!group.ends) return line.To(held + n);
    const RowOfScales& scales = *group.scales;
#pragma GCC unroll 8
    for (int i = 0; i < kGemvStrips * kStripVecs; ++i) {
      const int64_t at = n + i * kLanes;
      const Vec scale = scales.template Scale<Vec>(at);
      Vec total = Load(sums + at) + line.v[i / kStripVecs].v[i % kStripVecs] * scale;
      if (scales.has_offsets) total += scales.template Offset<Vec>(at, scale) * group.x_sum;
      Store(sums + at, total);
    }
  }

  EFORMER_INLINE void AddPairs(const uint8_t* at, int64_t unit, Strip& sum) const {
#if defined(EFORMER_AVX512)
    const Vec first = Load(pairs[2 * unit]), second = Load(pairs[2 * unit + 1]);
    constexpr int kFirst = Format::kHighBitsFirst ? 4 : 0;
    for (int i = 0; i < kStripVecs; ++i) {
      const Words words = LoadWords(at + i * kLanes);
      sum.v[i] += (Vec)_mm512_permutexvar_ps((__m512i)(words >> kFirst), (__m512)first);
      sum.v[i] += (Vec)_mm512_permutexvar_ps((__m512i)(words >> (4 - kFirst)), (__m512)second);
    }
#else
    (void)at, (void)unit, (void)sum;
#endif
  }
};

EFORMER_NOINLINE static void ScaleByBlocks(float x, const float* scales, int64_t blocks, float* to) {
  for (int64_t b = 0; b < blocks; ++b) to[b] = scales[b] * x;
}

// Adds what x times values less `centre` lacks in each block. `factors` are scales times x, `stored` are offsets or
// zeros.
EFORMER_NOINLINE static void AddOffsets(const Matrix& m, float x, const float* factors, const float* stored,
                                        int64_t blocks, float centre, float* added) {
  if (stored == nullptr) {
    for (int64_t b = 0; b < blocks; ++b) added[b] += factors[b] * (centre - m.centre);
  } else if (m.offsets_are_zeros) {
    for (int64_t b = 0; b < blocks; ++b) added[b] += factors[b] * (centre - stored[b]);
  } else {
    for (int64_t b = 0; b < blocks; ++b) added[b] += factors[b] * centre + stored[b] * x;
  }
}

// For codes packed along the columns: each row of them has scales of its own, which multiply x.
template <class Format>
struct GemvAlong {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int64_t kRows = 8;          // that are read side by side
  static constexpr int64_t kRead = 4 * kRows;  // whose scales are read at once

  // How scales lie in the vectors of a run of 64 columns.
  enum Kind {
    kRuns,     // all share one, or there are none
    kInLanes,  // all vectors alike, in the order of LanePlace
    kEach      // one or several for each vector
  };

  const Matrix m;
  const float* const x;
  const Decoder<Format> decoder;
  const int64_t n0, n1, first, blocks, stride;
  const Kind kind;
  RowsOfNumbers scales, offsets;
  Floats factors, added;          // scales of rows times x; offsets times x, summed for each block
  const Zeros<int32_t> block_of;  // of each vector of columns
  Places places;                  // the blocks of the lanes of a vector, or of all vectors, from the first one on

  GemvAlong(const Matrix& m, const float* x, int64_t n0, int64_t n1)
      : m(m),
        x(x),
        decoder(m),
        n0(n0),
        n1(n1),
        first(kInBlocks ? n0 / m.block : 0),
        blocks(kInBlocks ? CeilDiv(n1, m.block) - first : 1),
        stride(blocks + kLanes),
        kind(KindOf(m)),
        scales(this->m, this->m.scales, n0, n1, kRead),
        offsets(this->m, this->m.offsets, n0, n1, kRead),
        factors(kRead * stride),
        added(stride),
        block_of(CeilDiv(n1 - n0, kLanes) + kRunVectors) {
    for (int i = 0; i < kLanes; ++i) {
      places[i] = kInBlocks ? static_cast<int32_t>((kind == kInLanes ? LanePlace(0, i) : i) / m.block) : 0;
    }
    for (int64_t i = 0; kInBlocks && i * kLanes < n1 - n0; ++i) {
      block_of.values[i] = static_cast<int32_t>((n0 + i * kLanes) / m.block - first);
    }
  }

  static Kind KindOf(const Matrix& m) {
    if (!kInBlocks || m.block % kRunValues == 0) return kRuns;
    if (kReorders<Format> && kRunValues % m.block == 0 && m.block % 4 == 0) return kInLanes;
    return kEach;
  }

  // `sums` are zero at first, with room for a run behind them.
  void Run(int64_t k0, int64_t k1, float* sums) {
    const bool has_offsets = HasOffsets<Format>(m), in_lanes = kReorders<Format> && (kind == kRuns || kind == kInLanes);
    const int64_t width = n1 - n0;
    for (int64_t k = k0; k < k1; k += kRead) {
      const int64_t count = Min(kRead, k1 - k);
      MakeFactors(k, count, has_offsets);
      for (int64_t row = 0; row < count; row += kRows) AddRows(k + row, Min(kRows, count - row), row, sums);
    }
    for (int64_t n = 0; n < width && in_lanes; n += kRunValues) {
      float natural[kRunValues];
      TakeFromLanes(sums + n, kRunValues, natural);
      std::memcpy(sums + n, natural, sizeof natural);
    }
    for (int64_t n = 0; has_offsets && n < width; ++n) sums[n] += added.values[(n0 + n) / m.block - first];
  }

 private:
  void MakeFactors(int64_t k, int64_t count, bool has_offsets) {
    scales.Take(k, count);
    offsets.Take(k, count);
    for (int64_t r = 0; r < count; ++r) {
      float* to = factors.values + r * stride;
      if constexpr (kInBlocks) {
        const float* offset = m.offsets.entries != nullptr ? offsets.Row(r) : nullptr;
        ScaleByBlocks(x[k + r], scales.Row(r), blocks, to);
        if (has_offsets) AddOffsets(m, x[k + r], to, offset, blocks, Format::kCentre, added.values);
      } else {
        *to = x[k + r];
      }
    }
  }

  void AddRows(int64_t k, int64_t count, int64_t row, float* sums) const {
    if constexpr (kInBlocks) {
      if (kind == kEach) return AddRowsOf<kEach>(k, count, row, sums);
      if constexpr (kReorders<Format>) {
        if (kind == kInLanes) return AddRowsOf<kInLanes>(k, count, row, sums);
      }
    }
    AddRowsOf<kRuns>(k, count, row, sums);
  }

  template <Kind kKind>
  void AddRowsOf(int64_t k, int64_t count, int64_t row, float* sums) const {
    const int64_t row_bytes = m.RowBytes(kValuesPerByte<Format>), width = n1 - n0;
    constexpr int64_t kRunBytes = kRunValues / kValuesPerByte<Format>;
    PlanePlaces<Format> at;
    PlacesAlong<Format>(m, k, n0, at);
    LinesAhead ahead(at[0] + kRows * row_bytes, row_bytes, CeilDiv(width, kValuesPerByte<Format>));
    int64_t n = 0;
    for (; n + kRunValues <= width; n += kRunValues) {
      ahead.template Prefetch<kRows * kRunBytes / 64>();
      count == kRows ? AddRun<kKind>(at, kRows, row, n, sums) : AddRun<kKind>(at, count, row, n, sums);
    }
    for (int64_t r = 0; r < count && n < width; ++r) {
      CopiedCodes<Format> copied;
      copied.CopyAlong(m, k + r, n0 + n);
      for (int plane = 0; plane < kPlanes<Format>; ++plane) copied.places[plane] -= n / (8 / Format::kPlaneBits[plane]);
      AddRun<kKind>(copied.places, 1, row + r, n, sums);
    }
  }

  template <Kind kKind>
  EFORMER_INLINE void AddRun(const PlanePlaces<Format>& first_row, int64_t count, int64_t row, int64_t n,
                             float* sums) const {
    PlanePlaces<Format> at;
    for (int plane = 0; plane < kPlanes<Format>; ++plane) {
      at[plane] = first_row[plane] + n / (8 / Format::kPlaneBits[plane]);
    }
    const int32_t* block = block_of.values + n / kLanes;
    const Decoder<Format> local = decoder;
    const Places of_lanes = places;
    const float* factor = factors.values + row * stride;
    Strip found[2] = {LoadStrip(sums + n), LoadStrip(sums + n + kStripSize)};
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r, factor += stride) {
      Vec shared{};
      if constexpr (kKind == kRuns) shared = Spread(factor[*block]);
      if constexpr (kKind == kInLanes) shared = Pick(Load(factor + *block), of_lanes);
      ForEach<2>([&](auto half) EFORMER_INLINED {
        const Strip values = kKind == kEach ? local.template Along<half>(at) : local.template AlongInLanes<half>(at);
        for (int i = 0; i < kStripVecs; ++i) {
          Vec each = shared;
          if constexpr (kKind == kEach) each = Pick(Load(factor + block[half * kStripVecs + i]), of_lanes);
          found[half].v[i] += values.v[i] * each;
        }
      });
      for (int plane = 0; plane < kPlanes<Format>; ++plane) {
        at[plane] += CeilDiv(m.cols, 8 / Format::kPlaneBits[plane]);
      }
    }
    StoreStrip(sums + n, found[0]);
    StoreStrip(sums + n + kStripSize, found[1]);
  }
};

// As Kernels::gemv says.
template <class Format>
static void Gemv(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) float sums[kSliceColumns + kRunValues] = {};
  constexpr bool kIsAlike = Format::kScales == ScaleKind::kBroadcast && UnitRows<Format>() == 1;  // along both axes
  if (kIsAlike || m.packed_axis == 0) {
    GemvAcross<Format>(m, x).Run(k0, k1, n0, n1, sums);
  } else {
    GemvAlong<Format>(m, x, n0, n1).Run(k0, k1, sums);
  }
  std::memcpy(y, sums, (n1 - n0) * sizeof(float));
}

}  // namespace eformer::EFORMER_ISA
