// Rows of x as the kernels take them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/parallel.h"
#include "ffi/problem.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

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
  int64_t depth_parts = 1;  // parts of the contracted axis, so that there are enough tasks of so many columns
};

// For Kernels::matmul or Kernels::bfloat_matmul.
inline TaskColumns PanelTaskColumns(const Matrix& m, int64_t rows) {
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

// `Scales(rows)` of each kind of rows says whether so many are times the outer scale of their matrix.

// One row of x for each matrix, followed by zeros.
struct SingleRows {
  int64_t stride;
  std::unique_ptr<float[]> values;

  static bool Scales(int64_t) { return true; }

  const float* operator[](int64_t matrix) const { return values.get() + matrix * stride; }

  SingleRows(const Stack& stack, const ffi::AnyBuffer& x)
      : stride(stack.first.Depth() + kXPadding), values(new float[stack.count * stride]()) {
    const int64_t depth = stack.first.Depth();
    for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
      ReadFloats(x, matrix * depth, depth, &values[matrix * stride]);
      OuterScale(stack.kernels->format, stack[matrix]).ScaleInput(0, depth, &values[matrix * stride]);
    }
  }
};

// The rows of x for each matrix in an order for `dot_matmul`, times its outer scale if `scales`: x itself if it is
// float32, its rows are `stride` apart, and nothing scales or orders them.
struct FloatRows {
  int64_t rows;
  int64_t stride;
  std::unique_ptr<float[]> copied;
  const float* values;

  static constexpr int64_t kStep = kDepthStep;

  PlainX From(int64_t matrix, int64_t row) const { return {values + (matrix * rows + row) * stride, stride}; }

  // On the threads of a pool, or on this one if there is none.
  FloatRows(ffi::ThreadPool* pool, const Stack& stack, const ffi::AnyBuffer& x, int64_t stride, DotOrder order,
            bool scales)
      : rows(x.dimensions()[1]), stride(stride), values(static_cast<const float*>(x.untyped_data())) {
    constexpr int64_t kTaskValues = 1 << 15;
    const int64_t depth = stack.first.Depth(), all = stack.count * rows;
    const bool is_scaled = scales && OuterScale(stack.kernels->format, stack.first).of_depth != nullptr;
    const bool is_plain = order == DotOrder::kPlain;
    if (x.element_type() == ffi::F32 && depth == stride && !is_scaled && is_plain) return;
    constexpr int64_t kLine = 64 / sizeof(float);  // vectors that cross a cache line take twice as long to load
    copied.reset(new float[all * stride + kLine]);
    float* const to = copied.get() + (-reinterpret_cast<uintptr_t>(copied.get()) / sizeof(float)) % kLine;
    values = to;
    const RowGroups tasks(all, pool == nullptr ? all : std::max<int64_t>(1, kTaskValues / stride));
    const auto copy = [&](int64_t task) {
      const std::unique_ptr<float[]> natural(is_plain ? nullptr : new float[stride]);
      for (int64_t row = tasks.First(task); row < tasks.First(task + 1); ++row) {
        float* floats = is_plain ? to + row * stride : natural.get();
        ReadFloats(x, row * depth, depth, floats);
        if (is_scaled) OuterScale(stack.kernels->format, stack[row / rows]).ScaleInput(0, depth, floats);
        std::memset(floats + depth, 0, (stride - depth) * sizeof(float));
        if (!is_plain) Order(*stack.instructions, order, floats, row, to);
      }
    };
    pool == nullptr ? copy(0) : ParallelFor(*pool, tasks.count, copy);
  }

