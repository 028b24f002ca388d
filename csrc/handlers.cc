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

constexpr int64_t kTask = 1 << 20;      // values of the matrix that a task covers, about: 50 microseconds
constexpr int64_t kMaxDepthParts = 8;   // partial sums of one result that are kept
constexpr int64_t kEnoughTasks = 8;     // for all threads to be busy

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

// `count` values of x from `start` on.
void ReadFloats(const ffi::AnyBuffer& x, int64_t start, int64_t count, float* values) {
  if (x.element_type() == ffi::F32) {
    std::memcpy(values, static_cast<const float*>(x.untyped_data()) + start, count * sizeof(float));
    return;
  }
  const bool wide_exponent = x.element_type() == ffi::BF16;
  const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + start;
  for (int64_t i = 0; i < count; ++i) values[i] = wide_exponent ? FromBfloat16(from[i]) : FromFloat16(from[i]);
}

// A scale that varies along the depth alone goes with x, one that varies along the width alone with the result.
struct Scales {
  const float* of_depth = nullptr;
  const float* of_width = nullptr;
  int64_t step = 0;

  explicit Scales(const Matrix& m) {
    const int64_t along_depth = m.contracted_axis == 0 ? m.scale_row_step : m.scale_col_step;
    const int64_t along_width = m.contracted_axis == 0 ? m.scale_col_step : m.scale_row_step;
    if (!Apply(m)) return;
    (along_depth != 0 ? of_depth : of_width) = m.scale;
    step = along_depth != 0 ? along_depth : along_width;
  }

  static bool Apply(const Matrix& m) {
    return m.format != Format::kNf4 && m.scale != nullptr && (m.scale_row_step == 0 || m.scale_col_step == 0);
  }

  void ScaleInput(int64_t k0, int64_t k1, float* x) const {
    for (int64_t k = k0; k < k1 && of_depth != nullptr; ++k) x[k - k0] *= of_depth[k * step];
  }

  void ScaleResult(int64_t n0, int64_t n1, float* y) const {
    for (int64_t n = n0; n < n1 && of_width != nullptr; ++n) y[n] *= of_width[n * step];
  }
};

// One row of x for each matrix, with zeros behind it, and times the scales that go with it.
struct SingleRows {
  int64_t stride;
  std::unique_ptr<float[]> values;

  const float* operator[](int64_t matrix) const { return values.get() + matrix * stride; }

  SingleRows(const Stack& stack, const ffi::AnyBuffer& x)
      : stride(stack.first.Depth() + kReadAhead), values(new float[stack.count * stride]()) {
    const int64_t depth = stack.first.Depth();
    for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
      ReadFloats(x, matrix * depth, depth, &values[matrix * stride]);
      Scales(stack[matrix]).ScaleInput(0, depth, &values[matrix * stride]);
    }
  }
};

// The rows of x for each matrix as `Kernels::multiply` takes them, times the scales that go with them.
struct PackedRows {
  int64_t depth;
  int64_t rows;
  RowGroups chunks;  // each of which `multiply` can take
  std::unique_ptr<float[]> values;

  static constexpr auto kMultiply = &Kernels::multiply;
  static constexpr bool kHasScales = true;  // those that go with x

  int64_t First(int64_t chunk) const { return chunks.First(chunk); }
  int64_t Size(int64_t chunk) const { return chunks.Size(chunk); }
  const float* Chunk(int64_t matrix, int64_t chunk) const { return &values[(matrix * rows + First(chunk)) * depth]; }

  PackedRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x)
      : depth(stack.first.Depth()), rows(x.dimensions()[1]), chunks(rows, kMany), values(new float[stack.count * rows * depth]) {
    constexpr int64_t kPiece = 1024;  // of the depth
    const int64_t pieces = CeilDiv(depth, kPiece);
    ParallelFor(pool, stack.count * chunks.count * pieces, [&](int64_t task) {
      const int64_t matrix = task / (chunks.count * pieces), chunk = task / pieces % chunks.count;
      const int64_t k0 = task % pieces * kPiece, k1 = std::min(depth, k0 + kPiece);
      const Scales scales(stack[matrix]);
      const RowGroups groups(chunks.Size(chunk), stack.kernels->tall);
      for (int64_t g = 0; g < groups.count; ++g) {
        const int64_t size = groups.Size(g), first = matrix * rows + chunks.First(chunk) + groups.First(g);
        float* to = &values[first * depth + k0 * size];
        for (int64_t r = 0; r < size; ++r) {
          float row[kPiece];
          ReadFloats(x, (first + r) * depth + k0, k1 - k0, row);
          scales.ScaleInput(k0, k1, row);
          for (int64_t k = 0; k < k1 - k0; ++k) to[k * size + r] = row[k];
        }
      }
    });
  }
};

