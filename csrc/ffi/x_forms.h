// Rows of x as the kernels take them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/parallel.h"
#include "ffi/problem.h"

namespace eformer {

inline float FromBfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline float FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, digits = bits & 0x3ff;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(digits) * 0x1p-24f;  // exact: denormal, or zero
    return sign != 0 ? -magnitude : magnitude;
  }
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | digits << 13;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Converts `count` values of x from `start` on.
inline void ReadFloats(const ffi::AnyBuffer& x, int64_t start, int64_t count, float* values) {
  if (x.element_type() == ffi::F32) {
    std::memcpy(values, static_cast<const float*>(x.untyped_data()) + start, count * sizeof(float));
    return;
  }
  const bool wide_exponent = x.element_type() == ffi::BF16;
  const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + start;
  for (int64_t i = 0; i < count; ++i) values[i] = wide_exponent ? FromBfloat16(from[i]) : FromFloat16(from[i]);
}

constexpr int64_t kMinChunkRows = 48;  // rows of x in a call: for less, decoding again costs too much

// Columns of the result in a task. The more, the longer the pieces of memory that are read; `most` is a multiple of
// `least`.
struct TaskColumns {
  int64_t least;
  int64_t most;
  int64_t depth_parts = 1;  // parts of the contracted axis, where columns alone make too few tasks
};

// For Kernels::matmul or Kernels::bfloat_matmul.
inline TaskColumns PanelTaskColumns(const Matrix& m, int64_t rows) {
  // Where a row has its own scales, those of few columns take as long to read as those of some more.
  const bool has_scales = m.packed_axis == 1 && m.contracted_axis == 0 && m.scales.entries != nullptr;
  if (has_scales && rows <= 256) return {3 * kPanelColumns, (rows > kFewRows ? 3 : 9) * kPanelColumns};
  if (rows > kFewRows) return {kPanelColumns, (rows > 256 ? 2 : 4) * kPanelColumns};
  return {kPanelColumns, m.contracted_axis == 0 ? 8 * kPanelColumns : 2 * kPanelColumns};
}

// A broadcast scale that varies along one axis is applied to x if that is the contracted axis, else to the result.
struct OuterScale {
  const float* of_depth = nullptr;
  const float* of_width = nullptr;
  int64_t step = 0;

  OuterScale(const FormatInfo& format, const Matrix& m) {
    const int64_t along_depth = m.contracted_axis == 0 ? m.scale_row_step : m.scale_col_step;
    const int64_t along_width = m.contracted_axis == 0 ? m.scale_col_step : m.scale_row_step;
    if (m.scale == nullptr || !VariesAlongOneAxis(format, m)) return;
    (along_depth != 0 ? of_depth : of_width) = m.scale;
    step = along_depth != 0 ? along_depth : along_width;
  }

  static bool VariesAlongOneAxis(const FormatInfo& format, const Matrix& m) {
    return format.scales == ScaleKind::kBroadcast && (m.scale_row_step == 0 || m.scale_col_step == 0);
  }

  void ScaleInput(int64_t k0, int64_t k1, float* x) const {
    if (of_depth != nullptr) Scale(of_depth + k0 * step, k1 - k0, x);
  }

  void ScaleResult(int64_t n0, int64_t n1, float* y) const {
    if (of_width != nullptr) Scale(of_width + n0 * step, n1 - n0, y + n0);
  }

 private:
  void Scale(const float* scale, int64_t count, float* values) const {
    if (step == 1) {  // a loop of its own, which the compiler makes one of vectors
      for (int64_t i = 0; i < count; ++i) values[i] *= scale[i];
    } else {
      for (int64_t i = 0; i < count; ++i) values[i] *= scale[i * step];
    }
  }
};

// `Scales(rows)`: whether this form of x already contains the outer scale when a call has `rows` rows.

// x as floats, a batch for each matrix: times its outer scale if `scales`, padded with zeros up to `stride`, and in the
// order of InstructionSet::put_in_lanes if `in_lanes`. Not copied if x is float32 and none of this changes it.
struct FloatRows {
  int64_t rows;
  int64_t stride;
  std::unique_ptr<float[]> copied;
  const float* values;

  static constexpr int64_t kStep = kDepthStep;

  PlainX From(int64_t matrix, int64_t row) const { return {values + (matrix * rows + row) * stride, stride}; }

  FloatRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, int64_t stride, bool scales,
            bool in_lanes)
      : rows(x.dimensions()[1]), stride(stride), values(static_cast<const float*>(x.untyped_data())) {
    constexpr int64_t kTaskValues = 1 << 15;
    const int64_t depth = stack.first.Depth(), all = stack.count * rows;
    const bool is_scaled = scales && OuterScale(stack.kernels->format, stack.first).of_depth != nullptr;
    if (x.element_type() == ffi::F32 && depth == stride && !is_scaled && !in_lanes) return;
    constexpr int64_t kLine = 64 / sizeof(float);  // vectors that cross a cache line take twice as long to load
    copied.reset(new float[all * stride + kLine]);
    float* const to = copied.get() + (-reinterpret_cast<uintptr_t>(copied.get()) / sizeof(float)) % kLine;
    values = to;
    const RowGroups tasks(all, std::max<int64_t>(1, kTaskValues / stride));
    ParallelFor(pool, tasks.count, [&](int64_t task) {
      const std::unique_ptr<float[]> natural(in_lanes ? new float[stride] : nullptr);
      for (int64_t row = tasks.First(task); row < tasks.First(task + 1); ++row) {
        float* floats = in_lanes ? natural.get() : to + row * stride;
        ReadFloats(x, row * depth, depth, floats);
        if (is_scaled) OuterScale(stack.kernels->format, stack[row / rows]).ScaleInput(0, depth, floats);
        std::memset(floats + depth, 0, (stride - depth) * sizeof(float));
        if (in_lanes) stack.instructions->put_in_lanes(floats, stride, to + row * stride);
      }
    });
  }
};

