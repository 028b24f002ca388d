// Parts of rows whose codes lie side by side, decoded: scales and offsets are read once for many values.
#pragma once

#include "matrix/decode.h"

namespace eformer::EFORMER_ISA {

constexpr int64_t kMaxPart = 512;  // values in a part

// As InstructionSet::order_pairs says: even places, then odd ones, each in lane order.
static void OrderPairs(const float* x, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += kRunValues) {
    float even[kStripSize], odd[kStripSize];
    for (int i = 0; i < kStripSize; ++i) {
      even[i] = x[k + 2 * i];
      odd[i] = x[k + 2 * i + 1];
    }
    StoreStrip(to + k, FromNatural(LoadStrip(even)));
    StoreStrip(to + k + kStripSize, FromNatural(LoadStrip(odd)));
  }
}

template <class Format>
struct RowParts {
  static constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  static constexpr int kPerByte = kValuesPerByte<Format>;

  // Whether scales vary along rows by whole strips or not at all. A broadcast scale is left to the caller.
  static bool Fits(const Matrix& m) {
    if (m.packed_axis == 0) return !kInBlocks && kPerByte == 1;
    return !kInBlocks || m.block == kStripSize || m.block % kRunValues == 0;
  }

  // As Kernels::dot_order says.
  static DotOrder DotOrderOf(const Matrix& m) {
    const bool varies = m.scale_row_step != 0 && m.scale_col_step != 0;
    if (m.contracted_axis == 0 || !Fits(m) || (!kInBlocks && varies)) return DotOrder::kNone;
    const bool pairs = kInBlocks && kPlanes<Format> == 1 && kPerByte == 2 && m.block != kStripSize;
    return pairs ? DotOrder::kPairs : DotOrder::kPlain;
  }

  const Matrix& m;
  const DotOrder order;
  const LoadedTable table = TableOf<Format>();

  RowParts(const Matrix& m, DotOrder order) : m(m), order(order) {}

  // values[i] = matrix[row, c + i] for up to kMaxPart values in `order`; c is a multiple of kRunValues. Zeros follow,
  // up to a multiple of that.
  void Decode(int64_t row, int64_t c, int64_t count, float* values) const {
    const int64_t runs = count / kRunValues, whole = runs * kRunValues;
    if constexpr (kInBlocks) {
      float scale_buffer[kMaxPart / kStripSize], offset_buffer[kMaxPart / kStripSize];
      const int64_t first = c / m.block, blocks = CeilDiv(c + whole, m.block) - first;
      Blocks found = {nullptr, nullptr, m.block / kRunValues, ((first + 1) * m.block - c) / kRunValues};
      found.scales = NumbersAt(m, m.scales, row, first, blocks, scale_buffer);
      if (m.offsets.entries != nullptr) found.offsets = NumbersAt(m, m.offsets, row, first, blocks, offset_buffer);
      if (order == DotOrder::kPairs) {
        DecodeRuns<true, false>(row, c, runs, found, values);
      } else if (m.block == kStripSize) {
        DecodeRuns<false, true>(row, c, runs, found, values);
      } else {
        DecodeRuns<false, false>(row, c, runs, found, values);
      }
    } else {
      DecodeRuns<false, false>(row, c, runs, {}, values);
    }
    if (whole < count) DecodeTail(row, c + whole, count - whole, values + whole);
  }

 private:
  struct Blocks {
    const float* scales;
    const float* offsets;  // or nullptr
    int64_t runs;          // in a block
    int64_t first_runs;    // left in the first one
  };