 private:
  void Order(const InstructionSet& instructions, DotOrder order, const float* floats, int64_t row, float* to) const {
    const RowGroups groups(rows, order == DotOrder::kPairs ? 1 : instructions.dot_tile_rows);
    int64_t group = row % rows * groups.count / rows;  // the one that has the row, or the one before it
    if (groups.First(group + 1) <= row % rows) ++group;
    const int64_t first = groups.First(group), size = groups.Size(group);
    instructions.order(order, floats, stride, row % rows - first, size, to + (row - row % rows + first) * stride);
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
    columns.most = kSliceColumns;
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
      : FloatRows(&pool, stack, x, stack.first.Depth(), DotOrder::kPlain, Scales(x.dimensions()[1])),
        chunks(rows, ChunkRows(pool, stack, rows)) {}
};

// As Kernels::dot_matmul takes them. Each thread has a copy of its own: to read what another core has just written took
// a third of the time of small matmuls.
class DotRows {
 public:
  static bool Scales(int64_t) { return true; }

  DotRows(const Stack& stack, const ffi::AnyBuffer& x, DotOrder order) : stack_(stack), x_(x), order_(order) {}

  const FloatRows& OfThisThread() const {
    const std::thread::id thread = std::this_thread::get_id();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& [each, rows] : all_) {
        if (each == thread) return *rows;
      }
    }
    const int64_t stride = CeilDiv(stack_.first.Depth(), kXPadding) * kXPadding;
    auto rows = std::make_unique<const FloatRows>(nullptr, stack_, x_, stride, order_, true);
    const std::lock_guard<std::mutex> lock(mutex_);
    return *all_.emplace_back(thread, std::move(rows)).second;
  }

 private:
  const Stack& stack_;
  const ffi::AnyBuffer x_;
  const DotOrder order_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::thread::id, std::unique_ptr<const FloatRows>>> all_;
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

// The rows of x for each matrix, times its outer scale, rounded to int8 as Kernels::int8_matmul takes them.
struct Int8Rows {
  const Stack& stack;
  const ffi::AnyBuffer& x;
  Int8Order order;
  int64_t rows;
  int64_t depth;  // with the zeros behind each row
  int64_t blocks;
  RowGroups chunks;  // one for each call
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> steps;
  std::unique_ptr<int32_t[]> sums;
  std::unique_ptr<float[]> totals;
  std::atomic<bool> finite{true};

  static constexpr auto kMatmul = &Kernels::int8_matmul;
  static constexpr int64_t kStep = kInt8DepthStep;
  static bool Scales(int64_t) { return true; }
  static constexpr bool kKernelScales = false;

  // For few rows, codes are read along their rows: all of a row for one of x, else as much as has its sums in L1.
  static TaskColumns Columns(const Matrix& m, int64_t rows) {
    constexpr int64_t kFewColumns = 1024;
    if (rows > kFewRows) return {kPanelColumns, 4 * kPanelColumns};
    const int64_t columns = m.contracted_axis != 0 ? kPanelColumns : rows == 1 ? kSliceColumns : kFewColumns;
    return {columns, columns};
  }
  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  Int8X Chunk(int64_t matrix, int64_t chunk) const {
    const int64_t row = matrix * rows + First(chunk), at = row * blocks;
    return {&values[row * depth], &steps[at], &sums[at], &totals[at], depth, order.block, order.scaled};
  }

