// Rows of x split into bytes, as Kernels::split_matmul takes them.
#pragma once

#include "ffi/x_forms.h"

namespace eformer {

struct SplitRows {
  const Stack& stack;
  const ffi::AnyBuffer& x;
  Int8Order order;
  int64_t rows;
  int64_t depth;  // with the zeros behind each row
  int64_t blocks;
  RowGroups chunks;  // one for each call
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> steps, sums;
  std::unique_ptr<int32_t[]> of_parts;
  std::unique_ptr<bool[]> fit;  // whether each row could be split; the others are zeros

  static constexpr auto kMatmul = &Kernels::split_matmul;
  static constexpr int64_t kStep = kInt8DepthStep;
  static constexpr auto Columns = PanelTaskColumns;
  static bool Scales(int64_t) { return true; }
  static constexpr bool kKernelScales = false;

  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  SplitX Chunk(int64_t matrix, int64_t chunk) const {
    const int64_t row = matrix * rows + First(chunk), block = row * blocks;
    return {&values[row * depth * kXParts], &steps[block], &sums[block],
            &of_parts[block * kXParts],     depth,         order.block};
  }

  SplitRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, const Int8Order& order)
      : stack(stack),
        x(x),
        order(order),
        rows(x.dimensions()[1]),
        depth(CeilDiv(stack.first.Depth(), kInt8Padding) * kInt8Padding),
        blocks(depth / order.block),
        chunks(rows, kInt8ChunkRows),
        values(new int8_t[stack.count * rows * depth * kXParts]),
        steps(new float[stack.count * rows * blocks]),
        sums(new float[stack.count * rows * blocks]),
        of_parts(new int32_t[stack.count * rows * blocks * kXParts]),
        fit(new bool[stack.count * rows]) {
    ParallelFor(pool, stack.count * chunks.count, [&](int64_t task) {
      const int64_t chunk = task % chunks.count, first = task / chunks.count * rows + First(chunk);
      const RowGroups groups(Size(chunk), stack.instructions->split_tile_rows);
      for (int64_t g = 0; g < groups.count; ++g) SplitGroup(first + groups.First(g), groups.Size(g));
    });
  }

 private:
  // Splits `size` rows, and puts four bytes of each part of each row side by side.
  void SplitGroup(int64_t first, int64_t size) {
    const std::unique_ptr<float[]> row(new float[depth]());
    const std::unique_ptr<int8_t[]> parts(new int8_t[kXParts * depth]);
    const std::unique_ptr<float[]> row_steps(new float[blocks]), row_sums(new float[blocks]);
    const std::unique_ptr<int32_t[]> row_parts(new int32_t[blocks * kXParts]);
    const int64_t count = stack.first.Depth(), width = size * kXParts;
    for (int64_t r = 0; r < size; ++r) {
      ReadFloats(x, (first + r) * count, count, row.get());
      const auto split = stack.instructions->split;
      fit[first + r] = split(row.get(), depth, order, parts.get(), row_steps.get(), row_sums.get(), row_parts.get());
      if (!fit[first + r]) {
        std::memset(row.get(), 0, depth * sizeof(float));
        split(row.get(), depth, order, parts.get(), row_steps.get(), row_sums.get(), row_parts.get());
      }
      int8_t* to = &values[first * depth * kXParts];
      for (int part = 0; part < kXParts; ++part) {
        for (int64_t i = 0; i < depth; i += 4) {
          std::memcpy(to + i * width + 4 * (r * kXParts + part), &parts[part * depth + i], 4);
        }
      }
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = first * blocks + b * size + r;
        steps[at] = row_steps[b];
        sums[at] = row_sums[b];
        std::memcpy(&of_parts[at * kXParts], &row_parts[b * kXParts], kXParts * sizeof(int32_t));
      }
    }
  }
};

}  // namespace eformer
