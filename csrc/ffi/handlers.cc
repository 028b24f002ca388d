// The calls that XLA makes.
#include "ffi/handlers.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ffi/choose.h"
#include "ffi/slices.h"

namespace eformer {
namespace {

constexpr int64_t kDecodedValues = 1 << 16;  // that are decoded in a task: about 3 microseconds

// Checks x and the result against the stack, and plans the matmul. An empty one is no work.
ffi::Error AddMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding,
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
  all.push_back(PlanMatmul(pool, stack, x, rounding, sums));
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
  if (auto error = MakeStack(attributes, AllOf(buffers), stack); error.failure()) return error;
  PreparedX prepared(x);
  std::vector<Work> all;
  if (auto error = AddMatmul(pool, stack, prepared, {round_x, round_values}, *y, all); error.failure()) return error;
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
                                       " matrices must have as many entries, got " + std::to_string(entries));
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
    if (auto error = MakeStack(attributes, own, stacks[i]); error.failure()) return error;
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
    if (auto error = AddMatmul(pool, stacks[i], prepared, rounding, y, all); error.failure()) return error;
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
  if (auto error = MakeStack(attributes, AllOf(buffers), stack); error.failure()) return error;
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
