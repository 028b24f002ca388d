// The calls that XLA makes.
#include "ffi/handlers.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ffi/parallel.h"
#include "ffi/prepared.h"
#include "ffi/problem.h"
#include "ffi/slices.h"

namespace eformer {
namespace {

constexpr int64_t kTaskValues = 1 << 20;     // values of a large matrix in a task: about 50 microseconds
constexpr int64_t kMinTaskValues = 1 << 17;  // of a small one: less is not worth waking a thread
constexpr int64_t kTaskRows = 16;            // rows of the matrix in a task are a multiple: loops take several at once
constexpr int64_t kDecodedValues = 1 << 16;  // that are decoded in a task: about 3 microseconds
constexpr int64_t kSplitWidth = 768;         // for fewer columns, to split x costs more than it saves,
constexpr int64_t kDotSplitWidth = 256;      // or than dot products along rows, for up to
constexpr int64_t kDotSplitRows = 4;         // rows of x
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

// A matmul whose tasks can run in any order, together with those of other matmuls.
struct Work {
  int64_t tasks = 0;
  std::function<void(int64_t, int64_t)> run = nullptr;  // tasks from the first to the second
  std::function<void()> finish = nullptr;               // after all tasks, if there is more to do
  int64_t values = 0;                                   // how long it takes, as TimeInValues says
  bool is_fine = false;                                 // whether many short ranges of tasks take no longer than few
};

template <class Body>
Work WorkOfTasks(int64_t tasks, const Body& body) {
  const auto run = [body](int64_t first, int64_t end) {
    for (int64_t task = first; task < end; ++task) body(task);
  };
  return {tasks, run};
}

// Calls body(matrix, n0, n1) for ranges of columns of the result, cut at multiples of `unit`.
template <class Body>
Work WorkOfRanges(const Stack& stack, int64_t unit, const Body& body) {
  const int64_t width = stack.first.Width(), tasks = CeilDiv(width, unit);
  const auto run = [=](int64_t first, int64_t end) {
    for (int64_t task = first, next; task < end; task = next) {
      const int64_t matrix = task / tasks, n0 = task % tasks * unit;
      next = std::min(end, (matrix + 1) * tasks);
      body(matrix, n0, std::min(width, n0 + (next - task) * unit));
    }
  };
  return {stack.count * tasks, run};
}

// Cuts all of it into parts of about the same length, for which the threads wake once. That takes them about 5
// microseconds, in which the calling thread runs some of the parts if they are short.
void Run(ffi::ThreadPool& pool, const std::vector<Work>& all) {
  constexpr int64_t kShortParts = 4;  // for each thread
  int64_t total = 0;
  bool is_fine = true;
  for (const Work& work : all) total += work.values, is_fine &= work.is_fine;
  const int64_t threads = pool.num_threads(),
                wanted = CeilDiv(total, std::clamp(total / 16, kMinTaskValues, kTaskValues));
  const int64_t rounds = std::max(CeilDiv(wanted, threads), is_fine && wanted > 1 ? kShortParts : 1);
  const int64_t parts = rounds * std::min(wanted, threads);
  // The first task of `work` that belongs to a part, if `before` is the sum of `values` of works before it.
  const auto first_of = [&](int64_t part, const Work& work, int64_t before) {
    const int64_t start = total / parts * part + total % parts * part / parts - before;
    const double share = static_cast<double>(start) / work.values;
    return static_cast<int64_t>(std::clamp(share, 0.0, 1.0) * work.tasks + 0.5);
  };
  ParallelFor(pool, parts, wanted, [&](int64_t part) {
    int64_t before = 0;
    for (const Work& work : all) {
      const int64_t first = first_of(part, work, before), end = first_of(part + 1, work, before);
      if (first < end) work.run(first, end);
      before += work.values;
    }
  });
  for (const Work& work : all) {
    if (work.finish) work.finish();
  }
}

// The values of matrices for one row of x that take as long as these do, `times` over.
int64_t TimeInValues(const Stack& stack, double times) {
  const double values = static_cast<double>(stack.count) * stack.first.rows * stack.first.cols;
  return std::max<int64_t>(1, static_cast<int64_t>(values * times));
}

// The same for `rows`: to decode values takes as long as to multiply kFewRows.
int64_t TimeInValues(const Stack& stack, int64_t rows) {
  return TimeInValues(stack, static_cast<double>(rows + kFewRows) / (1 + kFewRows));
}

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
Work CutRowMatmul(const Stack& stack, const PartMatmul& matmul, float* y) {
  const Matrix& shape = stack.first;
  const FormatInfo& format = stack.kernels->format;
  const int64_t block = format.scales == ScaleKind::kPerBlock && shape.packed_axis == 0 ? shape.block : 1;
  const Depth depth = {shape.Depth(), CeilDiv(kDepthStep, block) * block};
  const int64_t width = shape.Width(), slices = CeilDiv(width, kSliceColumns);
  const int64_t parts = depth.Parts(CeilDiv(depth.all * std::min(width, kSliceColumns), TaskValues(shape)));
  const std::shared_ptr<float[]> partial(parts > 1 ? new float[stack.count * parts * width] : nullptr);
  const auto run = [=](int64_t task) {
    const int64_t matrix = task / (parts * slices), part = task / slices % parts;
    const int64_t n0 = task % slices * kSliceColumns, n1 = std::min(width, n0 + kSliceColumns);
    float* to = parts > 1 ? &partial[(matrix * parts + part) * width] : y + matrix * width;
    matmul(matrix, depth.Start(part, parts), depth.Start(part + 1, parts), n0, n1, to + n0);
  };
  const auto finish = [=, &stack, &format] {
    for (int64_t matrix = 0; matrix < stack.count; ++matrix) {
      float* sums = y + matrix * width;
      if (parts > 1) AddParts(&partial[matrix * parts * width], parts, width, width, sums);
      OuterScale(format, stack[matrix]).ScaleResult(0, width, sums);
    }
  };
  Work work = WorkOfTasks(stack.count * parts * slices, run);
  work.finish = finish;
  return work;
}

Work RowMatmulTransposed(const Stack& stack, std::shared_ptr<const SingleRows> x, float* y) {
  const FormatInfo& format = stack.kernels->format;
  const int64_t width = stack.first.Width();
  const bool in_blocks = format.scales == ScaleKind::kPerBlock && stack.first.packed_axis == 0;
  const int64_t unit = in_blocks ? stack.first.block : kTaskRows;  // whole bytes of codes
  return WorkOfRanges(stack, unit, [=, &stack, &format](int64_t matrix, int64_t n0, int64_t n1) {
    stack.kernels->row_matmul_transposed(stack[matrix], (*x)[matrix], n0, n1, y + matrix * width);
    OuterScale(format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
}

Work RowMatmul(const Stack& stack, std::shared_ptr<const SingleRows> x, float* y) {
  if (stack.first.contracted_axis == 1) return RowMatmulTransposed(stack, x, y);
  const auto matmul = [x, &stack](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    stack.kernels->row_matmul(stack[i], (*x)[i], k0, k1, n0, n1, to);
  };
  return CutRowMatmul(stack, matmul, y);
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

// Rows of x, as PanelRows, TiledRows, Int8Rows or SplitRows, in tasks of some columns, and in parts of the depth if
// those are few.
template <class Rows>
Work PanelMatmul(ffi::ThreadPool& pool, const Stack& stack, std::shared_ptr<const Rows> shared, float* y) {
  const Rows& x = *shared;
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
  const std::shared_ptr<float[]> partial(parts > 1 ? new float[parts * results] : nullptr);
  const auto run = [=, &stack, &format](int64_t task) {
    const Rows& x = *shared;
    const int64_t part = task / tasks, matrix = task % tasks / (x.chunks.count * slices);
    const int64_t chunk = task / slices % x.chunks.count, count = x.Size(chunk);
    const int64_t n0 = task % slices * task_columns, n1 = std::min(width, n0 + task_columns);
    Matrix m = stack[matrix];
    const OuterScale scale(format, m);
    if (scale.of_width != nullptr || (Rows::Scales(rows) && scale.of_depth != nullptr)) m.scale = nullptr;
    const bool kernel_scales = Rows::kKernelScales && parts == 1 && scale.step == 1;
    if (kernel_scales) m.result_scale = scale.of_width;
    float* sums = (parts > 1 ? &partial[part * results] : y) + (matrix * x.rows + x.First(chunk)) * width;
    (stack.kernels->*Rows::kMatmul)(m, x.Chunk(matrix, chunk), count, depth.Start(part, parts),
                                    depth.Start(part + 1, parts), n0, n1, sums);
    for (int64_t row = 0; row < count && parts == 1 && !kernel_scales; ++row) {
      scale.ScaleResult(n0, n1, sums + row * width);
    }
  };
  Work work = WorkOfTasks(parts * tasks, run);
  if (parts == 1) return work;
  work.finish = [=, &pool, &stack, &format] {
    ParallelFor(pool, stack.count * rows, [&](int64_t row) {
      AddParts(&partial[row * width], parts, results, width, y + row * width);
      OuterScale(format, stack[row / rows]).ScaleResult(0, width, y + row * width);
    });
  };
  return work;
}

// With x rounded to int8; nothing if there is no loop for that, or x is not finite.
std::optional<Work> Int8Matmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, float* y) {
  const Matrix& shape = stack.first;
  const Kernels& kernels = *stack.kernels;
  const bool scale_fits = kernels.format.scales == ScaleKind::kPerBlock || shape.scale == nullptr ||
                          OuterScale::VariesAlongOneAxis(kernels.format, shape);
  const bool dots = x.rows == 1 && shape.contracted_axis == 1;
  const Int8Order order = kernels.int8_order(shape, dots);
  if (!scale_fits || order.block == 0) return std::nullopt;
  const std::shared_ptr<const Int8Rows> rounded = x.Rounded(pool, stack, order);
  if (!rounded->finite) return std::nullopt;
  if (!dots) return PanelMatmul(pool, stack, rounded, y);
  const int64_t width = shape.Width();
  return WorkOfRanges(stack, kTaskRows, [=, &stack, &kernels](int64_t matrix, int64_t n0, int64_t n1) {
    kernels.int8_dots(stack[matrix], rounded->Chunk(matrix, 0), n0, n1, y + matrix * width);
    OuterScale(kernels.format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
  });
}

// With few rows of x split into bytes; nothing if another way is faster. Rows that can't be split are multiplied as
// floats.
std::optional<Work> SplitMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, float* y) {
  const Int8Order order = stack.kernels->split_order(stack.first);
  const int64_t rows = stack.count * x.rows, width = stack.first.Width();
  const bool beats_dots = stack.first.contracted_axis == 1 && x.rows <= kDotSplitRows;
  if (order.block == 0 || x.rows > kFewRows || width < (beats_dots ? kDotSplitWidth : kSplitWidth)) return std::nullopt;
  const std::shared_ptr<const SplitRows> split = x.Split(pool, stack, order);
  Work work = PanelMatmul(pool, stack, split, y);
  if (std::all_of(split->fit.get(), split->fit.get() + rows, [](bool fits) { return fits; })) return work;
  const auto finish_split = work.finish;
  work.finish = [=, &pool, &stack, &x] {
    if (finish_split) finish_split();
    const std::unique_ptr<float[]> others(new float[rows * width]);
    Work others_work = PanelMatmul(pool, stack, x.Panels(pool, stack), others.get());
    others_work.values = TimeInValues(stack, x.rows);
    Run(pool, {others_work});
    for (int64_t row = 0; row < rows; ++row) {
      if (!split->fit[row]) std::memcpy(y + row * width, &others[row * width], width * sizeof(float));
    }
  };
  return work;
}

// Of few rows of x by dot products; nothing if another way is faster.
std::optional<Work> DotMatmul(const Stack& stack, PreparedX& x, float* y) {
  const DotOrder order = stack.kernels->dot_order(stack.first);
  if (order == DotOrder::kNone || x.rows > kDotRows) return std::nullopt;
  constexpr int64_t kFewest = 4;  // rows of the matrix in a task, if those are few
  const int64_t width = stack.first.Width(), rows = x.rows;
  const int64_t unit = width < kMinTasks * kTaskRows ? kFewest : kTaskRows;
  const std::shared_ptr<const DotRows> ordered = x.Dots(stack, order);
  Work work = WorkOfRanges(stack, unit, [=, &stack](int64_t matrix, int64_t n0, int64_t n1) {
    Matrix m = stack[matrix];
    const OuterScale scale(stack.kernels->format, m);
    if (scale.of_width != nullptr || scale.of_depth != nullptr) m.scale = nullptr;
    float* sums = y + matrix * rows * width;
    stack.kernels->dot_matmul(m, ordered->OfThisThread().From(matrix, 0), rows, n0, n1, sums);
    for (int64_t row = 0; row < rows; ++row) scale.ScaleResult(n0, n1, sums + row * width);
  });
  work.is_fine = true;
  work.values = TimeInValues(stack, (rows + 2) / 9.0);  // seven rows take as long as one alone
  return work;
}

// What a matmul may round.
struct Rounding {
  bool x;       // to int8, where that is faster
  bool values;  // of the matrix to bfloat16, if x is bfloat16
};

// x times the matrices of a stack, in the fastest way.
Work Matmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding, float* y) {
  if (rounding.x) {
    if (auto work = Int8Matmul(pool, stack, x, y)) return *std::move(work);
  }
  const bool several = x.rows > 1;
  if (several && rounding.values && x.buffer.element_type() == ffi::BF16 && stack.kernels->bfloat_matmul != nullptr) {
    return PanelMatmul(pool, stack, x.Tiled(pool, stack), y);
  }
  if (several) {
    if (auto work = SplitMatmul(pool, stack, x, y)) return *std::move(work);
    if (auto work = DotMatmul(stack, x, y)) return *std::move(work);
  }
  if (several || !HasRowMatmul(*stack.kernels, stack.first)) {
    return PanelMatmul(pool, stack, x.Panels(pool, stack), y);
  }
  return RowMatmul(stack, x.Single(stack), y);
}

// Checks x and the result against the stack, and plans the matmul. An empty one is no work.
ffi::Error PlanMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding,
                      ffi::AnyBuffer y, std::vector<Work>& all) {
  const int64_t depth = stack.first.Depth(), width = stack.first.Width();
  const auto type = x.buffer.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) {
    return ffi::Error::InvalidArgument("x must be float32, bfloat16 or float16, got " + Describe(x.buffer));
  }
  const auto shape = x.buffer.dimensions();
  if (shape.size() != 3 || shape[0] != stack.count || shape[2] != depth) {
    return ffi::Error::InvalidArgument("x must be (" + std::to_string(stack.count) + ", any, " + std::to_string(depth) +
                                       "), got " + Describe(x.buffer));
  }
  int64_t results;
  if (auto error = CheckResult(y, stack.count, x.rows, width, results); error.failure()) return error;
  float* sums = y.typed_data<float>();
  if (results != 0 && depth == 0) std::memset(sums, 0, results * sizeof(float));
  if (results == 0 || depth == 0) return ffi::Error::Success();
  all.push_back(Matmul(pool, stack, x, rounding, sums));
  if (all.back().values == 0) all.back().values = TimeInValues(stack, x.rows);
  return ffi::Error::Success();
}

ffi::Error MatmulImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs buffers, ffi::Result<ffi::AnyBuffer> y,
                      std::string_view format, std::string_view instruction_set, int64_t rows, int64_t cols,
                      int64_t packed_axis, int64_t contracted_axis, int64_t block_size, int64_t superblock_size,
                      std::string_view scale_names, bool round_x, bool round_values) {
  Stack stack;
  const Attributes attributes = {format,     instruction_set, rows,       cols, packed_axis, contracted_axis,
                                 block_size, superblock_size, scale_names};
  if (auto error = MakeStack(pool, attributes, AllOf(buffers), stack); error.failure()) return error;
  PreparedX prepared(x);
  std::vector<Work> all;
  if (auto error = PlanMatmul(pool, stack, prepared, {round_x, round_values}, *y, all); error.failure()) return error;
  Run(pool, all);
  return ffi::Error::Success();
}

typedef ffi::Span<const int64_t> Numbers;

// The parts of `text` between separators: one more than there are separators.
std::vector<std::string_view> Parts(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t start = 0, end = 0; end != text.npos; start = end + 1) {
    end = text.find(separator, start);
    parts.push_back(text.substr(start, end - start));
  }
  return parts;
}

