// Part of a matrix that `x @ matrix.T` reads, transposed as bytes of codes: a quarter or less of the work of
// transposing decoded floats.
#pragma once

#include "matrix/scales.h"
#include "matrix/unpack.h"

namespace eformer::EFORMER_ISA {

// Loads sixteen bytes into each lane, those from p, p + stride, ... on.
EFORMER_INLINE void LoadLanes(const uint8_t* p, int64_t /*stride*/, Sixteen& lane) { std::memcpy(&lane, p, 16); }

#if defined(__AVX2__)
typedef Bytes TwoLanes;

EFORMER_INLINE __m128i LoadLane(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

EFORMER_INLINE void LoadLanes(const uint8_t* p, int64_t stride, Bytes& lanes) {
  lanes = (Bytes)_mm256_inserti128_si256(_mm256_castsi128_si256(LoadLane(p)), LoadLane(p + stride), 1);
}
#else
typedef Sixteen TwoLanes;  // there is only one
#endif

#if defined(__AVX512F__)
EFORMER_INLINE void LoadLanes(const uint8_t* p, int64_t stride, WidestBytes& lanes) {
  __m512i all = _mm512_castsi128_si512(LoadLane(p));
  all = _mm512_mask_broadcast_i32x4(all, 0x00F0, LoadLane(p + stride));  // a masked load takes no shuffle
  all = _mm512_mask_broadcast_i32x4(all, 0x0F00, LoadLane(p + 2 * stride));
  lanes = (WidestBytes)_mm512_mask_broadcast_i32x4(all, 0xF000, LoadLane(p + 3 * stride));
}
#endif

// to[b * to_stride + r] = from[r * stride + b] for b < 16 and each byte r of a Vector.
template <class Vector>
static void TransposeBytes(const uint8_t* from, int64_t stride, uint8_t* to, int64_t to_stride) {
  Vector a[16], b[16];
  for (int r = 0; r < 16; ++r) LoadLanes(from + r * stride, 16 * stride, a[r]);
  const auto interleave_halves = [](const Vector(&in)[16], Vector(&out)[16]) {  // four times, it transposes
    for (int i = 0; i < 8; ++i) InterleaveLanes(in[i], in[i + 8], out[2 * i], out[2 * i + 1]);
  };
  interleave_halves(a, b);
  interleave_halves(b, a);
  interleave_halves(a, b);
  interleave_halves(b, a);
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_stride, &a[i], sizeof(Vector));
}

constexpr int64_t kMaxPanelDepth = 384;  // of what is decoded at a time

// The transpose of part of `m`: a matrix of `depth` rows and kPanelColumns columns, packed along the same values.
template <class Format>
struct TransposedCodes {
  static constexpr int64_t kMaxDepth = kMaxPanelDepth, kMinBlock = 16;

  Matrix matrix;

  // Whether there is one for columns k0 to k0 + depth: codes are whole bytes of it, blocks are whole or all of it,
  // and other scales are those of columns.
  static bool Fits(const Matrix& m, int64_t k0, int64_t depth) {
    if (m.contracted_axis == 0 || depth > kMaxDepth || k0 % 8 != 0) return false;
    if (Format::kScales == ScaleKind::kBroadcast) return m.scale == nullptr || m.scale_row_step == 0;
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
    if (Format::kScales == ScaleKind::kBroadcast) {
      if (m.scale != nullptr) matrix.scale = m.scale + k0 * m.scale_col_step;
      std::swap(matrix.scale_row_step, matrix.scale_col_step);
      return;
    }
    matrix.block = m.packed_axis == 0 ? Min(m.block, kPanelColumns) : Min(m.block, depth);
    matrix.scales = TransposeNumbers(m, m.scales, k0, depth, n, width, scales);
    if (m.offsets.entries != nullptr) matrix.offsets = TransposeNumbers(m, m.offsets, k0, depth, n, width, offsets);
  }

 private:
  alignas(64) uint8_t codes[CodeBits<Format>() * kMaxDepth / 8 * 2 * kPanelColumns];
  alignas(64) float scales[kMaxDepth / kMinBlock * 2 * kPanelColumns + kLanes];
  alignas(64) float offsets[kMaxDepth / kMinBlock * 2 * kPanelColumns + kLanes];

  static void Transpose(const Matrix& m, int plane, int per_byte, int64_t k0, int64_t depth, int64_t n, int64_t width,
                        int64_t to_stride, uint8_t* to) {
    constexpr int64_t kBytesAhead = 128;  // hardware prefetchers do not follow so many rows
    const int64_t per_row = m.packed_axis == 0 ? per_byte : 1, per_column = per_byte / per_row;
    const int64_t stride = m.RowBytes(per_byte), bytes = CeilDiv(depth, per_column), rows = CeilDiv(width, per_row);
    const uint8_t* from = m.planes[plane] + n / per_row * stride + k0 / per_column;
    // Rows a multiple of 4096 bytes apart share a cache set, so each line is read once, and copied.
    alignas(64) uint8_t lines[kPanelColumns * kMaxDepth];
    const int64_t all_rows = kPanelColumns / per_row, line_bytes = CeilDiv(bytes, 16) * 16;
    if (rows < all_rows || bytes < line_bytes) std::memset(lines, 0, all_rows * line_bytes);
    for (int64_t r = 0; r < rows; ++r, from += stride) {
      uint8_t* line = lines + r * line_bytes;
      int64_t b = 0;
      for (; b + 64 <= bytes; b += 64) {
        __builtin_prefetch(from + b + bytes + kBytesAhead);
        std::memcpy(line + b, from + b, 64);
      }
      if (b < bytes) __builtin_prefetch(from + b + bytes + kBytesAhead);
      for (; b + 16 <= bytes; b += 16) std::memcpy(line + b, from + b, 16);
      if (b < bytes) std::memcpy(line + b, from + b, bytes - b);
    }
    const int64_t at_once = Min(Max(all_rows, sizeof(Sixteen)), sizeof(WidestBytes));  // of eight, with eight others
    auto transpose = TransposeBytes<WidestBytes>;
    if (at_once == sizeof(Bytes)) transpose = TransposeBytes<TwoLanes>;
    if (at_once == sizeof(Sixteen)) transpose = TransposeBytes<Sixteen>;
    for (int64_t b = 0; b < bytes; b += 16) {
      for (int64_t r = 0; r < all_rows; r += at_once) {
        transpose(lines + r * line_bytes + b, line_bytes, to + b * to_stride + r, to_stride);
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
    return {to, Number::kFloat32, Number::kFloat32, nullptr, 0, 0, 1, nullptr, nullptr, kLanes};
  }
};

}  // namespace eformer::EFORMER_ISA