// The rows of x, bfloat16, for each matrix in tiles, as `Kernels::multiply_bfloats` takes them.
struct TiledRows {
  int64_t rows;
  int64_t deep;      // tiles
  RowGroups chunks;  // of tiles, each of which `multiply_bfloats` can take
  std::unique_ptr<uint16_t[]> values;

  static constexpr int64_t kTile = kTileRows * kTileDepth;
  static constexpr auto kMultiply = &Kernels::multiply_bfloats;
  static constexpr bool kHasScales = false;  // they would be rounded: they stay with the values

  int64_t First(int64_t chunk) const { return chunks.First(chunk) * kTileRows; }
  int64_t Size(int64_t chunk) const { return std::min(rows, First(chunk + 1)) - First(chunk); }
  const uint16_t* Chunk(int64_t matrix, int64_t chunk) const {
    return &values[(matrix * chunks.rows + chunks.First(chunk)) * deep * kTile];
  }

  TiledRows(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x)
      : rows(x.dimensions()[1]),
        deep(CeilDiv(stack.first.Depth(), kTileDepth)),
        chunks(CeilDiv(rows, kTileRows), kManyBfloats / kTileRows),
        values(new uint16_t[stack.count * chunks.rows * deep * kTile]) {
    const int64_t depth = stack.first.Depth(), row_tiles = chunks.rows;
    ParallelFor(pool, stack.count * row_tiles, [&](int64_t task) {
      const int64_t matrix = task / row_tiles, first = task % row_tiles * kTileRows;
      uint16_t* tiles = &values[task * deep * kTile];
      std::memset(tiles, 0, deep * kTile * sizeof(uint16_t));
      for (int64_t row = first; row < std::min(rows, first + kTileRows); ++row) {
        const uint16_t* from = static_cast<const uint16_t*>(x.untyped_data()) + (matrix * rows + row) * depth;
        for (int64_t k = 0; k < depth; k += kTileDepth) {
          std::memcpy(tiles + k / kTileDepth * kTile + (row - first) * kTileDepth, from + k,
                      std::min<int64_t>(kTileDepth, depth - k) * sizeof(uint16_t));
        }
      }
    });
  }
};

// One row of x for each matrix, rounded to 127 steps in either direction of its largest element.
struct IntegerRows {
  int64_t stride;
  std::unique_ptr<int8_t[]> values;
  std::unique_ptr<float[]> units;
  bool finite = true;

  IntegerRows(const Stack& stack, const SingleRows& x)
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

// The depth, which can be cut into parts of so many units.
struct Depth {
  int64_t all;
  int64_t unit;