// Several matmuls of the same x. Attributes have an entry for each matrix, `is_stack` one for each buffer.
ffi::Error MatmulsImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer index, ffi::RemainingArgs buffers,
                       ffi::RemainingRets results, std::string_view formats, std::string_view instruction_set,
                       Numbers rows, Numbers cols, Numbers packed_axis, Numbers contracted_axis, Numbers block_size,
                       Numbers superblock_size, std::string_view scale_names, Numbers round_x, Numbers round_values,
                       Numbers buffer_count, Numbers is_stack) {
  const size_t count = results.size();
  const std::vector<std::string_view> format = Parts(formats, ' '), names = Parts(scale_names, ';');
  for (size_t entries :
       {format.size(), names.size(), rows.size(), cols.size(), packed_axis.size(), contracted_axis.size(),
        block_size.size(), superblock_size.size(), round_x.size(), round_values.size(), buffer_count.size()}) {
    if (entries == count) continue;
    return ffi::Error::InvalidArgument("attributes of " + std::to_string(count) +
                                       " matrices must have as many "
                                       "entries, got " +
                                       std::to_string(entries));
  }
  if (is_stack.size() != buffers.size() || x.dimensions().size() != 3) {
    return ffi::Error::InvalidArgument("x must have 3 axes and is_stack an entry for each of " +
                                       std::to_string(buffers.size()) + " buffers, got " + Describe(x) + " and " +
                                       std::to_string(is_stack.size()) + " entries");
  }
  Slices slices;
  if (auto error = slices.Choose(index); error.failure()) return error;
  const Buffers all_buffers = AllOf(buffers);
  std::vector<Stack> stacks(count);
  size_t used = 0;
  for (size_t i = 0; i < count; ++i) {
    if (buffer_count[i] < 0 || static_cast<size_t>(buffer_count[i]) > buffers.size() - used) {
      return ffi::Error::InvalidArgument("buffer_count takes more than the " + std::to_string(buffers.size()) +
                                         " buffers of the call");
    }
    Buffers own;
    own.reserve(buffer_count[i]);
    for (const size_t end = used + buffer_count[i]; used < end; ++used) {
      const bool sliced = is_stack[used] != 0;
      if (auto error = slices.Add(all_buffers[used], sliced, x.dimensions()[0], own); error.failure()) return error;
    }
    const Attributes attributes = {format[i],     instruction_set,    rows[i],
                                   cols[i],       packed_axis[i],     contracted_axis[i],
                                   block_size[i], superblock_size[i], names[i]};
    if (auto error = MakeStack(pool, attributes, own, stacks[i]); error.failure()) return error;
  }
  if (used != buffers.size()) {
    return ffi::Error::InvalidArgument("buffer_count takes " + std::to_string(used) + " of the " +
                                       std::to_string(buffers.size()) + " buffers of the call");
  }
  PreparedX prepared(x);
  std::vector<Work> all;
  all.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Rounding rounding = {round_x[i] != 0, round_values[i] != 0};
    const ffi::AnyBuffer y = **results.get<ffi::AnyBuffer>(i);
    if (auto error = PlanMatmul(pool, stacks[i], prepared, rounding, y, all); error.failure()) return error;
  }
  Run(pool, all);
  return ffi::Error::Success();
}

