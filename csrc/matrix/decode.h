// From codes to values before their scale, a vector at a time: what the loops for floats are made of.
//
// "Along": the codes of neighbouring columns share a byte (packed_axis 1), or each has one. "Across": those of
// neighbouring rows do (packed_axis 0). A unit is the rows whose codes share bytes in all planes.
#pragma once

#include "matrix/unpack.h"

namespace eformer::EFORMER_ISA {

constexpr int kRunVectors = kRunValues / kLanes;

// The bits of codes in the planes before `plane`.
template <class Format>
constexpr int BitsBelow(int plane) {
  int bits = 0;
  for (int i = 0; i < plane; ++i) bits += Format::kPlaneBits[i];
  return bits;
}

// Where planes are read: each pointer is at the first code.
template <class Format>
using PlanePlaces = const uint8_t * [kPlanes<Format>];

// Whether rows of codes are decoded in the order of LanePlace, where each lane has four neighbouring codes of a run in
// its own bits of a word: all that is left to do for a vector is to shift. x, or the sums, have that order too.
template <class Format>
constexpr bool kReorders = kLanes == 16 && CodeBits<Format>() < 8;

constexpr int LanePlace(int vector, int lane) { return lane % 8 * 8 + lane / 8 * 4 + vector; }

// Where the code of a place is among those of its byte, counted from the lowest bits.
template <class Format, int kBits>
constexpr int PlaceInByte(int place) {
  return Format::kHighBitsFirst ? place ^ (8 / kBits - 1) : place;
}

// How far to shift each word for codes of kBits at the places first, first + 1, ... of it.
template <class Format, int kBits>
EFORMER_INLINE Words ShiftsOf(int (*place)(int lane)) {
  Words shifts;
  for (int i = 0; i < kLanes; ++i) {
    shifts[i] = static_cast<uint32_t>(kBits * PlaceInByte<Format, kBits>(place(i)));
  }
  return shifts;
}

// The bits that plane kPlane has of vector kVector of a run, above the bits of the planes before it. Higher bits are
// any.
template <class Format, int kVector, int kPlane>
EFORMER_INLINE Words WordsAlong(const uint8_t* run) {
  constexpr int kBits = Format::kPlaneBits[kPlane], kBelow = BitsBelow<Format>(kPlane);
  constexpr int kFirstBit = kVector * kLanes * kBits;
  const uint8_t* from = run + kFirstBit / 8;
  if constexpr (kBits == 8) {
    return LoadWords(from);
  } else {
    Words words;
    const Words shifts = ShiftsOf<Format, kBits>([](int lane) { return kFirstBit % 8 / kBits + lane % (32 / kBits); });
#if defined(EFORMER_AVX512)
    if constexpr (kBits == 4) {
      Words words_of;
      for (int i = 0; i < kLanes; ++i) words_of[i] = 2 * kVector + i / 8;
      const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run));
      words = (Words)_mm512_permutexvar_epi32((__m512i)words_of, _mm512_castsi256_si512(all));
    } else if constexpr (kBits == 2) {
      int32_t bits;
      std::memcpy(&bits, from, sizeof bits);
      words = (Words)_mm512_set1_epi32(bits);
    } else {
      int16_t bits;
      std::memcpy(&bits, from, sizeof bits);
      words = (Words)_mm512_set1_epi16(bits);
    }
    return RotateEach(words, shifts - kBelow);
#else
    constexpr int kBytes = kLanes * kBits < 8 ? 1 : kLanes * kBits / 8;
    uint32_t bits = 0;
    std::memcpy(&bits, from, kBytes);  // little-endian, as all that is compiled for
    words = ShiftEach(Words{} + bits, shifts);
    return kBelow > 0 ? words << kBelow : words;
#endif
  }
}

// words << -kBits for kBits < 0, else words >> kBits.
template <int kBits>
EFORMER_INLINE Words Shift(Words words) {
  if constexpr (kBits < 0) return words << -kBits;
  return kBits > 0 ? words >> (kBits > 0 ? kBits : 0) : words;
}

// The same for kLanes columns of row kRow of a unit. Rows of bytes are `stride` apart.
template <class Format, int kRow, int kPlane>
EFORMER_INLINE Words WordsAcross(const uint8_t* columns, int64_t stride) {
  constexpr int kBits = Format::kPlaneBits[kPlane], kPerByte = 8 / kBits, kPlace = kRow % kPerByte;
  constexpr int kShift = kBits * (Format::kHighBitsFirst ? kPerByte - 1 - kPlace : kPlace) - BitsBelow<Format>(kPlane);
  return Shift<kShift>(LoadWords(columns + kRow / kPerByte * stride));
}

