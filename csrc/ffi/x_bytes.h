// Rows of x as bytes, in one part or in three, as Kernels::byte_matmul takes them.
#pragma once

#include "ffi/x_forms.h"

namespace eformer {

// x as bytes, a batch for each matrix, times the outer scale of that matrix.
struct ByteRows {
  const Stack& stack;
  const ffi::AnyBuffer& x;
  ByteOrder order;
  int64_t rows;
  int64_t depth;  // with the zeros behind each row
  int64_t blocks;
  RowGroups chunks;  // one for each call
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> steps, totals;
  std::unique_ptr<int32_t[]> sums;
  std::vector<char> fit;  // whether each row could be made bytes; the others are zeros

  static constexpr auto kMatmul = &Kernels::byte_matmul;
  static constexpr int64_t kStep = kByteDepthStep;
  static bool Scales(int64_t) { return true; }
  static constexpr bool kKernelScales = false;

  // For few rows, codes are read along their rows: all of a row for one of x, else as much as has its sums in L1.
  TaskColumns Columns(const Matrix& m, int64_t rows) const {
    constexpr int64_t kFewColumns = 1024;
    if (rows > 1 && order.parts > 1) return PanelTaskColumns(m, rows);
    if (rows > kFewRows) return {kPanelColumns, 4 * kPanelColumns};
    const int64_t columns = m.contracted_axis != 0 ? kPanelColumns : rows == 1 ? kSliceColumns : kFewColumns;
    return {columns, columns};
  }
  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  ByteX Chunk(int64_t matrix, int64_t chunk) const {
    const int64_t row = matrix * rows + First(chunk), at = row * blocks;
    return {&values[row * depth * order.parts], &steps[at], &sums[at * order.parts], &totals[at], depth, order};
  }

  ByteRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, const ByteOrder& order)
      : stack(stack),
        x(x),
        order(order),
        rows(x.dimensions()[1]),
        depth(CeilDiv(stack.first.Depth(), kBytePadding) * kBytePadding),
        blocks(depth / order.block),
        chunks(rows, kByteChunkRows),
        values(new int8_t[stack.count * rows * depth * order.parts]),
        steps(new float[stack.count * rows * blocks]),
        totals(new float[stack.count * rows * blocks]),
        sums(new int32_t[stack.count * rows * blocks * order.parts]()),
        fit(stack.count * rows) {
    constexpr int64_t kTaskValues = 1 << 16;  // about 20 microseconds
    const int64_t tile_rows = order.rows;
    const int64_t max_groups = CeilDiv(CeilDiv(rows, chunks.count), tile_rows);
    const int64_t at_once = CeilDiv(kTaskValues, tile_rows * depth), parts = CeilDiv(max_groups, at_once);
    ParallelFor(pool, stack.count * chunks.count * parts, [&](int64_t task) {
      const int64_t matrix = task / (chunks.count * parts), chunk = task / parts % chunks.count;
      const RowGroups groups(chunks.Size(chunk), tile_rows);
      const std::unique_ptr<float[]> floats(new float[stack.first.Depth()]);
      for (int64_t g = task % parts * at_once; g < std::min(groups.count, (task % parts + 1) * at_once); ++g) {
        AddGroup(matrix, matrix * rows + chunks.First(chunk) + groups.First(g), groups.Size(g), floats.get());
      }
    });
  }

 private:
  // Makes bytes of `size` rows, side by side.
  void AddGroup(int64_t matrix, int64_t first, int64_t size, float* floats) {
    const int64_t count = stack.first.Depth(), whole = count / kBytePadding * kBytePadding, lines = size * order.parts;
    const OuterScale scale(stack.kernels->format, stack[matrix]);
    int8_t* to = &values[first * depth * order.parts];
    std::memset(to + whole * lines, 0, (depth - whole) * lines);
    for (int64_t r = 0; r < size; ++r) {
      const float* row = floats;
      if (x.element_type() == ffi::F32 && scale.of_depth == nullptr) {
        row = static_cast<const float*>(x.untyped_data()) + (first + r) * count;
      } else {
        ReadFloats(x, (first + r) * count, count, floats);
        scale.ScaleInput(0, count, floats);
      }
      const auto put = [&](const float* values) {
        const int64_t at = first * blocks;
        return stack.instructions->to_bytes(values, count, order, r, size, to, &steps[at], &sums[at * order.parts],
                                            &totals[at]);
      };
      fit[first + r] = put(row);
      if (!fit[first + r]) put(static_cast<const float*>(std::memset(floats, 0, count * sizeof(float))));
    }
  }
};

}  // namespace eformer
