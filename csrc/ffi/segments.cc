// x @ a matrix of bits, or the difference of two, by Redundant Segment Reduction (arXiv 2411.06360): for each block of
// k columns, the elements of x whose rows have the same k bits are summed first.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/parallel.h"
#include "ffi/problem.h"

namespace eformer {
namespace {

constexpr int64_t kTaskBlocks = 8;
constexpr int kVectorRows = 8;  // rows of x in a vector

typedef float RowVector __attribute__((vector_size(4 * kVectorRows)));

// y[j] = the sum of x[i] where codes[0][i] has bit j (bit 0 is the highest), minus that sum for codes[1]. `sums`
// has room for 2^k values; a code is masked to its k bits, as in reference.py. Elements without the bit are multiplied
// by 0, so that infinities give NaN as in a dense matmul.
template <class Value, class Code>
void SegmentMatmul(const Value* x, int64_t n, const std::vector<const Code*>& codes, int64_t k, Value* sums, Value* y) {
  const unsigned mask = (1u << k) - 1;
  std::fill(sums, sums + mask + 1, Value{});
  const Code* first = codes[0];
  if (codes.size() == 1) {
    for (int64_t i = 0; i < n; ++i) sums[first[i] & mask] += x[i];
  } else {
    const Code* second = codes[1];
    for (int64_t i = 0; i < n; ++i) {
      sums[first[i] & mask] += x[i];
      sums[second[i] & mask] -= x[i];
    }
  }
  for (int64_t j = 0; j < k; ++j) {
    const int64_t half = int64_t{1} << (k - 1 - j);
    Value with{}, without{};
    for (int64_t i = 0; i < half; ++i) {
      without += sums[i];
      with += sums[i + half];
      sums[i] += sums[i + half];
    }
    y[j] = with + without * 0.0f;
  }
}

struct Call {
  const float* x;
  int64_t count, rows, n, blocks, k;
  std::vector<const void*> codes;
  float* y;
};

template <class Value, class Code>
void Run(ffi::ThreadPool& pool, const Call& c) {
  constexpr int64_t kLanes = sizeof(Value) / sizeof(float);
  const int64_t groups = CeilDiv(c.rows, kLanes), tasks = CeilDiv(c.blocks, kTaskBlocks);
  const std::unique_ptr<Value[]> packed(new Value[c.count * groups * c.n]());
  float* to = reinterpret_cast<float*>(packed.get());
  for (int64_t row = 0; row < c.count * c.rows; ++row) {
    const int64_t group = row / c.rows * groups + row % c.rows / kLanes, lane = row % c.rows % kLanes;
    for (int64_t i = 0; i < c.n; ++i) to[(group * c.n + i) * kLanes + lane] = c.x[row * c.n + i];
  }
  ParallelFor(pool, c.count * tasks, [&](int64_t task) {
    const std::unique_ptr<Value[]> sums(new Value[int64_t{1} << c.k]);
    std::vector<Value> y(c.k);
    const int64_t matrix = task / tasks, start = task % tasks * kTaskBlocks;
    for (int64_t block = start; block < std::min(c.blocks, start + kTaskBlocks); ++block) {
      std::vector<const Code*> codes;
      for (const void* of_all : c.codes)
        codes.push_back(static_cast<const Code*>(of_all) + (matrix * c.blocks + block) * c.n);
      for (int64_t group = 0; group < groups; ++group) {
        SegmentMatmul(&packed[(matrix * groups + group) * c.n], c.n, codes, c.k, sums.get(), y.data());
        const float* found = reinterpret_cast<const float*>(y.data());
        for (int64_t lane = 0; lane < std::min(kLanes, c.rows - group * kLanes); ++lane) {
          float* out = c.y + ((matrix * c.rows + group * kLanes + lane) * c.blocks + block) * c.k;
          for (int64_t j = 0; j < c.k; ++j) out[j] = found[j * kLanes + lane];
        }
      }
    }
  });
}

ffi::Error SegmentsImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs codes, ffi::Result<ffi::AnyBuffer> y,
                        int64_t k) {
  const auto shape = x.dimensions();
  if (x.element_type() != ffi::F32 || shape.size() != 3) {
    return ffi::Error::InvalidArgument("x must be float32 of 3 axes, got " + Describe(x));
  }
  if (k < 1 || k > 16 || codes.size() < 1 || codes.size() > 2) {
    return ffi::Error::InvalidArgument("k must be 1 to 16, with one or two buffers of codes, got " + std::to_string(k) +
                                       " and " + std::to_string(codes.size()));
  }
  Call call = {x.typed_data<float>(), shape[0], shape[1], shape[2], 0, k, {}, y->typed_data<float>()};
  const auto type = k <= 8 ? ffi::U8 : ffi::U16;
  for (size_t i = 0; i < codes.size(); ++i) {
    const auto buffer = *codes.get<ffi::AnyBuffer>(i);
    const auto found = buffer.dimensions();
    if (buffer.element_type() != type || found.size() != 3 || found[0] != call.count || found[2] != call.n ||
        (i > 0 && found[1] != call.blocks)) {
      return ffi::Error::InvalidArgument("codes must be " + std::string(k <= 8 ? "uint8" : "uint16") + " (" +
                                         std::to_string(call.count) + ", blocks, " + std::to_string(call.n) +
                                         "), got " + Describe(buffer));
    }
    call.blocks = found[1];
    call.codes.push_back(buffer.untyped_data());
  }
  int64_t width, results;
  if (!Product({call.blocks, k}, width) || std::max({call.count, call.rows, call.n, width}) > kMaxAxis) {
    return ffi::Error::InvalidArgument("x " + Describe(x) + " and " + std::to_string(call.blocks) + " blocks of " +
                                       std::to_string(k) + " columns are too large for any memory");
  }
  if (auto error = CheckResult(*y, call.count, call.rows, width, results); error.failure()) return error;
  if (results == 0) return ffi::Error::Success();
  const bool one = call.rows == 1;
  const auto run = k <= 8 ? (one ? Run<float, uint8_t> : Run<RowVector, uint8_t>)
                          : (one ? Run<float, uint16_t> : Run<RowVector, uint16_t>);
  run(pool, call);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(
    kSegments, WithMemory<SegmentsImpl>::Call,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>().Attr<int64_t>(
        "k"));

XLA_FFI_Handler* SegmentsHandler() { return kSegments; }

}  // namespace eformer
