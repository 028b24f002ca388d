// The calls that XLA makes.
#include "handlers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "parallel.h"
#include "problem.h"

namespace eformer {
namespace {

constexpr int64_t kTaskValues = 1 << 20;    // values of the matrix in a task: about 50 microseconds
constexpr int64_t kMaxDepthParts = 8;       // partial sums kept for each element of the result
constexpr int64_t kMinTasks = 8;            // with fewer, threads are idle
constexpr int64_t kMaxInt8Depth = 1 << 17;  // sums of more terms of 127 * 128 may not fit into 32 bits

float FromBfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

float FromFloat16(uint16_t bits) {
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
void ReadFloats(const ffi::AnyBuffer& x, int64_t start, int64_t count, float* values) {
  if (x.element_type() == ffi::F32) {
    std::memcpy(values, static_cast<const float*>(x.untyped_data()) + start, count * sizeof(float));
    return;
  }
  const bool wide_exponent = x.element_type() == ffi::BF16;
  const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + start;
  for (int64_t i = 0; i < count; ++i) values[i] = wide_exponent ? FromBfloat16(from[i]) : FromFloat16(from[i]);
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
    for (int64_t k = k0; k < k1 && of_depth != nullptr; ++k) x[k - k0] *= of_depth[k * step];
  }

  void ScaleResult(int64_t n0, int64_t n1, float* y) const {
    for (int64_t n = n0; n < n1 && of_width != nullptr; ++n) y[n] *= of_width[n * step];
  }
};

// One row of x for each matrix, times its outer scale and followed by zeros.
struct SingleRows {
  int64_t stride;
  std::unique_ptr<float[]> values;

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

// The rows of x for each matrix, times its outer scale, as Kernels::matmul takes them.
struct PackedRows {
  int64_t depth;
  int64_t rows;
  RowGroups chunks;  // one for each call
  std::unique_ptr<float[]> values;

  static constexpr auto kMatmul = &Kernels::matmul;
  static constexpr bool kIsScaled = true;

  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  const float* Chunk(int64_t matrix, int64_t chunk) const { return &values[(matrix * rows + First(chunk)) * depth]; }

  PackedRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x)
      : depth(stack.first.Depth()),
        rows(x.dimensions()[1]),
        chunks(rows, kChunkRows),
        values(new float[stack.count * rows * depth]) {
    constexpr int64_t kPieceDepth = 1024;
    const int64_t pieces = CeilDiv(depth, kPieceDepth);
    ParallelFor(pool, stack.count * chunks.count * pieces, [&](int64_t task) {
      const int64_t matrix = task / (chunks.count * pieces), chunk = task / pieces % chunks.count;
      const int64_t k0 = task % pieces * kPieceDepth, k1 = std::min(depth, k0 + kPieceDepth);
      const OuterScale scale(stack.kernels->format, stack[matrix]);
      const RowGroups groups(chunks.Size(chunk), stack.instructions->tile_rows);
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t size = groups.Size(g), first = matrix * rows + chunks.First(chunk) + groups.First(g);
        float* to = &values[first * depth + k0 * size];
        for (int64_t r = 0; r < size; ++r) {
          float row[kPieceDepth];
          ReadFloats(x, (first + r) * depth + k0, k1 - k0, row);
          scale.ScaleInput(k0, k1, row);
          for (int64_t k = 0; k < k1 - k0; ++k) to[k * size + r] = row[k];
        }
      }
    });
  }
};

// The rows of bfloat16 x for each matrix in tiles, as Kernels::bfloat_matmul takes them.
struct TiledRows {
  int64_t rows;
  int64_t depth_tiles;
  RowGroups chunks;  // of tiles, one for each call
  std::unique_ptr<uint16_t[]> values;

  static constexpr int64_t kTileValues = kAmxRows * kAmxDepth;
  static constexpr auto kMatmul = &Kernels::bfloat_matmul;
  static constexpr bool kIsScaled = false;  // x times the scale would have to be rounded

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

// One row of x for each matrix, rounded to integers from -127 to 127 times a unit.
struct Int8Rows {
  int64_t stride;
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> units;
  bool finite = true;

