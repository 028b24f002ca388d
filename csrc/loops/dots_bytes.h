// One row of x as bytes times the transpose of a matrix: a dot product for each row of the matrix.
//
// Fields of a plane are multiplied where they lie, and x has the order of ByteOrder for it. A lane sums the products of
// four bytes, all of one block; the sums of the lanes are scaled and added as floats.
#pragma once

#include "loops/gemm_bytes.h"
#include "loops/x_bytes.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kSpan = 64;  // bytes of a row that are multiplied at a time; x is in ByteOrder with this span
constexpr int kSpanVectors = kSpan / kIntBytes;
constexpr int64_t kSpanLanes = kSpan / 4;

// The sum of each lane's four bytes.
EFORMER_INLINE Ints SumOfFours(Ints x) { return (x << 24 >> 24) + (x << 16 >> 24) + (x << 8 >> 24) + (x >> 24); }

template <class Format, int kParts>
struct DotsOfRows {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kFields = kPlanes<Format>;  // of a row
  static_assert(kFields == 1 || Int8Codes<Format>::FlippedBits() == 0, "bytes must be sums of fields");

  // Rows that share what is loaded of x. For whole bytes that is less than what a single stream gains.
#if defined(EFORMER_BYTE_DOTS)
  static constexpr int kSideBySide = Format::kPlaneBits[0] == 8 ? 1 : 4;
#else
  static constexpr int kSideBySide = 4;
#endif

  template <int kField>
  static constexpr int kPlaces = 8 / Format::kPlaneBits[kField];

  template <int kField>
  using Dots = std::conditional_t<kFields == 1, DotsOf<Format>, FieldDots<8 / kPlaces<kField>>>;

  // What a field is multiplied by.
  struct FieldX {
    int64_t row_bytes, spans;
    int64_t span_blocks;                      // of x
    const int8_t* values;                     // of x, in the order of the field
    float* steps;                             // of each lane, where blocks have no scales
    float unit;                               // what the integers of the field are multiplied by
    int32_t* corrections;                     // of each lane, for the bias: of the last part, and of those before it
    int64_t first_block[kSpanVectors];        // in a span, of each of its vectors
    int32_t places[kSpanVectors][kIntLanes];  // the block of each lane, from that one on
    uint8_t present[kSpan];                   // 255 for bytes of the last span that are in the row
    int32_t present_lanes[kSpanLanes];        // -1 for lanes that are
  };

  const Matrix& m;
  const ByteX& x;
  const int64_t blocks = CeilDiv(m.cols, x.order.block);
  const float centre = CentreOf<Format>(m);
  const int64_t lanes = CeilDiv(x.depth + 8 * kSpan, 64) * 16;  // at most, in a field
  Floats steps{kInBlocks ? blocks : kFields * lanes};
  Zeros<int32_t> corrections{2 * lanes};
  Zeros<int8_t> ordered{kFields > 1 ? kFields * kParts * 4 * lanes : 0};
  Floats x_sums{kInBlocks ? CeilDiv(m.cols, m.block) + kIntLanes : 0};  // of the blocks of the matrix
  FieldX fields[kFields];

  // Rows whose scales are read at once.
  const int64_t each = kInBlocks ? m.block / x.order.block : 1, count = kInBlocks ? m.BlockScaleStride() : 0;
  const int64_t rows_at_once = Max(4, 1024 / blocks / 4 * 4);
  Floats factors{kInBlocks ? rows_at_once * blocks + kIntLanes : 0};  // scales times steps, of the blocks of x
  Floats scales{kInBlocks ? rows_at_once * count + kIntLanes : 0};
  Floats offsets{kInBlocks ? rows_at_once * count + kIntLanes : 0};

  DotsOfRows(const Matrix& m, const ByteX& x) : m(m), x(x) {
    AddFields<0, 0>(ordered.values, steps.values);
    for (int64_t b = 0; b < blocks && kInBlocks; ++b) {
      steps.values[b] = x.steps[b] / Format::kInt8Steps;
      x_sums.values[b / each] += x.totals[b];
    }
  }

