// Matmuls cut into tasks, which the threads share.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/parallel.h"
#include "ffi/prepared.h"
#include "ffi/problem.h"

namespace eformer {

constexpr int64_t kTaskValues = 1 << 20;     // values of a large matrix in a task: about 50 microseconds
constexpr int64_t kMinTaskValues = 1 << 17;  // of a small one: less is not worth waking a thread
constexpr int64_t kTaskRows = 16;            // rows of the matrix in a task are a multiple: loops take several at once
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
inline Work WorkOfTasks(int64_t tasks, const Body& body) {
  const auto run = [body](int64_t first, int64_t end) {
    for (int64_t task = first; task < end; ++task) body(task);
  };
  return {tasks, run};
}

// Calls body(matrix, n0, n1) for ranges of columns of the result, cut at multiples of `unit`.
template <class Body>
inline Work WorkOfRanges(const Stack& stack, int64_t unit, const Body& body) {
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
inline void Run(ffi::ThreadPool& pool, const std::vector<Work>& all) {
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
inline int64_t TimeInValues(const Stack& stack, double times) {
  const double values = static_cast<double>(stack.count) * stack.first.rows * stack.first.cols;
  return std::max<int64_t>(1, static_cast<int64_t>(values * times));
}

// The same for `rows`: to decode values takes as long as to multiply kFewRows.
inline int64_t TimeInValues(const Stack& stack, int64_t rows) {
  return TimeInValues(stack, static_cast<double>(rows + kFewRows) / (1 + kFewRows));
}

// Values in a task for one row of x. Small matrices are cut finer, so that threads share them too.
inline int64_t TaskValues(const Matrix& m) {
  constexpr int64_t kTasks = 16;
  return std::clamp(m.rows * m.cols / kTasks, kMinTaskValues, kTaskValues);
}

// Adds up the results of `count` parts, `stride` apart.
inline void AddParts(const float* results, int64_t count, int64_t stride, int64_t width, float* sums) {
  std::memcpy(sums, results, width * sizeof(float));
  for (int64_t part = 1; part < count; ++part) {
    for (int64_t n = 0; n < width; ++n) sums[n] += results[part * stride + n];
  }
}

// One row of x per matrix, for contracted_axis 0, in parts of the depth and slices of the width. How it is cut depends
// on the shape alone, and so do the bits of the result. `matmul(i, k0, k1, n0, n1, y)` computes a part for matrix i.
template <class PartMatmul>
inline Work CutRowMatmul(const Stack& stack, const PartMatmul& matmul, float* y) {
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

// How many tasks to cut `multiplications` into, where `others` pieces of work of this size run beside each other: some
// tasks a thread, so that all threads end at about the same time; none below kTaskValues, about 10 microseconds.
inline int64_t TasksWorth(ffi::ThreadPool& pool, int64_t multiplications, int64_t others) {
  return std::min(multiplications / kTaskValues, CeilDiv(kThreadTasks * pool.num_threads(), others));
}

// Rows of x, as PanelRows, TiledRows or ByteRows, in tasks of some columns, and in parts of the depth if
// those are few.
template <class Rows>
inline Work PanelMatmul(ffi::ThreadPool& pool, const Stack& stack, std::shared_ptr<const Rows> shared, float* y) {
  const Rows& x = *shared;
  const FormatInfo& format = stack.kernels->format;
  const Depth depth = {stack.first.Depth(), Rows::kStep};
  const int64_t width = stack.first.Width(), rows = x.rows;
  const TaskColumns columns = x.Columns(stack.first, rows);
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

}  // namespace eformer
