// The calls that XLA makes.
#include "handlers.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "parallel.h"
#include "problem.h"
#include "rows.h"
#include "split_rows.h"

namespace eformer {
namespace {

constexpr int64_t kTaskValues = 1 << 20;     // values of a large matrix in a task: about 50 microseconds
constexpr int64_t kMinTaskValues = 1 << 17;  // of a small one: less is not worth waking a thread
constexpr int64_t kDecodedValues = 1 << 16;  // that are decoded in a task: about 3 microseconds
constexpr int64_t kSplitWidth = 768;         // for fewer columns, to split x costs more than it saves
constexpr int64_t kMaxDepthParts = 8;        // partial sums kept for each element of the result
constexpr int64_t kThreadTasks = 8;          // for each thread, where rows of x are many
constexpr int64_t kMinTasks = 8;             // with fewer, threads are idle

// The contracted axis, cut into parts of whole units.
struct Depth {
  int64_t all;
  int64_t unit;

  int64_t Units() const { return CeilDiv(all, unit); }
  int64_t Parts(int64_t wanted) const { return std::max<int64_t>(1, std::min({Units(), kMaxDepthParts, wanted})); }
  int64_t Start(int64_t part, int64_t parts) const { return std::min(all, Units() * part / parts * unit); }
};

// Values in a task for one row of x. Small matrices are cut finer, so that threads share them too.
int64_t TaskValues(const Matrix& m) {
  constexpr int64_t kTasks = 16;
  return std::clamp(m.rows * m.cols / kTasks, kMinTaskValues, kTaskValues);
}

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
  const int64_t parts = depth.Parts(CeilDiv(depth.all * std::min(width, kSliceColumns), TaskValues(shape)));
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
  const int64_t rows = CeilDiv(CeilDiv(TaskValues(shape), std::max<int64_t>(depth, 1)), unit) * unit;
  const int64_t tasks = CeilDiv(width, rows);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, n0 = task % tasks * rows;
    const int64_t n1 = std::min(width, n0 + rows);
    stack.kernels->row_matmul_transposed(stack[matrix], x[matrix], n0, n1, y + matrix * width);
    OuterScale(format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
}

void RowMatmul(ffi::ThreadPool& pool, const Stack& stack, const SingleRows& x, float* y) {
  const Matrix& shape = stack.first;
  const Kernels& kernels = *stack.kernels;
  if (shape.contracted_axis == 1) return RowMatmulTransposed(pool, stack, x, y);
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

// In how many tasks to cut work of so many multiplications, of which there are `others` alike: some for each thread, so
// that all end at about the same time, but no smaller than kTaskValues, which take about 10 microseconds.
int64_t TasksWorth(ffi::ThreadPool& pool, int64_t multiplications, int64_t others) {
  return std::min(multiplications / kTaskValues, CeilDiv(kThreadTasks * pool.num_threads(), others));
}

// Rows of x, as PackedRows, TiledRows or Int8Rows, in tasks of some columns, and in parts of the depth if those are
// few.
template <class Rows>
void PanelMatmul(ffi::ThreadPool& pool, const Stack& stack, const Rows& x, float* y) {
  const FormatInfo& format = stack.kernels->format;
  const Depth depth = {stack.first.Depth(), Rows::kStep};
  const int64_t width = stack.first.Width(), rows = x.rows;
  const TaskColumns columns = Rows::Columns(stack.first, rows);
  const int64_t least = CeilDiv(width, columns.most), most = CeilDiv(width, columns.least);
  const int64_t for_threads = std::min(CeilDiv(kMinTasks, stack.count * CeilDiv(rows, kMinChunkRows) * most),
                                       CeilDiv(depth.all * columns.least * std::min(rows, kChunkRows), kTaskValues));
  const int64_t parts = depth.Parts(std::max(for_threads, columns.depth_parts));
  const int64_t wanted =
      TasksWorth(pool, depth.all * width * (x.Size(0) + kFewRows), stack.count * x.chunks.count * parts);
  const int64_t at_least = std::clamp(wanted, least, most);
  const int64_t task_columns = (rows > kFewRows ? most / at_least : CeilDiv(most, at_least)) * columns.least;
  const int64_t slices = CeilDiv(width, task_columns), tasks = stack.count * x.chunks.count * slices;
  const int64_t results = stack.count * x.rows * width;
  const std::unique_ptr<float[]> partial(parts > 1 ? new float[parts * results] : nullptr);
  ParallelFor(pool, parts * tasks, [&](int64_t task) {
    const int64_t part = task / tasks, matrix = task % tasks / (x.chunks.count * slices);
    const int64_t chunk = task / slices % x.chunks.count, count = x.Size(chunk);
    const int64_t n0 = task % slices * task_columns, n1 = std::min(width, n0 + task_columns);
    Matrix m = stack[matrix];
    const OuterScale scale(format, m);
    if (scale.of_width != nullptr || (Rows::kIsScaled && scale.of_depth != nullptr)) m.scale = nullptr;
    const bool kernel_scales = Rows::kKernelScales && parts == 1 && scale.step == 1;
    if (kernel_scales) m.result_scale = scale.of_width;
    float* sums = (parts > 1 ? &partial[part * results] : y) + (matrix * x.rows + x.First(chunk)) * width;
    (stack.kernels->*Rows::kMatmul)(m, x.Chunk(matrix, chunk), count, depth.Start(part, parts),
                                    depth.Start(part + 1, parts), n0, n1, sums);
    for (int64_t row = 0; row < count && parts == 1 && !kernel_scales; ++row) {
      scale.ScaleResult(n0, n1, sums + row * width);
    }
  });
  if (parts == 1) return;
  ParallelFor(pool, stack.count * x.rows, [&](int64_t row) {
    AddParts(&partial[row * width], parts, results, width, y + row * width);
    OuterScale(format, stack[row / x.rows]).ScaleResult(0, width, y + row * width);
  });
}

// Rounds x to int8, and multiplies. False if there is no loop for that, or x is not finite.
bool Int8Matmul(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, float* y) {
  const Matrix& shape = stack.first;
  const Kernels& kernels = *stack.kernels;
  const bool scale_fits = kernels.format.scales == ScaleKind::kPerBlock || shape.scale == nullptr ||
                          OuterScale::VariesAlongOneAxis(kernels.format, shape);
  const bool dots = x.dimensions()[1] == 1 && shape.contracted_axis == 1;
  const Int8Order order = kernels.int8_order(shape, dots);
  if (!scale_fits || order.block == 0) return false;
  const Int8Rows rows(pool, stack, x, order);
  if (!rows.finite) return false;
  if (!dots) return PanelMatmul(pool, stack, rows, y), true;
  const int64_t depth = shape.Depth(), width = shape.Width();
  const int64_t at_once = CeilDiv(TaskValues(shape), depth), tasks = CeilDiv(width, at_once);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, n0 = task % tasks * at_once, n1 = std::min(width, n0 + at_once);
    kernels.int8_dots(stack[matrix], rows.Chunk(matrix, 0), n0, n1, y + matrix * width);
    OuterScale(kernels.format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
  return true;
}

// Splits few rows of x into bytes, and multiplies; false if another way is faster. Rows that can't be split are
// multiplied as floats.
bool SplitMatmul(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, float* y) {
  const Int8Order order = stack.kernels->split_order(stack.first);
  const int64_t rows = stack.count * x.dimensions()[1], width = stack.first.Width();
  if (order.block == 0 || x.dimensions()[1] > kFewRows || width < kSplitWidth) return false;
  const SplitRows split(pool, stack, x, order);
  PanelMatmul(pool, stack, split, y);
  if (std::all_of(split.fit.get(), split.fit.get() + rows, [](bool fits) { return fits; })) return true;
  const std::unique_ptr<float[]> others(new float[rows * width]);
  PanelMatmul(pool, stack, PackedRows(pool, stack, x), others.get());
  for (int64_t row = 0; row < rows; ++row) {
    if (!split.fit[row]) std::memcpy(y + row * width, &others[row * width], width * sizeof(float));
  }
  return true;
}

// Multiplies few rows of x by dot products; false if another way is faster.
bool DotMatmul(ffi::ThreadPool& pool, const Stack& stack, const ffi::AnyBuffer& x, float* y) {
  const DotOrder order = stack.kernels->dot_order(stack.first);
  if (order == DotOrder::kNone || x.dimensions()[1] > kDotRows) return false;
  PanelMatmul(pool, stack, PlainRows(stack, x, order), y);
  return true;
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
  if (round_x && Int8Matmul(pool, stack, x, sums)) return ffi::Error::Success();
  if (count > 1 && round_values && type == ffi::BF16 && stack.kernels->bfloat_matmul != nullptr) {
    PanelMatmul(pool, stack, TiledRows(pool, stack, x), sums);
  } else if (count > 1 && SplitMatmul(pool, stack, x, sums)) {
    return ffi::Error::Success();
  } else if (count > 1 && DotMatmul(pool, stack, x, sums)) {
    return ffi::Error::Success();
  } else if (count > 1 || !HasRowMatmul(*stack.kernels, stack.first)) {
    PanelMatmul(pool, stack, PackedRows(pool, stack, x), sums);
  } else {
    RowMatmul(pool, stack, SingleRows(stack, x), sums);
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
  const bool in_blocks = stack.kernels->format.scales == ScaleKind::kPerBlock && packed_axis == 0;
  const int64_t unit = in_blocks ? block_size : 1;  // blocks of rows are decoded together
  const int64_t wanted = std::min(CeilDiv(results, kDecodedValues), kThreadTasks * pool.num_threads());
  const int64_t at_once = CeilDiv(CeilDiv(results / wanted, cols), unit) * unit, tasks = CeilDiv(rows, at_once);
  ParallelFor(pool, stack.count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, r0 = task % tasks * at_once;
    stack.kernels->decode(stack[matrix], r0, std::min(rows, r0 + at_once), to + (matrix * rows + r0) * cols);
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