  int64_t Units() const { return CeilDiv(all, unit); }
  int64_t Parts(int64_t wanted) const { return std::max<int64_t>(1, std::min({Units(), kMaxDepthParts, wanted})); }
  int64_t Start(int64_t part, int64_t parts) const { return std::min(all, Units() * part / parts * unit); }
};

// Adds `count` results, `stride` apart.
void AddParts(const float* results, int64_t count, int64_t stride, int64_t width, float* sums) {
  std::memcpy(sums, results, width * sizeof(float));
  for (int64_t part = 1; part < count; ++part) {
    for (int64_t n = 0; n < width; ++n) sums[n] += results[part * stride + n];
  }
}

// A row of x per matrix, contracted over the rows: in parts of the depth, and stripes of the width. How it is cut
// depends on the shape alone, so that results do too. `multiply(i, k0, k1, n0, n1, y)` does it for a part of matrix i.
template <class Multiply>
void MultiplyRowsByRows(ffi::ThreadPool& pool, const Stack& stack, const Multiply& multiply, float* y) {
  const Matrix& shape = stack.first;
  const bool in_blocks = shape.format == Format::kNf4 && shape.packed_axis == 0;
  const Depth depth = {shape.Depth(), in_blocks ? CeilDiv(kDepthStep, shape.block) * shape.block : kDepthStep};
  const int64_t width = shape.Width(), stripes = CeilDiv(width, kStripe);
  const int64_t parts = depth.Parts(CeilDiv(depth.all * std::min(width, kStripe), kTask));
  const std::unique_ptr<float[]> partial(parts > 1 ? new float[stack.count * parts * width] : nullptr);
  ParallelFor(pool, stack.count * parts * stripes, [&](int64_t task) {
    const int64_t matrix = task / (parts * stripes), part = task / stripes % parts, stripe = task % stripes;
    const int64_t n0 = stripe * kStripe, n1 = std::min(width, n0 + kStripe);
    float* to = parts > 1 ? &partial[(matrix * parts + part) * width] : y + matrix * width;
    multiply(matrix, depth.Start(part, parts), depth.Start(part + 1, parts), n0, n1, to + n0);
  });
  for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
    float* sums = y + matrix * width;
    if (parts > 1) AddParts(&partial[matrix * parts * width], parts, width, width, sums);
    Scales(stack[matrix]).ScaleResult(0, width, sums);
  }
}

void MultiplyFloatsByRows(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, float* y) {
  const auto multiply = [&](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    stack.kernels->multiply_row_by_rows(stack[i], x[i], k0, k1, n0, n1, to);
  };
  MultiplyRowsByRows(pool, stack, multiply, y);
}

void MultiplyIntegersByRows(ffi::ThreadPool& pool, const Stack& stack, const IntegerRows& x, float* y) {
  const auto multiply = [&](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    stack.kernels->multiply_integers_by_rows(stack[i], &x.values[i * x.stride], k0, k1, n0, n1, to);
    for (int64_t n = 0; n < n1 - n0; ++n) to[n] *= x.units[i];
  };
  MultiplyRowsByRows(pool, stack, multiply, y);
}