ffi::Error DecodeImpl(ffi::ThreadPool pool, ffi::RemainingArgs buffers, ffi::Result<ffi::AnyBuffer> values,
                      std::string_view format, std::string_view instruction_set, int64_t rows, int64_t cols,
                      int64_t packed_axis, int64_t block_size, int64_t superblock_size, std::string_view scale_names) {
  Stack stack;
  const Attributes attributes = {format,     instruction_set, rows,       cols, packed_axis, 0,
                                 block_size, superblock_size, scale_names};
  if (auto error = MakeStack(pool, attributes, AllOf(buffers), stack); error.failure()) return error;
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

XLA_FFI_DEFINE_HANDLER(kMatmuls, WithMemory<MatmulsImpl>::Call,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("format")
                           .Attr<std::string_view>("instruction_set")
                           .Attr<Numbers>("rows")
                           .Attr<Numbers>("cols")
                           .Attr<Numbers>("packed_axis")
                           .Attr<Numbers>("contracted_axis")
                           .Attr<Numbers>("block_size")
                           .Attr<Numbers>("superblock_size")
                           .Attr<std::string_view>("scale_names")
                           .Attr<Numbers>("round_x")
                           .Attr<Numbers>("round_values")
                           .Attr<Numbers>("buffer_count")
                           .Attr<Numbers>("is_stack"));

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
XLA_FFI_Handler* MatmulsHandler() { return kMatmuls; }
XLA_FFI_Handler* DecodeHandler() { return kDecode; }

}  // namespace eformer
