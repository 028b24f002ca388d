#include "ffi/choose.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "ffi/handlers.h"

namespace eformer {
namespace {

constexpr int64_t kSplitWidth = 768;     // for fewer columns, to split x costs more than it saves,
constexpr int64_t kDotSplitWidth = 256;  // or than dot products along rows, for up to
constexpr int64_t kDotSplitRows = 4;     // rows of x

bool InBlocks(const Problem& p) { return p.kernels.format.scales == ScaleKind::kPerBlock; }

// Whether the scale of the whole matrix is applied to x or to the result. Only `gemm` knows another.
bool HasOuterScale(const Problem& p) {
  return InBlocks(p) || OuterScale::VariesAlongOneAxis(p.kernels.format, p.matrix);
}

bool IsDots(const Problem& p) { return p.rows == 1 && p.matrix.contracted_axis == 1; }
bool IsGemv(const Problem& p) { return p.rows == 1 && p.matrix.contracted_axis == 0; }

bool TakesBytes(const Problem& p, int64_t parts) {
  return HasOuterScale(p) && p.kernels.byte_order(p.matrix, p.rows, parts).block != 0;
}

bool Rounds(const Problem& p) { return p.rounding.x && TakesBytes(p, 1); }

// Why x can't be rounded for this matrix, or why that would be slower, as byte_order knows.
const char* WhyNotBytes(const Problem& p) {
  constexpr int64_t kLeastBlock = 16;
  if (p.kernels.byte_matmul == nullptr) return "its values are no integers of 8 bits times a step";
  if (InBlocks(p) && p.matrix.packed_axis != p.matrix.contracted_axis) return "its blocks run along the other axis";
  if (InBlocks(p) && p.matrix.block % kLeastBlock != 0) return "its blocks are no multiple of 16";
  return "its codes would have to be unpacked first, which is faster from 16 rows on";
}

// Few rows of float x are split into three bytes a value, where that is faster.
bool Splits(const Problem& p) {
  const bool beats_dots = p.matrix.contracted_axis == 1 && p.rows <= kDotSplitRows;
  const bool pays =
      p.rows == 1 || (p.rows <= kFewRows && p.matrix.Width() >= (beats_dots ? kDotSplitWidth : kSplitWidth));
  return pays && TakesBytes(p, kXParts);
}

bool FitsBfloatGemm(const Problem& p) {
  return p.rows > 1 && p.rounding.values && p.x_is_bfloat && p.kernels.bfloat_matmul != nullptr;
}

// A vector, or each of its lanes, has one scale; or a tile of rows, which is whole, has one row of scales.
bool FitsDots(const Problem& p) {
  constexpr int64_t kRun = 64, kTileColumns = 4, kLaneValues = 8;
  const Matrix& m = p.matrix;
  if (m.contracted_axis == 0 || p.rows > kDotRows || !HasOuterScale(p) || p.kernels.dots == nullptr) return false;
  if (m.packed_axis == 0) return m.rows % kTileColumns == 0 && (!InBlocks(p) || m.block % kTileColumns == 0);
  return !InBlocks(p) || m.block % kRun == 0 || (kRun % m.block == 0 && m.block % kLaneValues == 0);
}

bool FitsGemv(const Problem& p) {
  const Matrix& m = p.matrix;
  if (!IsGemv(p) || !HasOuterScale(p) || p.kernels.gemv == nullptr) return false;
  if (!InBlocks(p)) return true;
  if (m.packed_axis == 0) return m.block % p.kernels.format.max_values_per_byte == 0;
  return m.block % p.instructions.lanes == 0 || p.instructions.lanes % m.block == 0;
}

struct Call {
  ffi::ThreadPool& pool;
  const Stack& stack;
  PreparedX& x;
  float* y;
};

// Whether each row of x times any value is finite, with room for sums: else scale * sum + offset * (sum of x) could be
// NaN where the sum of scaled values is infinite. Without offsets, all do.
template <class RowOf>
std::vector<char> ModerateRows(const Stack& stack, int64_t rows, const RowOf& row_of) {
  constexpr float kLargest = 0x1p100f;
  const Matrix& m = stack.first;
  const FormatInfo& format = stack.kernels->format;
  std::vector<char> fit(rows, true);
  if (format.scales != ScaleKind::kPerBlock) return fit;
  if (m.offsets.entries == nullptr && m.centre == format.centre) return fit;
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = row_of(row);
    bool all = true;
    for (int64_t k = 0; k < m.Depth(); ++k) all &= x[k] <= kLargest && x[k] >= -kLargest;
    fit[row] = all;
  }
  return fit;
}

// `work`, and then by another plan the rows of x that do not fit it.
Work Complete(const Call& call, Work work, const std::vector<char>& fit, Work (*plan)(const Call&)) {
  if (std::count(fit.begin(), fit.end(), true) == static_cast<int64_t>(fit.size())) return work;
  work.finish = [=, finish = work.finish] {
    if (finish) finish();
    const int64_t width = call.stack.first.Width(), rows = static_cast<int64_t>(fit.size());
    const std::unique_ptr<float[]> sums(new float[rows * width]);
    Work others = plan({call.pool, call.stack, call.x, sums.get()});
    others.values = TimeInValues(call.stack, call.x.rows);
    Run(call.pool, {others});
    for (int64_t row = 0; row < rows; ++row) {
      if (!fit[row]) std::memcpy(call.y + row * width, &sums[row * width], width * sizeof(float));
    }
  };
  return work;
}

Work PlanGemm(const Call& call) {
  return PanelMatmul(call.pool, call.stack, call.x.Panels(call.pool, call.stack), call.y);
}

Work PlanGemv(const Call& call) {
  const Stack& stack = call.stack;
  const std::shared_ptr<const PaddedRows> x = call.x.Padded(call.pool, stack, false);
  const auto matmul = [x, &stack](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    Matrix m = stack[i];
    m.scale = nullptr;
    stack.kernels->gemv(m, x->From(i, 0).values, k0, k1, n0, n1, to);
  };
  const auto fit = ModerateRows(stack, stack.count, [&](int64_t i) { return x->From(i, 0).values; });
  return Complete(call, CutRowMatmul(stack, matmul, call.y), fit, PlanGemm);
}

Work PlanDots(const Call& call) {
  constexpr int64_t kFewest = 4, kMostBlocks = 64;  // rows of the matrix in a task, if those are few; or of a block
  const Stack& stack = call.stack;
  const Matrix& shape = stack.first;
  const int64_t width = shape.Width(), rows = call.x.rows;
  int64_t unit = width < kMinTasks * kTaskRows ? kFewest : kTaskRows;
  if (stack.kernels->format.scales == ScaleKind::kPerBlock && shape.packed_axis == 0) {
    unit = shape.block < kMostBlocks ? CeilDiv(unit, shape.block) * shape.block : kMostBlocks;
  }
  const bool in_lanes = shape.packed_axis == 1 && stack.kernels->format.reorders;
  const std::shared_ptr<const PaddedRows> ordered = call.x.Padded(call.pool, stack, in_lanes);
  Work work = WorkOfRanges(stack, unit, [=, &stack, y = call.y](int64_t matrix, int64_t n0, int64_t n1) {
    Matrix m = stack[matrix];
    const OuterScale scale(stack.kernels->format, m);
    m.scale = nullptr;
    float* sums = y + matrix * rows * width;
    stack.kernels->dots(m, ordered->From(matrix, 0), rows, n0, n1, sums);
    for (int64_t row = 0; row < rows; ++row) scale.ScaleResult(n0, n1, sums + row * width);
  });
  work.is_fine = true;
  work.values = TimeInValues(stack, (rows + 2) / 9.0);  // seven rows take as long as one alone
  if (shape.packed_axis == 1) return work;
  const auto fit = ModerateRows(stack, stack.count * rows, [&](int64_t row) { return ordered->From(0, row).values; });
  return Complete(call, work, fit, PlanGemm);
}

Work PlanBfloatGemm(const Call& call) {
  return PanelMatmul(call.pool, call.stack, call.x.Tiled(call.pool, call.stack), call.y);
}

Work PlanFloats(const Call& call);

// With x as bytes; nothing if it has values that can't be rounded. Rows that can't be split are multiplied as floats.
template <int64_t kParts>
std::optional<Work> PlanBytes(const Call& call) {
  const Stack& stack = call.stack;
  const Matrix& shape = stack.first;
  const Kernels& kernels = *stack.kernels;
  const auto bytes = call.x.Bytes(call.pool, stack, kernels.byte_order(shape, call.x.rows, kParts));
  const int64_t fitting = std::count(bytes->fit.begin(), bytes->fit.end(), true);
  if (fitting == 0 || (kParts == 1 && fitting < stack.count * call.x.rows)) return std::nullopt;
  Work work;
  if (call.x.rows > 1 || shape.contracted_axis == 0) {
    work = PanelMatmul(call.pool, stack, bytes, call.y);
  } else {
    const int64_t width = shape.Width();
    work = WorkOfRanges(stack, kTaskRows, [=, &stack, &kernels, y = call.y](int64_t matrix, int64_t n0, int64_t n1) {
      kernels.byte_dots(stack[matrix], bytes->Chunk(matrix, 0), n0, n1, y + matrix * width);
      OuterScale(kernels.format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
    });
  }
  return Complete(call, work, bytes->fit, PlanFloats);
}

template <auto kPlan>
std::optional<Work> Always(const Call& call) {
  return kPlan(call);
}

// The first that fits multiplies. Those of bytes may find that x does not; those of floats are from kFirstOfFloats on.
constexpr struct {
  const char* name;
  bool (*fits)(const Problem&);
  std::optional<Work> (*plan)(const Call&);
} kLoops[] = {
    {"rounded dots", [](const Problem& p) { return IsDots(p) && Rounds(p); }, PlanBytes<1>},
    {"rounded gemv", [](const Problem& p) { return IsGemv(p) && Rounds(p); }, PlanBytes<1>},
    {"rounded gemm", Rounds, PlanBytes<1>},
    {"bfloat16 gemm", FitsBfloatGemm, Always<PlanBfloatGemm>},
    {"split dots", [](const Problem& p) { return IsDots(p) && Splits(p); }, PlanBytes<kXParts>},
    {"split gemv", [](const Problem& p) { return IsGemv(p) && Splits(p); }, PlanBytes<kXParts>},
    {"split gemm", Splits, PlanBytes<kXParts>},
    {"dots", FitsDots, Always<PlanDots>},
    {"gemv", FitsGemv, Always<PlanGemv>},
    {"gemm", [](const Problem&) { return true; }, Always<PlanGemm>},
};
constexpr int kFirstOfFloats = 7;

Problem ProblemOf(const Call& call, const Rounding& rounding) {
  const Stack& stack = call.stack;
  const bool is_bfloat = call.x.buffer.element_type() == ffi::BF16;
  return {*stack.instructions, *stack.kernels, stack.first, call.x.rows, is_bfloat, rounding};
}

Work PlanFrom(int first, const Call& call, const Rounding& rounding) {
  const Problem problem = ProblemOf(call, rounding);
  for (int i = first;; ++i) {
    if (!kLoops[i].fits(problem)) continue;
    if (auto work = kLoops[i].plan(call)) return *std::move(work);
  }
}

Work PlanFloats(const Call& call) { return PlanFrom(kFirstOfFloats, call, {}); }

}  // namespace

const char* LoopName(const Problem& problem) {
  int i = 0;
  while (!kLoops[i].fits(problem)) ++i;
  return kLoops[i].name;
}

std::string LoopOf(const LoopQuery& q) {
  Stack stack;
  const Attributes attributes = {q.format,          q.instruction_set, q.rows, q.cols, q.packed_axis,
                                 q.contracted_axis, q.block_size,      0,      ""};
  if (auto error = ChooseKernels(attributes, stack); error.failure()) return error.message();
  stack.first.block = std::max<int64_t>(1, q.block_size);
  const Problem problem = {*stack.instructions, *stack.kernels, stack.first, q.x_rows, false, {q.round_x, false}};
  const std::string why = q.round_x && !Rounds(problem) ? std::string("\n") + WhyNotBytes(problem) : "";
  return LoopName(problem) + why;
}

Work PlanMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding, float* y) {
  return PlanFrom(0, {pool, stack, x, y}, rounding);
}

}  // namespace eformer
