// Panels of integers in blocks. Scales and offsets are read once for many values, as DecodedPanels does not.
#pragma once

#include "matrix/fields.h"
#include "matrix/pack_floats.h"

namespace eformer::EFORMER_ISA {

// The masks of one or two planes. Loops make them once.
template <class Format>
struct PlaneMasks {
  static_assert(kPlanes<Format> <= 2);
  Masks<Format::kPlaneBits[0]> first;
  Masks<Format::kPlaneBits[kPlanes<Format> - 1]> last;

  template <int kPlane>
  EFORMER_INLINE const auto& Of() const {
    if constexpr (kPlane == 0) {
      return first;
    } else {
      return last;
    }
  }
};

// Whether all codes are pairs in a byte, which lookups take as they are.
template <class Format>
constexpr bool kHasPairs = kPlanes<Format> == 1 && Format::kPlaneBits[0] == 4;

// The values of four bits, less kCentre.
template <class Format>
EFORMER_INLINE LoadedTable CentredTable() {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = Format::Value(i) - Format::kCentre;
  return LoadTable(MakeTable(values));
}

template <class Format>
struct GroupedPanels {
  enum Kind { kPlain, kRows, kTransposed, kAcross, kPairsAcross };

  DecodedPanels<Format> plain;
  const Matrix& m;
  Kind kind;
  // Across: the blocks of the columns n0 to n1, in the rows of a panel.
  int64_t n0, first_block, blocks, first_row;
  Floats scale_buffer, offset_buffer;
  const float *scales = nullptr, *offsets = nullptr;

  GroupedPanels(const Matrix& m, int64_t count, int64_t n0, int64_t n1)
      : plain(m, count, n0, n1),
        m(m),
        kind(KindOf(m)),
        n0(n0),
        first_block(IsAcross(kind) ? n0 / m.block : 0),
        blocks(IsAcross(kind) ? CeilDiv(n1, m.block) - first_block : m.BlockScaleStride()),
        first_row(-1),
        scale_buffer(IsAcross(kind) ? kMaxPanelDepth * blocks : 0),
        offset_buffer(IsAcross(kind) ? kMaxPanelDepth * blocks : 0) {}

  static bool IsAcross(Kind kind) { return kind == kAcross || kind == kPairsAcross; }

  static Kind KindOf(const Matrix& m) {
    if (m.contracted_axis == 0 && m.packed_axis == 0 && m.block % 8 == 0) return kRows;
    if (m.packed_axis == 0 || m.block % 16 != 0) return kPlain;
    if (m.contracted_axis == 1) return kTransposed;
    return kHasPairs<Format> && m.block % kPanelColumns == 0 ? kPairsAcross : kAcross;
  }

  // What is transposed starts a block, or lies in one.
  int64_t End(int64_t k, int64_t end) const {
    return kind == kTransposed && k % m.block != 0 ? Min(end, (k / m.block + 1) * m.block) : end;
  }

  const float* Decode(int64_t k0, int64_t depth, int64_t n, int64_t width, const PrefetchDistances& ahead,
                      float* panel) {
    if (kind == kPlain) return plain.Decode(k0, depth, n, width, ahead, panel);
    if (kind == kRows) DecodeRows(m, k0, depth, n, ahead, panel);
    if (kind == kTransposed) {
      const TransposedCodes<Format> codes(m, k0, depth, n, width);
      DecodeRows(codes.matrix, 0, depth, 0, PrefetchDistances(), panel);
    }
    if (kind == kAcross) DecodeAcross(k0, depth, n, ahead, panel);
    if (kind == kPairsAcross) DecodePairsAcross(k0, depth, n, ahead, panel);
    return nullptr;
  }

  bool IsNatural() const { return kind != kRows && kind != kTransposed && kind != kPairsAcross; }