  Int8Rows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, const Int8Order& order)
      : stack(stack),
        x(x),
        order(order),
        rows(x.dimensions()[1]),
        depth(CeilDiv(stack.first.Depth(), kInt8Padding) * kInt8Padding),
        blocks(depth / order.block),
        chunks(rows, kInt8ChunkRows),
        values(new int8_t[stack.count * rows * depth]),
        steps(new float[stack.count * rows * blocks]),
        sums(new int32_t[stack.count * rows * blocks]()),
        totals(new float[stack.count * rows * blocks]) {
    constexpr int64_t kTaskValues = 1 << 16;  // about 20 microseconds
    const int64_t tile_rows = stack.instructions->int8_tile_rows;
    const int64_t max_groups = CeilDiv(CeilDiv(rows, chunks.count), tile_rows);
    const int64_t at_once = CeilDiv(kTaskValues, tile_rows * depth), parts = CeilDiv(max_groups, at_once);
    ParallelFor(pool, stack.count * chunks.count * parts, [&](int64_t task) {
      const int64_t matrix = task / (chunks.count * parts), chunk = task / parts % chunks.count;
      const RowGroups groups(chunks.Size(chunk), tile_rows);
      Rounded rounded(tile_rows, depth, blocks);
      for (int64_t g = task % parts * at_once; g < std::min(groups.count, (task % parts + 1) * at_once); ++g) {
        RoundGroup(matrix, matrix * rows + chunks.First(chunk) + groups.First(g), groups.Size(g), rounded);
      }
    });
  }

 private:
  // Room for the rows of a group.
  struct Rounded {
    std::unique_ptr<float[]> floats;
    std::unique_ptr<int8_t[]> values;
    std::unique_ptr<float[]> steps;
    std::unique_ptr<int32_t[]> sums;

    Rounded(int64_t rows, int64_t depth, int64_t blocks)
        : floats(new float[depth]),
          values(new int8_t[rows * depth]),
          steps(new float[blocks]),
          sums(new int32_t[blocks]) {}
  };

  // Rounds `size` rows, and puts four bytes of each side by side.
  void RoundGroup(int64_t matrix, int64_t first, int64_t size, Rounded& rounded) {
    int8_t* to = &values[first * depth];
    for (int64_t r = 0; r < size; ++r) {
      int8_t* row = size == 1 ? to : &rounded.values[r * depth];
      RoundRow(matrix, first + r, rounded.floats.get(), row, rounded.steps.get(), rounded.sums.get());
      const int64_t together = order.scaled / order.block;  // a power of two
      float total = 0;
      for (int64_t i = 0, at = first * blocks + r; i < CeilDiv(stack.first.Depth(), order.block); ++i, at += size) {
        total = rounded.steps[i] * static_cast<float>(rounded.sums[i]) + (i & (together - 1) ? total : 0.0f);
        steps[at] = rounded.steps[i];
        sums[at] = rounded.sums[i];
        totals[at] = total;
      }
    }
    if (size > 1) InterleaveFours(rounded.values.get(), depth, size, to);
  }

  // Four bytes of each row side by side.
  static void InterleaveFours(const int8_t* rows, int64_t depth, int64_t count, int8_t* to) {
    int64_t i = 0;
#if defined(__SSE2__)
    for (; i < depth && count == 4; i += 16) {  // the rows of a tile of AVX-512
      __m128i row[4], pairs[4];
      for (int r = 0; r < 4; ++r) row[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + r * depth + i));
      for (int r = 0; r < 2; ++r) {
        pairs[r] = _mm_unpacklo_epi32(row[2 * r], row[2 * r + 1]);
        pairs[2 + r] = _mm_unpackhi_epi32(row[2 * r], row[2 * r + 1]);
      }
      __m128i* fours = reinterpret_cast<__m128i*>(to + 4 * i);
      for (int j = 0; j < 2; ++j) {
        _mm_storeu_si128(fours + 2 * j, _mm_unpacklo_epi64(pairs[2 * j], pairs[2 * j + 1]));
        _mm_storeu_si128(fours + 2 * j + 1, _mm_unpackhi_epi64(pairs[2 * j], pairs[2 * j + 1]));
      }
    }
#endif
    for (; i < depth; i += 4) {
      for (int64_t r = 0; r < count; ++r) std::memcpy(to + i * count + 4 * r, rows + r * depth + i, 4);
    }
  }

  void RoundRow(int64_t matrix, int64_t row, float* buffer, int8_t* to, float* row_steps, int32_t* row_sums) {
    const int64_t count = stack.first.Depth(), whole = count / kInt8Padding * kInt8Padding;
    const OuterScale scale(stack.kernels->format, stack[matrix]);
    const float* floats = buffer;
    std::memset(to + whole, 0, depth - whole);
    if (x.element_type() == ffi::F32 && scale.of_depth == nullptr) {
      floats = static_cast<const float*>(x.untyped_data()) + row * count;
    } else {
      ReadFloats(x, row * count, count, buffer);
      scale.ScaleInput(0, count, buffer);
    }
    if (!stack.instructions->round(floats, count, order, to, row_steps, row_sums)) finite = false;
  }
};

}  // namespace eformer
