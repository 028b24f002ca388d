#include "ffi/choose.h"

#include <memory>
#include <optional>

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

// Whether codes have to be unpacked to be multiplied by bytes: for few rows, floats are faster.
bool Unpacks(const Problem& p) {
  const FormatInfo& format = p.kernels.format;
  if (format.planes > 1) return !IsDots(p);
  return format.values_per_byte[0] > 1 && p.matrix.packed_axis != p.matrix.contracted_axis;
}

bool Rounds(const Problem& p) { return p.rounding.x && (p.rows >= kFewRows || !Unpacks(p)) && TakesBytes(p, 1); }

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

bool FitsAnyDots(const Problem& p) { return IsDots(p) && HasOuterScale(p); }

// A vector, or each of its lanes, has one scale; or a tile of rows has one row of scales.
bool FitsDots(const Problem& p) {
  constexpr int64_t kRun = 64, kTileColumns = 4, kLaneValues = 8;
  const Matrix& m = p.matrix;
  if (m.contracted_axis == 0 || p.rows > kDotRows || !HasOuterScale(p)) return false;
  if (!InBlocks(p)) return true;
  if (m.packed_axis == 0) return m.block % kTileColumns == 0;
  return m.block % kRun == 0 || (kRun % m.block == 0 && m.block % kLaneValues == 0);
}

bool FitsAnyGemv(const Problem& p) { return IsGemv(p) && HasOuterScale(p); }

bool FitsGemv(const Problem& p) {
  const Matrix& m = p.matrix;
  if (!FitsAnyGemv(p) || !InBlocks(p)) return FitsAnyGemv(p);
  if (m.packed_axis == 0) return m.block % p.kernels.format.max_values_per_byte == 0;
  return m.block % p.instructions.lanes == 0 || p.instructions.lanes % m.block == 0;
}

struct Call {
  ffi::ThreadPool& pool;
  const Stack& stack;
  PreparedX& x;
  float* y;
};

template <auto kKernel>
Work PlanGemv(const Call& call) {
  const Stack& stack = call.stack;
  const std::shared_ptr<const SingleRows> x = call.x.Single(stack);
  const auto matmul = [x, &stack](int64_t i, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* to) {
    Matrix m = stack[i];
    m.scale = nullptr;
    (stack.kernels->*kKernel)(m, (*x)[i], k0, k1, n0, n1, to);
  };
  return CutRowMatmul(stack, matmul, call.y);
}

template <auto kKernel>
Work PlanDots(const Call& call) {
  constexpr int64_t kFewest = 4, kMostBlocks = 64;  // rows of the matrix in a task, if those are few; or of a block
  const Stack& stack = call.stack;
  const Matrix& shape = stack.first;
  const int64_t width = shape.Width(), rows = call.x.rows;
  int64_t unit = width < kMinTasks * kTaskRows ? kFewest : kTaskRows;
  if (stack.kernels->format.scales == ScaleKind::kPerBlock && shape.packed_axis == 0) {
    unit = shape.block < kMostBlocks ? CeilDiv(unit, shape.block) * shape.block : kMostBlocks;
  }
  const bool in_lanes = kKernel == &Kernels::dots && shape.packed_axis == 1 && stack.kernels->format.reorders;
  const std::shared_ptr<const DotRows> ordered = call.x.Dots(call.pool, stack, in_lanes);
  Work work = WorkOfRanges(stack, unit, [=, &stack, y = call.y](int64_t matrix, int64_t n0, int64_t n1) {
    Matrix m = stack[matrix];
    const OuterScale scale(stack.kernels->format, m);
    m.scale = nullptr;
    float* sums = y + matrix * rows * width;
    (stack.kernels->*kKernel)(m, ordered->From(matrix, 0), rows, n0, n1, sums);
    for (int64_t row = 0; row < rows; ++row) scale.ScaleResult(n0, n1, sums + row * width);
  });
  work.is_fine = true;
  work.values = TimeInValues(stack, (rows + 2) / 9.0);  // seven rows take as long as one alone
  return work;
}

Work PlanGemm(const Call& call) {
  return PanelMatmul(call.pool, call.stack, call.x.Panels(call.pool, call.stack), call.y);
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
  const int64_t width = shape.Width(), rows = stack.count * call.x.rows, fitting = bytes->Fitting();
  if (fitting == 0 || (kParts == 1 && fitting < rows)) return std::nullopt;
  Work work;
  if (call.x.rows > 1 || shape.contracted_axis == 0) {
    work = PanelMatmul(call.pool, stack, bytes, call.y);
  } else {
    work = WorkOfRanges(stack, kTaskRows, [=, &stack, &kernels, y = call.y](int64_t matrix, int64_t n0, int64_t n1) {
      kernels.byte_dots(stack[matrix], bytes->Chunk(matrix, 0), n0, n1, y + matrix * width);
      OuterScale(kernels.format, stack[matrix]).ScaleResult(n0, n1, y + matrix * width);
    });
  }
  if (fitting == rows) return work;
  work.finish = [=, finish = work.finish] {
    if (finish) finish();
    const std::unique_ptr<float[]> floats(new float[rows * width]);
    Work of_floats = PlanFloats({call.pool, call.stack, call.x, floats.get()});
    of_floats.values = TimeInValues(call.stack, call.x.rows);
    Run(call.pool, {of_floats});
    for (int64_t row = 0; row < rows; ++row) {
      if (!bytes->fit[row]) std::memcpy(call.y + row * width, &floats[row * width], width * sizeof(float));
    }
  };
  return work;
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
    {"dots", FitsDots, Always<PlanDots<&Kernels::dots>>},
    {"any dots", FitsAnyDots, Always<PlanDots<&Kernels::dots_any>>},
    {"gemv", FitsGemv, Always<PlanGemv<&Kernels::gemv>>},
    {"any gemv", FitsAnyGemv, Always<PlanGemv<&Kernels::gemv_any>>},
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
  Matrix& m = stack.first;
  m.rows = q.rows;
  m.cols = q.cols;
  m.packed_axis = static_cast<int>(q.packed_axis);
  m.contracted_axis = static_cast<int>(q.contracted_axis);
  m.block = std::max<int64_t>(1, q.block_size);
  return LoopName({*stack.instructions, *stack.kernels, m, q.x_rows, false, {q.round_x, false}});
}

Work PlanMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding, float* y) {
  return PlanFrom(0, {pool, stack, x, y}, rounding);
}

}  // namespace eformer