  Int8Rows(const Stack& stack, const SingleRows& x)
      : stride(x.stride), values(new int8_t[stack.count * stride]()), units(new float[stack.count]) {
    for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
      float largest = 0;
      for (int64_t k = 0; k < stride; ++k) {
        const float size = std::fabs(x[matrix][k]);
        if (!(size <= std::numeric_limits<float>::max())) finite = false;
        largest = std::max(largest, size);
      }
      units[matrix] = largest / 127;
      const float steps = largest > 0 ? 127 / largest : 0;
      if (!finite || !(steps <= std::numeric_limits<float>::max())) {
        finite = false;
        return;
      }
      for (int64_t k = 0; k < stride; ++k) {
        values[matrix * stride + k] = static_cast<int8_t>(std::nearbyint(x[matrix][k] * steps));
      }
    }
  }
};

// The contracted axis, cut into parts of whole units.
struct Depth {
  int64_t all;
  int64_t unit;

  int64_t Units() const { return CeilDiv(all, unit); }
  int64_t Parts(int64_t wanted) const { return std::max<int64_t>(1, std::min({Units(), kMaxDepthParts, wanted})); }
  int64_t Start(int64_t part, int64_t parts) const { return std::min(all, Units() * part / parts * unit); }
};

// Adds up the results of `count` parts, `stride` apart.
void AddParts(const float* results, int64_t count, int64_t stride, int64_t width, float* sums) {
  std::memcpy(sums, results, width * sizeof(float));
  for (int64_t part = 1; part < count; ++part) {
    for (int64_t n = 0; n < width; ++n) sums[n] += results[part * stride + n];
  }
}

// One row of x per matrix, for contracted_axis 0, in parts of the depth and slices of the width. How it is cut depends
// on the shape alone, and so do the bits of the result. `matmul(i, k0, k1, n0, n1, y)` computes a part for matrix i.
template <class PartMatmul>
void CutRowMatmul(ffi::ThreadPool& pool, const Stack& stack, const PartMatmul& matmul, float* y) {
  const Matrix& shape = stack.first;
  const FormatInfo& format = stack.kernels->format;
  const int64_t block = format.scales == ScaleKind::kPerBlock && shape.packed_axis == 0 ? shape.block : 1;
  const Depth depth = {shape.Depth(), CeilDiv(kDepthStep, block) * block};
  const int64_t width = shape.Width(), slices = CeilDiv(width, kSliceColumns);
  const int64_t parts = depth.Parts(CeilDiv(depth.all * std::min(width, kSliceColumns), kTaskValues));
  const std::unique_ptr<float[]> partial(parts > 1 ? new float[stack.count * parts * width] : nullptr);
  ParallelFor(pool, stack.count * parts * slices, [&](int64_t task) {
    const int64_t matrix = task / (parts * slices), part = task / slices % parts;
    const int64_t n0 = task % slices * kSliceColumns, n1 = std::min(width, n0 + kSliceColumns);
    float* to = parts > 1 ? &partial[(matrix * parts + part) * width] : y + matrix * width;
    matmul(matrix, depth.Start(part, parts), depth.Start(part + 1, parts), n0, n1, to + n0);
  });
  for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
    float* sums = y + matrix * width;
    if (parts > 1) AddParts(&partial[matrix * parts * width], parts, width, width, sums);
    OuterScale(format, stack[matrix]).ScaleResult(0, width, sums);
  }
}