  void ToNatural(const float* values, float* to) const {
    if (kind == kPairsAcross) return StorePairs(values, values + kStripSize, to);
    for (int i = 0; i < kPanelColumns; i += kWordBytes) {  // as words are: a vector for each of their four bytes
      Vec of_bytes[4];
      for (int byte = 0; byte < 4; ++byte) of_bytes[byte] = Load(values + i + byte * kLanes);
      StoreByBytes(to + i, of_bytes);
    }
  }

 private:
  // What the fields of words are multiplied by, for the places of a code in a byte of each plane, and what is added.
  struct Factors {
    alignas(64) float scale[kPlanes<Format>][8][kPanelColumns];
    alignas(64) float offset[kPanelColumns];
  };

  static void ReadFactors(const Matrix& m, int64_t block_row, int64_t n, int64_t present, Factors& factors) {
    float buffers[2][kPanelColumns] = {};
    const float* found = ScalesAt(m, block_row, n, present, buffers[0]);
    const float* added = OffsetsAt(m, block_row, n, present, 0, found, buffers[1]);
    if (found != buffers[0]) std::memcpy(buffers[0], found, present * sizeof(float));
    if (added != nullptr && added != buffers[1]) std::memcpy(buffers[1], added, present * sizeof(float));
    float scale[kPanelColumns];
    for (int i = 0; i < kPanelColumns; i += kWordBytes) {
      Vec scales_of_bytes[4], offsets_of_bytes[4];
      LoadByBytes(buffers[0] + i, scales_of_bytes);
      LoadByBytes(buffers[1] + i, offsets_of_bytes);
      for (int byte = 0; byte < 4; ++byte) {
        Store(scale + i + byte * kLanes, scales_of_bytes[byte]);
        Store(factors.offset + i + byte * kLanes, offsets_of_bytes[byte]);
      }
    }
    for (int plane = 0, below = 0; plane < kPlanes<Format>; below += Format::kPlaneBits[plane], ++plane) {
      const int bits = Format::kPlaneBits[plane];
      for (int place = 0; place < 8 / bits; ++place) {
        for (int i = 0; i < kPanelColumns; i += kLanes) {
          const float factor = static_cast<float>(1 << below) * InversePower(bits * place + i / kLanes % 2 * 8);
          Store(factors.scale[plane][place] + i, Load(scale + i) * factor);
        }
      }
    }
  }

  static void DecodeRows(const Matrix& m, int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead,
                         float* panel) {
    const int64_t present = Min(kPanelColumns, m.cols - n);
    Factors factors;
    for (int64_t k = k0, end; k < k0 + depth; k = end) {
      end = Min(k0 + depth, (k / m.block + 1) * m.block);
      ReadFactors(m, k / m.block, n, present, factors);
      for (int64_t row = k; row < end; row += 8) {
        DecodeEight(m, row, n, present, factors, ahead, panel + (row - k0) * kPanelStride);
      }
    }
  }

  // Writes eight rows of a panel, also where the matrix has less.
  EFORMER_INLINE static void DecodeEight(const Matrix& m, int64_t k, int64_t n, int64_t present, const Factors& factors,
                                         const PrefetchDistances& ahead, float* panel) {
    const uint8_t* codes[kPlanes<Format>];
    uint8_t copies[kPlanes<Format>][8][kPanelColumns];
    const bool whole = present == kPanelColumns && k + 8 <= m.rows;
    ForEach<kPlanes<Format>>([&](auto plane) {
      constexpr int kBits = Format::kPlaneBits[plane];
      codes[plane] = m.planes[plane] + k * kBits / 8 * m.cols + n;
      for (int r = 0; r < kBits; ++r) ahead.Prefetch(codes[plane] + r * m.cols, k * kBits / 8 + r);
      if (whole) return;
      std::memset(copies[plane], 0, sizeof copies[plane]);
      for (int r = 0; r < kBits && k + r * (8 / kBits) < m.rows; ++r) {
        std::memcpy(copies[plane][r], codes[plane] + r * m.cols, present);
      }
      codes[plane] = copies[plane][0];
    });
    const int64_t stride = whole ? m.cols : kPanelColumns;
    const PlaneMasks<Format> masks;
    for (int64_t i = 0; i < kPanelColumns; i += kWordBytes) {
      ForEach<8>([&](auto row) {
        Vec values[4];
        for (int byte = 0; byte < 4; ++byte) values[byte] = Load(factors.offset + i + byte * kLanes);
        ForEach<kPlanes<Format>>([&](auto plane) {
          constexpr int kBits = Format::kPlaneBits[plane], kPlace = row % (8 / kBits);
          const Halves words(LoadBits<4>(codes[plane] + row * kBits / 8 * stride + i));
          ForEach<4>([&](auto byte) {
            values[byte] += words.template Field<byte * (8 / kBits) + kPlace>(masks.template Of<plane>()) *
                            Load(factors.scale[plane][kPlace] + i + byte * kLanes);
          });
        });
        for (int byte = 0; byte < 4; ++byte) Store(panel + row * kPanelStride + i + byte * kLanes, values[byte]);
      });
    }
  }