  // kBelow: the bits of codes in the fields before this one.
  template <int kField, int kBelow>
  void AddFields(int8_t* values, float* of_lanes) {
    constexpr int kEach = kPlaces<kField>;
    FieldX& field = fields[kField];
    field.row_bytes = CeilDiv(m.cols, kEach);
    field.spans = CeilDiv(field.row_bytes, kSpan);
    field.span_blocks = kSpan * kEach / x.order.block;
    field.values = x.values;
    if constexpr (kFields > 1) {  // x is in the order of unpacked codes
      for (int64_t k = 0; k < x.depth; k += 16) {
        for (int part = 0; part < kParts; ++part) {
          const int8_t* from = x.values + (k / kSpan * kParts + part) * kSpan + k % kSpan;
          PutSixteen<kEach, kSpan>(LoadVector<Sixteen>(from), k, part, kParts, values);
        }
      }
      field.values = values;
    }
    field.steps = of_lanes;
    field.unit = static_cast<float>(1 << kBelow);
    const int64_t block_lanes = x.order.block / (4 * kEach);
    for (int64_t b = 0; b < blocks && !kInBlocks; ++b) {
      const float step = x.steps[b] * (field.unit / Format::kInt8Steps);
      for (int64_t i = 0; i < block_lanes; ++i) field.steps[b * block_lanes + i] = step;
    }
    field.corrections = corrections.values;
    const int32_t bias = BiasOf<Format>(m);
    for (int64_t t = 0; kField == 0 && bias != 0 && t < field.spans; ++t) {
      for (int h = 0; h < kSpanVectors; ++h) {
        Ints sums[2] = {};
        for (int part = 0; part < kParts; ++part) {
          Ints& sum = sums[part + 1 < kParts];
          if (part == 1) sum <<= 8;
          for (int place = 0; place < kEach; ++place) sum += SumOfFours(FoursOfX(field, t * kEach + place, part, h));
        }
        int32_t* to = field.corrections + t * kSpanLanes + h * kIntLanes;
        for (int i = 0; i < 2; ++i) StoreVector(to + i * lanes, sums[i] * -bias);
      }
    }
    for (int h = 0; h < kSpanVectors; ++h) {
      field.first_block[h] = h * kIntBytes * kEach / x.order.block;
      for (int i = 0; i < kIntLanes; ++i) {
        field.places[h][i] =
            static_cast<int32_t>((h * kIntBytes + 4 * i) * kEach / x.order.block - field.first_block[h]);
      }
    }
    const int64_t present = field.row_bytes - (field.spans - 1) * kSpan;
    for (int i = 0; i < kSpan; ++i) field.present[i] = i < present ? 255 : 0;
    for (int i = 0; i < kSpanLanes; ++i) field.present_lanes[i] = 4 * i < present ? -1 : 0;
    if constexpr (kField + 1 < kFields) {
      const int64_t used = CeilDiv(x.depth, kSpan * kEach) * kSpanLanes;
      AddFields<kField + 1, kBelow + Format::kPlaneBits[kField]>(values + 4 * kEach * kParts * used, of_lanes + used);
    }
  }

  // Vector `h` of a part of x, of the place of a span whose number is `piece`.
  EFORMER_INLINE static Ints FoursOfX(const FieldX& field, int64_t piece, int part, int h) {
    return LoadVector<Ints>(field.values + (piece * kParts + part) * kSpan + h * kIntBytes);
  }

  // Reads the scales of rows `n` and following, and prefetches those of later rows; true if they have offsets.
  bool TakeScales(int64_t n, int64_t rows) const {
    const float* found = ScalesAt(m, n, 0, rows * count, scales.values);
    const float* added = OffsetsAt(m, n, 0, rows * count, centre, found, offsets.values);
    PrefetchScales(m, n + kDotScalesAhead * rows, 0, rows * count);
    // What is behind the last scale of the matrix.
    const int64_t unreadable = found != scales.values && n + rows == m.rows ? kIntLanes : 0;
    Ints halves;
    for (int i = 0; i < kIntLanes; ++i) halves[i] = i / 2;
    for (int64_t row = 0; row < rows; ++row, found += count) {
      float* at = factors.values + row * blocks;
      if (each == 1) {
        for (int64_t b = 0; b < blocks; ++b) at[b] = found[b] * steps.values[b];
      } else {
        int64_t b = 0;
        for (; each == 2 && b + kIntLanes + unreadable <= blocks; b += kIntLanes) {
          const Reals scale = PickReals(LoadVector<Reals>(found + b / 2), halves);
          StoreVector(at + b, scale * LoadVector<Reals>(steps.values + b));
        }
        for (int64_t i = b / each; b < blocks; ++i) {
          for (const int64_t end = Min(b + each, blocks); b < end; ++b) at[b] = found[i] * steps.values[b];
        }
      }
    }
    if (added != nullptr && added != offsets.values) {
      std::memcpy(offsets.values, added, rows * count * sizeof(float));
    }
    return added != nullptr;
  }