void RowMatmulTransposed(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, float* y) {
  const Matrix& shape = stack.first;
  const FormatInfo& format = stack.kernels->format;
  const int64_t depth = shape.Depth(), width = shape.Width();
  const bool in_blocks = format.scales == ScaleKind::kPerBlock && shape.packed_axis == 0;
  const int64_t unit = in_blocks ? shape.block : format.max_values_per_byte;
  const int64_t rows = CeilDiv(CeilDiv(kTaskValues, std::max<int64_t>(depth, 1)), unit) * unit;
  const int64_t tasks = CeilDiv(width, rows);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, n0 = task % tasks * rows;
    const int64_t n1 = std::min(width, n0 + rows);
    stack.kernels->row_matmul_transposed(stack[matrix], x[matrix], n0, n1, y + matrix * width);
    OuterScale(format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
}

void RowMatmul(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, bool round_x, float* y) {
  const Matrix& shape = stack.first;
  const Kernels& kernels = *stack.kernels;
  if (shape.contracted_axis == 1) return RowMatmulTransposed(pool, stack, x, y);
  if (round_x && kernels.int8_row_matmul != nullptr && shape.packed_axis == 0 && shape.rows <= kMaxInt8Depth) {
    const Int8Rows rounded(stack, x);
    if (rounded.finite) {
      const auto matmul = [&](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
        kernels.int8_row_matmul(stack[i], &rounded.values[i * rounded.stride], k0, k1, n0, n1, to);
        for (int64_t n = 0; n < n1 - n0; ++n) to[n] *= rounded.units[i];
      };
      return CutRowMatmul(pool, stack, matmul, y);
    }
  }
  const auto matmul = [&](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    kernels.row_matmul(stack[i], x[i], k0, k1, n0, n1, to);
  };
  CutRowMatmul(pool, stack, matmul, y);
}

// Whether there is a loop for one row of x. Such loops do not apply a broadcast scale that varies along both axes.
bool HasRowMatmul(const Kernels& kernels, const Matrix& m) {
  const bool has_loop = m.contracted_axis == 1 || kernels.row_matmul != nullptr;
  return has_loop &&
         (kernels.format.scales == ScaleKind::kPerBlock || OuterScale::VariesAlongOneAxis(kernels.format, m));
}

int64_t TaskColumns(const Matrix& m, int64_t rows_of_x) {
  if (rows_of_x > kFewRows) return 4 * kPanelColumns;
  return m.contracted_axis == 0 ? 8 * kPanelColumns : 2 * kPanelColumns;
}

// Rows of x, as PackedRows or TiledRows, in tasks of some columns, and in parts of the depth if those are few.
template <class Rows>
void PanelMatmul(ffi::ThreadPool& pool, const Stack& stack, const Rows& x, float* y) {
  const FormatInfo& format = stack.kernels->format;
  const Depth depth = {stack.first.Depth(), kDepthStep};
  const int64_t width = stack.first.Width(), task_columns = TaskColumns(stack.first, x.Size(0));
  const int64_t slices = CeilDiv(width, task_columns), tasks = stack.count * x.chunks.count * slices;
  const int64_t parts =
      depth.Parts(std::min(CeilDiv(kMinTasks, tasks), CeilDiv(depth.all * task_columns * x.Size(0), kTaskValues)));
  const int64_t results = stack.count * x.rows * width;
  const std::unique_ptr<float[]> partial(parts > 1 ? new float[parts * results] : nullptr);
  ParallelFor(pool, parts * tasks, [&](int64_t task) {
    const int64_t part = task / tasks, matrix = task % tasks / (x.chunks.count * slices);
    const int64_t chunk = task / slices % x.chunks.count, rows = x.Size(chunk);
    const int64_t n0 = task % slices * task_columns, n1 = std::min(width, n0 + task_columns);
    Matrix m = stack[matrix];
    const OuterScale scale(format, m);
    if (scale.of_width != nullptr || (Rows::kIsScaled && scale.of_depth != nullptr)) m.scale = nullptr;
    float* sums = (parts > 1 ? &partial[part * results] : y) + (matrix * x.rows + x.First(chunk)) * width;
    (stack.kernels->*Rows::kMatmul)(m, x.Chunk(matrix, chunk), rows, depth.Start(part, parts),
                                    depth.Start(part + 1, parts), n0, n1, sums);
    for (int64_t row = 0; row < rows && parts == 1; ++row) scale.ScaleResult(n0, n1, sums + row * width);
  });
  if (parts == 1) return;
  ParallelFor(pool, stack.count * x.rows, [&](int64_t row) {
    AddParts(&partial[row * width], parts, results, width, y + row * width);
    OuterScale(format, stack[row / x.rows]).ScaleResult(0, width, y + row * width);
  });
}

ffi::Error MatmulImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs buffers, ffi::Result<ffi::AnyBuffer> y,
                      std::string_view format, std::string_view instruction_set, int64_t rows, int64_t cols,
                      int64_t packed_axis, int64_t contracted_axis, int64_t block_size, int64_t superblock_size,
                      std::string_view scale_names, bool round_x, bool round_values) {
  Stack stack;
  const Attributes attributes = {format,     instruction_set, rows,       cols, packed_axis, contracted_axis,
                                 block_size, superblock_size, scale_names};
  if (auto error = MakeStack(pool, attributes, buffers, stack); error.failure()) return error;
  const int64_t depth = stack.first.Depth(), width = stack.first.Width();
  const auto type = x.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) {
    return ffi::Error::InvalidArgument("x must be float32, bfloat16 or float16, got " + Describe(x));
  }
  const auto shape = x.dimensions();
  if (shape.size() != 3 || shape[0] != stack.count || shape[2] != depth) {
    return ffi::Error::InvalidArgument("x must be (" + std::to_string(stack.count) + ", any, " + std::to_string(depth) +
                                       "), got " + Describe(x));
  }
  const int64_t count = shape[1];
  int64_t results;
  if (auto error = CheckResult(*y, stack.count, count, width, results); error.failure()) return error;
  float* sums = y->typed_data<float>();
  if (results == 0) return ffi::Error::Success();
  if (depth == 0) {
    std::memset(sums, 0, results * sizeof(float));
    return ffi::Error::Success();
  }
  if (count > 1 && round_values && type == ffi::BF16 && stack.kernels->bfloat_matmul != nullptr) {
    PanelMatmul(pool, stack, TiledRows(pool, stack, x), sums);
  } else if (count > 1 || !HasRowMatmul(*stack.kernels, stack.first)) {
    PanelMatmul(pool, stack, PackedRows(pool, stack, x), sums);
  } else {
    RowMatmul(pool, stack, SingleRows(stack, x), round_x, sums);
  }
  return ffi::Error::Success();
}