// The bits that a plane has of a run, those of each lane from bit BitsBelow on, the rest is any.
template <class Format, int kPlane>
EFORMER_INLINE Words WordsInLanes(const uint8_t* run) {
  constexpr int kBits = Format::kPlaneBits[kPlane], kBelow = BitsBelow<Format>(kPlane);
  const Words shifts = ShiftsOf<Format, kBits>([](int lane) { return lane / 8 * 4; }) & ~(4u * kBits - 1);
  Words words;
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  if constexpr (kBits == 4) {
    words = (Words)_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(run)));
  } else if constexpr (kBits == 2) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run));
    words = (Words)_mm512_cvtepu16_epi32(_mm256_broadcastsi128_si256(eight));
  } else {
    int64_t eight;
    std::memcpy(&eight, run, sizeof eight);
    words = (Words)_mm512_cvtepu8_epi32(_mm_set1_epi64x(eight));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    uint32_t eight = 0;
    std::memcpy(&eight, run + i % 8 * kBits, kBits);
    words[i] = eight;
  }
#endif
  return RotateEach(words, shifts - kBelow);
}

// Codes joined from planes: `words_of` gives the bits of a plane, above those of the planes before it.
template <class Format, int kPlane = 0, class WordsOf>
EFORMER_INLINE Words JoinPlanes(const WordsOf& words_of) {
  const Words words = words_of(std::integral_constant<int, kPlane>());
  if constexpr (kPlane + 1 < kPlanes<Format>) {
    constexpr uint32_t kBelow = (1u << BitsBelow<Format>(kPlane + 1)) - 1;
    return Select(kBelow, words, JoinPlanes<Format, kPlane + 1>(words_of));
  } else {
    return words;
  }
}

// What turns codes of a format into values, less a centre.
template <class Format>
struct Decoder {
  static constexpr int kBits = CodeBits<Format>();
  static constexpr uint32_t kMask = (1u << kBits) - 1;
  static constexpr bool kHasStrips = !std::is_null_pointer_v<decltype(Format::Values)>;
  static constexpr bool kHasTable = kBits <= kMaxTableBits;
  // Integers are counted where a lookup takes several operations.
  static constexpr bool kLooksUp = kHasTable && !(Format::kIsInteger && kBits > 3 && kLanes == 8);

  // Whether a table is scaled in place of what it gives, for values that share a scale.
  static constexpr bool kScalesTable = kLooksUp && kLanes == 16;

  Table<kHasTable ? kBits : 1> table;
  float centre;

  Decoder() = default;
  explicit Decoder(const Matrix& m, float centre = Format::kCentre) : centre(centre) {
    (void)m;
    if constexpr (kHasTable) {
      float values[kMaxTable];
      for (int i = 0; i < kMaxTable; ++i) values[i] = ValueIn<Format>(m, i & kMask) - centre;
      table = decltype(table)(values);
    }
  }

  // The same codes with other values, as Table::Values has them.
  EFORMER_INLINE Decoder With(const Strip& values) const {
    Decoder changed = *this;
    changed.table.Set(values);
    return changed;
  }

  EFORMER_INLINE Vec Of(Words code) const {
    if constexpr (kLooksUp) {
      return table.LookUp(code);
    } else if constexpr (Format::kIsInteger) {
      return ToFloats(code, kMask, centre);
    } else {
      Vec found;
      for (int i = 0; i < kLanes; ++i) found[i] = Format::Value(static_cast<int>(code[i] & kMask)) - centre;
      return found;
    }
  }

  // The values of 64 bytes, one for each code.
  EFORMER_INLINE_DECODE void OfBytes(const uint8_t* codes, Strip (&values)[2]) const {
    for (int half = 0; half < 2; ++half, codes += kStripSize) {
      if constexpr (kHasStrips) {
        values[half] = Format::Values(codes);
      } else {
        for (int i = 0; i < kStripVecs; ++i) values[half].v[i] = Of(LoadWords(codes + i * kLanes));
      }
    }
  }

  // Half kHalf of a run of 64 columns of a row.
  template <int kHalf>
  EFORMER_INLINE_DECODE Strip Along(const PlanePlaces<Format>& run) const {
    if constexpr (kHasStrips) {
      return Format::Values(run[0] + kHalf * kStripSize);
    } else {
      Strip found;
      ForEach<kStripVecs>([&](auto i) EFORMER_INLINED {
        constexpr int kVector = kHalf * kStripVecs + i;
        found.v[i] = Of(JoinPlanes<Format>(
            [&](auto plane) EFORMER_INLINED { return WordsAlong<Format, kVector, plane>(run[plane]); }));
      });
      return found;
    }
  }