  // `first` plus the products of bytes, from place kPlace on, and a part of x, which starts at `fours`. An array of
  // what is loaded would be kept in memory, too.
  template <class Multiply, int kEach, int kPlace = 0>
  EFORMER_INLINE static typename Multiply::Sum AddPlaces(typename Multiply::Sum sum, IntBytes flipped,
                                                         const int8_t* fours) {
    const auto bytes = Multiply::Prepare(BytesAt<Format, kEach, kPlace>(flipped));
    sum = Multiply::Add(sum, bytes, LoadVector<Ints>(fours + kPlace * kParts * kSpan));
    if constexpr (kPlace + 1 < kEach) return AddPlaces<Multiply, kEach, kPlace + 1>(sum, flipped, fours);
    return sum;
  }

  template <class Multiply, int kEach>
  EFORMER_INLINE static Ints Dot(IntBytes flipped, const int8_t* fours, Ints first) {
    return Multiply::Finish(AddPlaces<Multiply, kEach>(Multiply::Start(first), flipped, fours), first);
  }

  // Adds span `t` of rows of codes; kLast: what is behind the end of the rows is left out.
  template <int kField, int kRows, bool kLast>
  EFORMER_INLINE void AddSpan(int64_t t, const uint8_t* const (&codes)[kRows], const float* factor,
                              Reals (&sums)[kRows], IntBytes (&nan)[kRows]) const {
    constexpr int kEach = kPlaces<kField>;
    typedef Dots<kField> Multiply;
    static_assert(Multiply::kMaxTerms >= kEach);
    const FieldX& field = fields[kField];
    for (int h = 0; h < kSpanVectors; ++h) {
      const int64_t lane = t * kSpanLanes + h * kIntLanes;
      const Ints places = LoadVector<Ints>(field.places[h]);
      const int32_t* corrections = field.corrections + lane;
      const Ints correction = kField == 0 ? LoadVector<Ints>(corrections) : Ints{};
      const Reals step = kInBlocks ? Reals{} : LoadVector<Reals>(field.steps + lane);
      const float* of_row = factor + field.first_block[h];
      const int8_t* fours = field.values + t * kEach * kParts * kSpan + h * kIntBytes;
      for (int r = 0; r < kRows; ++r) {
        IntBytes packed = LoadVector<IntBytes>(codes[r] + h * kIntBytes);
        if constexpr (kLast) packed &= LoadVector<IntBytes>(field.present + h * kIntBytes);
#if defined(EFORMER_BYTE_DOTS)
        asm("" : "+v"(packed));  // GCC would load them for each place
#endif
        const IntBytes flipped = FlipPacked<Format, kEach>(packed);
        if constexpr (Int8Codes<Format>::kHasNaN) nan[r] |= flipped & ShiftDown(flipped, 1);
        Reals found = ToReals(Dot<Multiply, kEach>(flipped, fours + (kParts - 1) * kSpan, correction));
        if constexpr (kParts > 1) {
          const Ints first = Dot<Multiply, kEach>(flipped, fours, Ints{}) << 8;
          const Ints upper =
              Dot<Multiply, kEach>(flipped, fours + kSpan, first + LoadVector<Ints>(corrections + lanes));
          found += ToReals(upper) * kPartUnits[1];
        }
        Reals scale = step;
        if constexpr (kInBlocks) {
          scale = PickFirst<kIntBytes * kEach / 16>(of_row, places);
          of_row += blocks;
          if constexpr (kLast) {
            scale = (Reals)((Ints)scale & LoadVector<Ints>(field.present_lanes + h * kIntLanes));
          }
        }
        sums[r] += found * scale;
      }
    }
  }

  // A copy of a span of a row, with zeros behind the row.
  template <int kField>
  const uint8_t* CopySpan(int64_t row, int64_t span, uint8_t (&copy)[kSpan]) const {
    const int64_t row_bytes = fields[kField].row_bytes;
    std::memset(copy, 0, kSpan);
    std::memcpy(copy, m.planes[kField] + row * row_bytes + span * kSpan, row_bytes - span * kSpan);
    return copy;
  }

  template <int kRows>
  struct Found {
    Reals sums[kRows] = {};
    IntBytes nan[kRows] = {};
  };

  // What the last span adds, if it is not whole. On its own, because the copies are calls: registers that must survive
  // them would be kept in memory in the loop, too.
  template <int kField, int kRows>
  EFORMER_NOINLINE Found<kRows> LastSpan(int64_t n, const float* factor) const {
    const FieldX& field = fields[kField];
    const int64_t row_bytes = field.row_bytes, last = field.spans - 1;
    const bool is_readable = (n + kRows - 1) * row_bytes + field.spans * kSpan <= m.rows * row_bytes;
    const uint8_t* codes[kRows];
    alignas(64) uint8_t copies[kRows][kSpan];
    for (int r = 0; r < kRows; ++r) {
      codes[r] = is_readable ? m.planes[kField] + (n + r) * row_bytes + last * kSpan
                             : CopySpan<kField>(n + r, last, copies[r]);
    }
    Found<kRows> found;
    AddSpan<kField, kRows, true>(last, codes, factor + last * field.span_blocks, found.sums, found.nan);
    return found;
  }