ffi::Error DecodeImpl(ffi::ThreadPool pool, ffi::RemainingArgs buffers, ffi::Result<ffi::AnyBuffer> values,
                      std::string_view format, std::string_view instruction_set, int64_t rows, int64_t cols,
                      int64_t packed_axis, int64_t block_size, int64_t superblock_size, std::string_view scale_names) {
  Stack stack;
  const Attributes attributes = {format,     instruction_set, rows,       cols, packed_axis, 0,
                                 block_size, superblock_size, scale_names};
  if (auto error = MakeStack(pool, attributes, buffers, stack); error.failure()) return error;
  int64_t results;
  if (auto error = CheckResult(*values, stack.count, rows, cols, results); error.failure()) return error;
  if (results == 0) return ffi::Error::Success();
  float* to = values->typed_data<float>();
  const int64_t at_once = CeilDiv(kTaskValues / 4, cols), tasks = CeilDiv(rows, at_once);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, r0 = task % tasks * at_once;
    const Matrix m = stack[matrix];
    for (int64_t r = r0; r < std::min(rows, r0 + at_once); ++r) {
      stack.kernels->decode(m, r, to + (matrix * rows + r) * cols);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kMatmul, WithMemory<MatmulImpl>::Call,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("format")
                           .Attr<std::string_view>("instruction_set")
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("cols")
                           .Attr<int64_t>("packed_axis")
                           .Attr<int64_t>("contracted_axis")
                           .Attr<int64_t>("block_size")
                           .Attr<int64_t>("superblock_size")
                           .Attr<std::string_view>("scale_names")
                           .Attr<bool>("round_x")
                           .Attr<bool>("round_values"));

XLA_FFI_DEFINE_HANDLER(kDecode, WithMemory<DecodeImpl>::Call,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<std::string_view>("format")
                           .Attr<std::string_view>("instruction_set")
                           .Attr<int64_t>("rows")
                           .Attr<int64_t>("cols")
                           .Attr<int64_t>("packed_axis")
                           .Attr<int64_t>("block_size")
                           .Attr<int64_t>("superblock_size")
                           .Attr<std::string_view>("scale_names"));

XLA_FFI_Handler* MatmulHandler() { return kMatmul; }
XLA_FFI_Handler* DecodeHandler() { return kDecode; }

}  // namespace eformer