  // kShort: blocks are half a run long.
  template <bool kPairs, bool kShort>
  EFORMER_INLINE void DecodeRuns(int64_t row, int64_t c, int64_t runs, const Blocks& blocks, float* values) const {
    const Matrix local = m;  // copies stay in registers: stores to the values cannot change them
    const LoadedTable loaded = table;
    const uint8_t* codes = local.planes[0] + row * local.RowBytes(kPerByte) + c / kPerByte;
    const float *scales = blocks.scales, *offsets = blocks.offsets;
    int64_t left = blocks.first_runs;
    for (int64_t i = 0; i < runs; ++i, values += kRunValues) {
      Strip run[2];
      if constexpr (kPairs) {
        const Bytes pairs = LoadBytes(codes + i * kStripSize);
        run[!Format::kHighBitsFirst] = LookUpHigh(loaded, pairs);
        run[Format::kHighBitsFirst] = LookUpLow(loaded, pairs);
      } else if constexpr (kPlanes<Format> == 1 && kPerByte == 1) {
        const uint8_t* from = codes + i * kRunValues;
        for (int half = 0; half < 2; ++half) run[half] = ValuesOf<Format>(loaded, from + half * kStripSize, 0);
      } else {
        DecodeCodes<Format>(local, loaded, row, c + i * kRunValues, kRunValues, run);
      }
      if constexpr (kInBlocks) {
        for (int half = 0; half < 2; ++half) {
          const Strip scale = SpreadStrip(scales[kShort ? half : 0]);
          const Strip offset = SpreadStrip(offsets != nullptr ? offsets[kShort ? half : 0] : 0);
          run[half] = ScaleStrip<Format>(local, run[half], scale, offset);
        }
        if (kShort || --left == 0) {
          left = blocks.runs;
          scales += kShort ? 2 : 1;
          if (offsets != nullptr) offsets += kShort ? 2 : 1;
        }
      }
      for (int half = 0; half < 2; ++half) StoreStrip(values + half * kStripSize, run[half]);
    }
  }

  EFORMER_NOINLINE void DecodeTail(int64_t row, int64_t c, int64_t count, float* values) const {
    float run[kRunValues];
    DecodeRun<Format>(m, table, row, c, count, run);
    std::memset(run + count, 0, (kRunValues - count) * sizeof(float));
    if (order == DotOrder::kPairs) return OrderPairs(run, kRunValues, values);
    std::memcpy(values, run, sizeof run);
  }
};

// Decodes rows of blocks that lie along the other axis: the scales of a block stay in registers.
template <class Format>
static void DecodeBlockRows(const Matrix& m, int64_t r0, int64_t r1, float* values) {
  const Matrix local = m;
  const LoadedTable table = TableOf<Format>();
  for (int64_t row = r0, end; row < r1; row = end) {
    end = Min(r1, (row / m.block + 1) * m.block);
    for (int64_t c = 0; c < m.cols; c += kRunValues) {
      const int64_t present = Min(kRunValues, m.cols - c);
      float numbers[2][kRunValues] = {};
      ReadNumbersOfRun(m, m.scales, row, c, present, numbers[0]);
      if (m.offsets.entries != nullptr) ReadNumbersOfRun(m, m.offsets, row, c, present, numbers[1]);
      const Run scales = LoadRun(numbers[0], kRunValues), offsets = LoadRun(numbers[1], kRunValues);
      float* to = values + (row - r0) * m.cols + c;
      for (int64_t r = row; r < end; ++r, to += m.cols) {
        Strip run[2];
        if (present == kRunValues) {
          DecodeCodes<Format>(local, table, r, c, kRunValues, run);
        } else {
          DecodeCodes<Format>(local, table, r, c, present, run);
        }
        float rest[kRunValues], *write = present == kRunValues ? to : rest;
        for (int half = 0; half < 2; ++half) {
          run[half] = ScaleStrip<Format>(local, run[half], scales.half[half], offsets.half[half]);
          StoreStrip(write + half * kStripSize, run[half]);
        }
        if (present < kRunValues) std::memcpy(to, rest, present * sizeof(float));
      }
    }
  }
}

// As Kernels::decode says.
template <class Format>
static void Decode(const Matrix& m, int64_t r0, int64_t r1, float* values) {
  constexpr bool kInBlocks = Format::kScales == ScaleKind::kPerBlock;
  if (kInBlocks && m.packed_axis == 0) return DecodeBlockRows<Format>(m, r0, r1, values);
  const RowParts<Format> parts(m, DotOrder::kPlain);
  const bool fits = kInBlocks && RowParts<Format>::Fits(m);
  float rest[kRunValues];
  const int64_t whole = m.cols / kRunValues * kRunValues;
  for (int64_t row = r0; row < r1; ++row, values += m.cols) {
    if (fits) {
      for (int64_t c = 0; c < whole; c += kMaxPart) parts.Decode(row, c, Min(kMaxPart, whole - c), values + c);
    } else {
      DecodeRow<Format>(m, parts.table, row, 0, whole, values);
    }
    if (whole == m.cols) continue;
    DecodeRow<Format>(m, parts.table, row, whole, m.cols - whole, rest);
    std::memcpy(values + whole, rest, (m.cols - whole) * sizeof(float));
  }
}

}  // namespace eformer::EFORMER_ISA
