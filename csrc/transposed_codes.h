// Part of a matrix that `x @ matrix.T` reads, transposed as bytes of codes: a quarter or less of the work of
// transposing decoded floats.
#pragma once

#include "codes.h"
#include "format.h"
#include "stored_scales.h"

namespace eformer::EFORMER_ISA {

// to[b * to_stride + r] = from[r * stride + b] for r < 16 and b < 16, of which `rows` and `bytes` can be read.
static inline void TransposeBytes16(const uint8_t* from, int64_t stride, int64_t rows, int64_t bytes, uint8_t* to,
                                    int64_t to_stride) {
#if defined(__AVX2__) || defined(EFORMER_NEON)
  Sixteen a[16] = {}, b[16];
  for (int r = 0; r < 16; ++r) {
    if (r < rows && bytes >= 16) {
      std::memcpy(&a[r], from + r * stride, 16);
    } else if (r < rows && bytes > 0) {
      std::memcpy(&a[r], from + r * stride, bytes);
    }
  }
  const auto interleave_halves = [](const Sixteen(&in)[16], Sixteen(&out)[16]) {  // four times, it transposes
    for (int i = 0; i < 8; ++i) Interleave(in[i], in[i + 8], out[2 * i], out[2 * i + 1]);
  };
  interleave_halves(a, b);
  interleave_halves(b, a);
  interleave_halves(a, b);
  interleave_halves(b, a);
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &a[i], 16);
#else
  for (int b = 0; b < 16; ++b) {
    for (int r = 0; r < 16; ++r) to[b * to_stride + r] = r < rows && b < bytes ? from[r * stride + b] : 0;
  }
#endif
}

// The transpose of part of `m`: a matrix of `depth` rows and kPanelColumns columns, packed along the same values.
template <class Format>
struct TransposedCodes {
  static constexpr int64_t kMaxDepth = 128, kMinBlock = 16;

  Matrix matrix;

  // Whether there is one for columns k0 to k0 + depth: codes are whole bytes of it, and blocks are whole or all of it.
  static bool Fits(const Matrix& m, int64_t k0, int64_t depth) {
    if (m.contracted_axis == 0 || depth > kMaxDepth || k0 % 8 != 0) return false;
    for (int bits : Format::kPlaneBits) {
      if (m.packed_axis == 0 && bits == 1) return false;
    }
    if (Format::kScales == ScaleKind::kBroadcast) return m.scale == nullptr;
    if (m.block < kMinBlock) return false;
    if (m.packed_axis == 0) return m.block % kPanelColumns == 0 || kPanelColumns % m.block == 0;
    return k0 % m.block == 0 || k0 / m.block == (k0 + depth - 1) / m.block;
  }

  // For the rows n to n + width of `m`; n is a multiple of kPanelColumns.
  TransposedCodes(const Matrix& m, int64_t k0, int64_t depth, int64_t n, int64_t width) : matrix(m) {
    matrix.rows = depth;
    matrix.cols =
        m.packed_axis == 0 ? 2 * kPanelColumns : kPanelColumns;  // rows of 32 bytes or more: others are copied
    matrix.packed_axis = 1 - m.packed_axis;
    matrix.contracted_axis = 0;
    uint8_t* to = codes;
    for (int plane = 0; plane < kPlanes<Format>; ++plane) {
      const int bits = Format::kPlaneBits[plane];
      Transpose(m, plane, 8 / bits, k0, depth, n, width, matrix.RowBytes(8 / bits), to);
      matrix.planes[plane] = to;
      to += kMaxDepth * bits / 8 * matrix.cols;
    }
    if (Format::kScales == ScaleKind::kBroadcast) return;
    matrix.block = m.packed_axis == 0 ? Min(m.block, kPanelColumns) : Min(m.block, depth);
    matrix.scales = TransposeNumbers(m, m.scales, k0, depth, n, width, scales);
    matrix.scale = scales;
    if (m.offsets.entries != nullptr) matrix.offsets = TransposeNumbers(m, m.offsets, k0, depth, n, width, offsets);
  }

 private:
  alignas(64) uint8_t codes[CodeBits<Format>() * kMaxDepth / 8 * 2 * kPanelColumns];
  alignas(64) float scales[kMaxDepth / kMinBlock * 2 * kPanelColumns];
  alignas(64) float offsets[kMaxDepth / kMinBlock * 2 * kPanelColumns];

  static void Transpose(const Matrix& m, int plane, int per_byte, int64_t k0, int64_t depth, int64_t n, int64_t width,
                        int64_t to_stride, uint8_t* to) {
    constexpr int64_t kBytesAhead = 128;  // hardware prefetchers do not follow so many rows
    const int64_t per_row = m.packed_axis == 0 ? per_byte : 1, per_column = per_byte / per_row;
    const int64_t stride = m.RowBytes(per_byte), bytes = CeilDiv(depth, per_column), rows = CeilDiv(width, per_row);
    const uint8_t* from = m.planes[plane] + n / per_row * stride + k0 / per_column;
    for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(from + r * stride + bytes + kBytesAhead);
    for (int64_t b = 0; b < bytes; b += 16) {
      for (int64_t r = 0; r < kPanelColumns / per_row; r += 16) {
        TransposeBytes16(from + r * stride + b, stride, rows - r, bytes - b, to + b * to_stride + r, to_stride);
      }
    }
  }

  // The numbers of the blocks of the part, as float32.
  BlockNumbers TransposeNumbers(const Matrix& m, const BlockNumbers& all, int64_t k0, int64_t depth, int64_t n,
                                int64_t width, float* to) const {
    const int64_t per_row = m.packed_axis == 0 ? m.block : 1, per_column = m.packed_axis == 1 ? m.block : 1;
    const int64_t rows = CeilDiv(width, per_row), all_rows = matrix.BlockScaleStride();
    const int64_t first = k0 / per_column, count = (k0 + depth - 1) / per_column - first + 1;
    if (rows < all_rows) std::memset(to, 0, count * all_rows * sizeof(float));
    float found[kPanelColumns * kMaxDepth / kMinBlock];
    CopyNumbers(m, all, n / per_row, rows, first, count, found);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < count; ++i) to[i * all_rows + r] = found[r * count + i];
    }
    return {to, Number::kFloat32, Number::kFloat32, nullptr, 0, 0, 1};
  }
};

}  // namespace eformer::EFORMER_ISA