  // Reads the scales of the rows of a panel, once for all panels of these rows.
  void ReadAcross(int64_t k0, int64_t depth) {
    if (k0 == first_row) return;
    first_row = k0;
    scales = scale_buffer.values;
    const bool has = CopyScales(m, k0, depth, first_block, blocks, 0, scale_buffer.values, offset_buffer.values);
    offsets = has ? offset_buffer.values : nullptr;
  }

  // Even columns, then odd ones, in lane order.
  void DecodePairsAcross(int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead, float* panel) {
    ReadAcross(k0, depth);
    const LoadedTable table = plain.table;
    const int64_t row_bytes = m.RowBytes(2), block = n / m.block - first_block;
    const uint8_t* codes = m.planes[0] + k0 * row_bytes + n / 2;
    for (int64_t k = 0; k < depth; ++k, codes += row_bytes, panel += kPanelStride) {
      ahead.Prefetch(codes, k);
      const Bytes pairs = LoadSome(codes, row_bytes - n / 2);
      const Vec factor = Spread(scales[k * blocks + block]);
      const Strip added = SpreadStrip(offsets != nullptr ? offsets[k * blocks + block] : 0);
      Strip low = added, high = added;
      AddProduct(low, LookUpLow(table, pairs), factor);
      AddProduct(high, LookUpHigh(table, pairs), factor);
      StoreStrip(panel, low);
      StoreStrip(panel + kStripSize, high);
    }
  }

  void DecodeAcross(int64_t k0, int64_t depth, int64_t n, const PrefetchDistances& ahead, float* panel) {
    ReadAcross(k0, depth);
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t row_bytes = m.RowBytes(kValuesPerByte<Format>);
      ahead.Prefetch(m.planes[0] + (k0 + k) * row_bytes + n / kValuesPerByte<Format>, k);
      DecodeRun(k0 + k, n, panel + k * kPanelStride);
    }
  }

  // Writes the values of 64 columns of a row, from column `c` on.
  EFORMER_INLINE void DecodeRun(int64_t row, int64_t c, float* values) const {
    const int64_t at = (row - first_row) * blocks - first_block;
    const float *scale = scales + at, *offset = offsets != nullptr ? offsets + at : nullptr;
    Strip run[2];
    const int64_t present = Min(kRunValues, m.cols - c);
    DecodeCodes<Format>(m, plain.table, row, c, present, run);
    for (int i = 0; i < 2; ++i) StoreStrip(values + i * kStripSize, run[i]);
    for (int64_t i = 0; i < present; i += 16) {
      const int64_t block = (c + i) / m.block;
      const Vec factor = Spread(scale[block]), added = Spread(offset != nullptr ? offset[block] : 0);
      for (int64_t j = i; j < i + 16; j += kLanes) Store(values + j, Load(values + j) * factor + added);
    }
  }
};

}  // namespace eformer::EFORMER_ISA