void MultiplyRowsByColumns(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, float* y) {
  const Matrix& shape = stack.first;
  const int64_t depth = shape.Depth(), width = shape.Width();
  const int64_t unit = shape.format == Format::kNf4 && shape.packed_axis == 0 ? shape.block : 4;
  const int64_t rows = CeilDiv(CeilDiv(kTask, std::max<int64_t>(depth, 1)), unit) * unit;
  const int64_t tasks = CeilDiv(width, rows);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, n0 = task % tasks * rows;
    const int64_t n1 = std::min(width, n0 + rows);
    stack.kernels->multiply_row_by_columns(stack[matrix], x[matrix], n0, n1, y + matrix * width);
    Scales(stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
}

void MultiplyOneRow(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, bool round_x, float* y) {
  if (stack.first.contracted_axis == 1) return MultiplyRowsByColumns(pool, stack, x, y);
  if (round_x && stack.kernels->has_integer_kernel(stack.first)) {
    const IntegerRows rounded(stack, x);
    if (rounded.finite) return MultiplyIntegersByRows(pool, stack, rounded, y);
  }
  MultiplyFloatsByRows(pool, stack, x, y);
}

// Rows of x, as PackedRows or TiledRows, in panels of the width, and in parts of the depth where panels are few.
template <class Rows>
void MultiplyAny(ffi::ThreadPool& pool, const Stack& stack, const Rows& x, float* y) {
  const Depth depth = {stack.first.Depth(), kDepthStep};
  const int64_t width = stack.first.Width(), panel = stack.kernels->panel(stack.first, x.Size(0));
  const int64_t panels = CeilDiv(width, panel), columns = stack.count * x.chunks.count * panels;
  const int64_t parts = depth.Parts(std::min(CeilDiv(kEnoughTasks, columns), CeilDiv(depth.all * panel * x.Size(0), kTask)));
  const int64_t results = stack.count * x.rows * width;
  const std::unique_ptr<float[]> partial(parts > 1 ? new float[parts * results] : nullptr);
  ParallelFor(pool, parts * columns, [&](int64_t task) {
    const int64_t part = task / columns, matrix = task % columns / (x.chunks.count * panels);
    const int64_t chunk = task / panels % x.chunks.count, rows = x.Size(chunk);
    const int64_t n0 = task % panels * panel, n1 = std::min(width, n0 + panel);
    Matrix m = stack[matrix];
    const Scales scales(m);
    if (scales.of_width != nullptr || (Rows::kHasScales && scales.of_depth != nullptr)) m.scale = nullptr;
    float* sums = (parts > 1 ? &partial[part * results] : y) + (matrix * x.rows + x.First(chunk)) * width;
    (stack.kernels->*Rows::kMultiply)(m, x.Chunk(matrix, chunk), rows, depth.Start(part, parts), depth.Start(part + 1, parts),
                                      n0, n1, sums);
    for (int64_t row = 0; row < rows && parts == 1; ++row) scales.ScaleResult(n0, n1, sums + row * width);
  });
  if (parts == 1) return;
  ParallelFor(pool, stack.count * x.rows, [&](int64_t row) {
    AddParts(&partial[row * width], parts, results, width, y + row * width);
    Scales(stack[row / x.rows]).ScaleResult(0, width, y + row * width);
  });
}

ffi::Error MatmulImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::RemainingArgs scales,
                      ffi::Result<ffi::AnyBuffer> y, std::string_view format, std::string_view instruction_set,
                      int64_t rows, int64_t cols, int64_t packed_axis, int64_t contracted_axis, int64_t block_size,
                      bool round_x, bool round_values) {
  Stack stack;
  const Attributes attributes = {format, instruction_set, rows, cols, packed_axis, contracted_axis, block_size};
  if (auto error = MakeStack(pool, attributes, codes, scales, stack); error.failure()) return error;
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
  if (!Is(*y, ffi::F32, {stack.count, count, width})) {
    return ffi::Error::InvalidArgument("the result must be float32 " + ShapeOf({stack.count, count, width}) + ", got " +
                                       Describe(*y));
  }
  int64_t results;
  if (count > kLongest || !Product({stack.count, count, width}, results)) {
    return ffi::Error::InvalidArgument("the result " + Describe(*y) + " would be too large for any memory");
  }
  float* sums = y->typed_data<float>();
  if (results == 0) return ffi::Error::Success();
  if (depth == 0) {
    std::memset(sums, 0, results * sizeof(float));
    return ffi::Error::Success();
  }
  if (count > 1 && round_values && type == ffi::BF16 && stack.kernels->multiply_bfloats != nullptr) {
    MultiplyAny(pool, stack, TiledRows(pool, stack, x), sums);
  } else if (count > 1 || !stack.kernels->has_row_kernel(stack.first)) {
    MultiplyAny(pool, stack, PackedRows(pool, stack, x), sums);
  } else {
    MultiplyOneRow(pool, stack, SingleRows(stack, x), round_x, sums);
  }
  return ffi::Error::Success();
}

ffi::Error DecodeImpl(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::RemainingArgs scales,
                      ffi::Result<ffi::AnyBuffer> values, std::string_view format, std::string_view instruction_set,
                      int64_t rows, int64_t cols, int64_t packed_axis, int64_t block_size) {
  Stack stack;
  const Attributes attributes = {format, instruction_set, rows, cols, packed_axis, 0, block_size};
  if (auto error = MakeStack(pool, attributes, codes, scales, stack); error.failure()) return error;
  if (!Is(*values, ffi::F32, {stack.count, rows, cols})) {
    return ffi::Error::InvalidArgument("the result must be float32 " + ShapeOf({stack.count, rows, cols}) + ", got " +
                                       Describe(*values));
  }
  int64_t results;
  if (!Product({stack.count, rows, cols}, results)) {
    return ffi::Error::InvalidArgument("the result " + Describe(*values) + " would be too large for any memory");
  }
  if (results == 0) return ffi::Error::Success();
  float* to = values->typed_data<float>();
  const int64_t at_once = CeilDiv(kTask / 4, cols), tasks = CeilDiv(rows, at_once);
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
                           .Attr<bool>("round_x")
                           .Attr<bool>("round_values"));

XLA_FFI_DEFINE_HANDLER(kDecode, WithMemory<DecodeImpl>::Call,
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
                           .Attr<int64_t>("block_size"));

XLA_FFI_Handler* MatmulHandler() { return kMatmul; }
XLA_FFI_Handler* DecodeHandler() { return kDecode; }

}  // namespace eformer