  // The same in the order of LanePlace, if the format kReorders.
  template <int kHalf>
  EFORMER_INLINE_DECODE Strip AlongInLanes(const PlanePlaces<Format>& run) const {
    if constexpr (kReorders<Format>) {
      Strip found;
      ForEach<kStripVecs>([&](auto i) EFORMER_INLINED {
        constexpr int kVector = kHalf * kStripVecs + i;
        found.v[i] = Of(JoinPlanes<Format>([&](auto plane) EFORMER_INLINED {
          constexpr int kBits = Format::kPlaneBits[plane];
          return Shift<kBits*(PlaceInByte<Format, kBits>(kVector) % 4)>(WordsInLanes<Format, plane>(run[plane]));
        }));
      });
      return found;
    }
    return Along<kHalf>(run);
  }

  // 32 columns of row kRow of a unit.
  template <int kRow>
  EFORMER_INLINE_DECODE Strip Across(const PlanePlaces<Format>& columns, int64_t stride) const {
    if constexpr (kHasStrips) {
      return Format::Values(columns[0] + kRow * stride);
    } else {
      Strip found;
      ForEach<kStripVecs>([&](auto i) EFORMER_INLINED {
        found.v[i] = Of(JoinPlanes<Format>([&](auto plane) EFORMER_INLINED {
          return WordsAcross<Format, kRow, plane>(columns[plane] + i * kLanes, stride);
        }));
      });
      return found;
    }
  }
};

// Puts a multiple of 64 floats into the order of LanePlace.
EFORMER_NOINLINE static void PutInLanes(const float* from, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kRunValues, from += kRunValues, to += kRunValues) {
#pragma GCC unroll 1
    for (int i = 0; i < kLanes; ++i) {
      for (int v = 0; v < kRunVectors; ++v) to[v * kLanes + i] = from[LanePlace(v, i)];
    }
  }
}

// The inverse.
EFORMER_NOINLINE static void TakeFromLanes(const float* from, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kRunValues, from += kRunValues, to += kRunValues) {
#pragma GCC unroll 1
    for (int i = 0; i < kLanes; ++i) {
      for (int v = 0; v < kRunVectors; ++v) to[LanePlace(v, i)] = from[v * kLanes + i];
    }
  }
}

// Points at the codes of a row from column `c` on, a multiple of 8.
template <class Format>
EFORMER_INLINE void PlacesAlong(const Matrix& m, int64_t row, int64_t c, PlanePlaces<Format>& places) {
  for (int plane = 0; plane < kPlanes<Format>; ++plane) {
    const int per_byte = 8 / Format::kPlaneBits[plane];
    places[plane] = m.planes[plane] + row * CeilDiv(m.cols, per_byte) + c / per_byte;
  }
}

// Points at the codes of a unit of rows from (row, c) on.
template <class Format>
EFORMER_INLINE void PlacesAcross(const Matrix& m, int64_t row, int64_t c, PlanePlaces<Format>& places) {
  for (int plane = 0; plane < kPlanes<Format>; ++plane) {
    places[plane] = m.planes[plane] + row / (8 / Format::kPlaneBits[plane]) * m.cols + c;
  }
}

// Codes copied, so that 64 columns of some rows can be read where the matrix has fewer: zeros are behind them.
template <class Format>
struct CopiedCodes {
  static constexpr int64_t kStride = kRunValues;
  // Of bytes: 8 in the first plane, and as many in each as hold the same rows of the matrix.
  static constexpr int MaxRows() {
    int rows = 8;
    for (int bits : Format::kPlaneBits)
      rows = 8 * bits > rows * Format::kPlaneBits[0] ? 8 * bits / Format::kPlaneBits[0] : rows;
    return rows;
  }
  static constexpr int kMaxRows = MaxRows();
  alignas(64) uint8_t all[kPlanes<Format>][kMaxRows][kStride] = {};
  PlanePlaces<Format> places;

  // Those of a row from column `c` on.
  void CopyAlong(const Matrix& m, int64_t row, int64_t c) {
    PlacesAlong<Format>(m, row, c, places);
    for (int plane = 0; plane < kPlanes<Format>; ++plane) {
      const int per_byte = 8 / Format::kPlaneBits[plane];
      std::memcpy(all[plane][0], places[plane], Min(CeilDiv(m.cols - c, per_byte), kRunValues / per_byte));
      places[plane] = all[plane][0];
    }
  }

  // Those of `rows` rows from (row, c) on, of `columns` columns.
  void CopyAcross(const Matrix& m, int64_t row, int64_t rows, int64_t c, int64_t columns) {
    PlacesAcross<Format>(m, row, c, places);
    for (int plane = 0; plane < kPlanes<Format>; ++plane) {
      const int per_byte = 8 / Format::kPlaneBits[plane];
      const int64_t left = CeilDiv(m.rows, per_byte) - row / per_byte;
      for (int64_t i = 0; i < Min(left, CeilDiv(rows, per_byte)); ++i) {
        std::memcpy(all[plane][i], places[plane] + i * m.cols, Min(columns, kStride));
      }
      places[plane] = all[plane][0];
    }
  }
};

}  // namespace eformer::EFORMER_ISA