  // Adds rows `n` and following. While they are read, those behind them are prefetched from end to end: of rows side by
  // side, memory gives less.
  template <int kRows, int kField = 0>
  EFORMER_INLINE void AddRows(int64_t n, const float* factor, Reals (&sums)[kRows], IntBytes (&nan)[kRows]) const {
    const FieldX& field = fields[kField];
    const int64_t row_bytes = field.row_bytes, whole = row_bytes / kSpan;
    const uint8_t* codes[kRows];
    for (int r = 0; r < kRows; ++r) codes[r] = m.planes[kField] + (n + r) * row_bytes;
    const int64_t distance = Max(kRows * row_bytes, kDotBytesAhead);
    const uint8_t* ahead = m.planes[kField] + n * row_bytes + distance;
    for (int64_t t = 0; t < whole; ++t, ahead += kRows * kSpan) {
      for (int r = 0; r < kRows; ++r) {
        distance <= kDotMostAhead ? __builtin_prefetch(ahead + r * kSpan, 0, 0)
                                  : __builtin_prefetch(ahead + r * kSpan, 0, 2);
      }
      AddSpan<kField, kRows, false>(t, codes, factor + t * field.span_blocks, sums, nan);
      for (int r = 0; r < kRows; ++r) codes[r] += kSpan;
    }
    if (whole < field.spans) {
      const Found<kRows> last = LastSpan<kField, kRows>(n, factor);
      for (int r = 0; r < kRows; ++r) sums[r] += last.sums[r], nan[r] |= last.nan[r];
    }
    if constexpr (kField + 1 < kFields) {
      Reals others[kRows] = {};
      AddRows<kRows, kField + 1>(n, factor, others, nan);
      for (int r = 0; r < kRows; ++r) sums[r] += others[r] * fields[kField + 1].unit;
    }
  }

  // The dot products of kRows rows from `n` on, whose scales start at row `taken` of those read.
  template <int kRows>
  void Run(int64_t n, int64_t taken, bool has_offsets, float* y) const {
    Reals sums[kRows] = {};
    IntBytes nan[kRows] = {};
    if (has_offsets) {
      for (int64_t b = 0; b < count; b += kIntLanes) {
        const Reals x_sum = LoadVector<Reals>(x_sums.values + b);
        const Ints present = FirstLanes(count - b);
        for (int r = 0; r < kRows; ++r) {
          const Ints offset = LoadVector<Ints>(offsets.values + (taken + r) * count + b);
          sums[r] += (Reals)(offset & present) * x_sum;
        }
      }
    }
    AddRows<kRows>(n, factors.values + taken * blocks, sums, nan);
    AddUp(sums, y + n);
    for (int r = 0; r < kRows && Int8Codes<Format>::kHasNaN; ++r) {
      uint64_t bits[kIntBytes / 8], any = 0;
      StoreVector(bits, nan[r] & static_cast<uint8_t>(0x55));
      for (uint64_t some : bits) any |= some;
      if (any != 0) y[n + r] = __builtin_nanf("");
    }
  }

  void RunAll(int64_t n0, int64_t n1, float* y) const {
    for (int64_t start = n0; start < n1; start += rows_at_once) {
      const int64_t rows = Min(rows_at_once, n1 - start);
      bool has_offsets = false;
      if constexpr (kInBlocks) has_offsets = TakeScales(start, rows);
      int64_t r = 0;
      for (; r + kSideBySide <= rows; r += kSideBySide) Run<kSideBySide>(start + r, r, has_offsets, y);
      for (; r < rows; ++r) Run<1>(start + r, r, has_offsets, y);
    }
  }
};

// As Kernels::byte_dots says.
template <class Format>
static void ByteDotsOf(const Matrix& m, const ByteX& x, int64_t n0, int64_t n1, float* y) {
  WithParts<Format>(x, [&](auto parts) {
    if constexpr (parts == 1 || kSplitsRows) DotsOfRows<Format, parts>(m, x).RunAll(n0, n1, y);
  });
}

template <class Format>
constexpr decltype(Kernels::byte_dots) ByteDotsOrNull() {
  if constexpr (Format::kInt8Steps > 0) {
    return ByteDotsOf<Format>;
  } else {
    return nullptr;
  }
}

}  // namespace eformer::EFORMER_ISA