// As Kernels::matmul takes them.
struct PanelRows : FloatRows {
  RowGroups chunks;  // one for each call

  static constexpr auto kMatmul = &Kernels::matmul;
  static constexpr bool kKernelScales = true;
  static bool Scales(int64_t rows) { return rows <= kFewRows; }  // for more, it is less work to scale the matrix

  // Few rows wait for codes, which are read in pieces of whole pages where rows are that long.
  static TaskColumns Columns(const Matrix& m, int64_t rows) {
    constexpr int64_t kMinPartDepth = 512;
    TaskColumns columns = PanelTaskColumns(m, rows);
    if (rows > kFewRows || m.contracted_axis == 1 || m.cols < kSliceColumns / 2) return columns;
    columns.most = CeilDiv(kSliceColumns, columns.least) * columns.least;
    columns.depth_parts = m.rows / kMinPartDepth;
    return columns;
  }

  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  PlainX Chunk(int64_t matrix, int64_t chunk) const { return From(matrix, First(chunk)); }

  // As many in a chunk that decoding again for the next one, which takes as long as some rows, and threads that are
  // idle at the end cost the least.
  static int64_t ChunkRows(ffi::ThreadPool& pool, const Stack& stack, int64_t rows) {
    constexpr int64_t kDecodingRows = 6;
    const int64_t threads = pool.num_threads(), panels = stack.count * CeilDiv(stack.first.Width(), kPanelColumns);
    int64_t best = CeilDiv(rows, kChunkRows);
    double least = 0;
    for (int64_t chunks = best; chunks <= CeilDiv(rows, kMinChunkRows); ++chunks) {
      const int64_t rounds = CeilDiv(chunks * panels, threads);
      const double cost = static_cast<double>(rounds * (rows + kDecodingRows * chunks)) / static_cast<double>(chunks);
      if (least == 0 || cost < least) least = cost, best = chunks;
    }
    return CeilDiv(rows, best);
  }

  PanelRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x)
      : FloatRows(pool, stack, x, stack.first.Depth(), Scales(x.dimensions()[1]), false),
        chunks(rows, ChunkRows(pool, stack, rows)) {}
};

// As Kernels::dots and Kernels::gemv take them.
struct PaddedRows : FloatRows {
  static bool Scales(int64_t) { return true; }

  PaddedRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, bool in_lanes)
      : FloatRows(pool, stack, x, CeilDiv(stack.first.Depth(), kXPadding) * kXPadding, true, in_lanes) {}
};

// The rows of bfloat16 x for each matrix in tiles, as Kernels::bfloat_matmul takes them.
struct TiledRows {
  int64_t rows;
  int64_t depth_tiles;
  RowGroups chunks;  // of tiles, one for each call
  std::unique_ptr<uint16_t[]> values;

  static constexpr int64_t kTileValues = kAmxRows * kAmxDepth;
  static constexpr auto kMatmul = &Kernels::bfloat_matmul;
  static constexpr int64_t kStep = kDepthStep;
  static constexpr auto Columns = PanelTaskColumns;
  static bool Scales(int64_t) { return false; }  // x times the scale would have to be rounded
  static constexpr bool kKernelScales = false;

  int64_t First(int64_t chunk) const { return chunks.First(chunk) * kAmxRows; }
  int64_t Size(int64_t chunk) const { return std::min(rows, First(chunk + 1)) - First(chunk); }
  const uint16_t* Chunk(int64_t matrix, int64_t chunk) const {
    return &values[(matrix * chunks.rows + chunks.First(chunk)) * depth_tiles * kTileValues];
  }

  TiledRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x)
      : rows(x.dimensions()[1]),
        depth_tiles(CeilDiv(stack.first.Depth(), kAmxDepth)),
        chunks(CeilDiv(rows, kAmxRows), kBfloatChunkRows / kAmxRows),
        values(new uint16_t[stack.count * chunks.rows * depth_tiles * kTileValues]) {
    const int64_t depth = stack.first.Depth(), row_tiles = chunks.rows;
    ParallelFor(pool, stack.count * row_tiles, [&](int64_t task) {
      const int64_t matrix = task / row_tiles, first = task % row_tiles * kAmxRows;
      uint16_t* tiles = &values[task * depth_tiles * kTileValues];
      std::memset(tiles, 0, depth_tiles * kTileValues * sizeof(uint16_t));
      for (int64_t row = first; row < std::min(rows, first + kAmxRows); ++row) {
        const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + (matrix * rows + row) * depth;
        for (int64_t k = 0; k < depth; k += kAmxDepth) {
          std::memcpy(tiles + k / kAmxDepth * kTileValues + (row - first) * kAmxDepth, from + k,
                      std::min<int64_t>(kAmxDepth, depth - k) * sizeof(uint16_t));
        }
      }
    });
  }
};

}  // namespace eformer
