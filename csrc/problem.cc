#include "problem.h"

#include <algorithm>
#include <cstring>

#if defined(EFORMER_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "handlers.h"
#include "parallel.h"

namespace eformer {
namespace {

constexpr int64_t kNested = 256;  // scales that share a scale of their own

#if defined(EFORMER_EMULATE_AVX512)

bool HasAmx() { return true; }

#elif defined(EFORMER_AMX) && defined(__linux__)

// Linux gives tiles to those who ask: the whole process may use them then.
bool HasAmx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // of the fourth register
  constexpr long kAskForState = 0x1023, kTileData = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
  return __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

#else

bool HasAmx() { return false; }

#endif

// The kernels that this processor can run, the best first.
std::vector<const Kernels*> AllKernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(EFORMER_EMULATE_AVX512)
  const bool has_avx512 = has_avx2, has_vnni = has_avx2;
#else
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(EFORMER_AMX)
  if (has_vnni && HasAmx()) found.push_back(&amx::kKernels);
#endif
  if (has_vnni) found.push_back(&avx512_vnni::kKernels);
  if (has_avx512) found.push_back(&avx512::kKernels);
  if (has_avx2) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&portable::kKernels);
  return found;
}

const Kernels* FindKernels(std::string_view name) {
  static const std::vector<const Kernels*> all = AllKernels();
  for (const Kernels* kernels : all) {
    if (name.empty() || name == kernels->name) return kernels;
  }
  return nullptr;
}

// map[code] * nested + offset, for each code of each matrix.
void DecodeScales(ffi::ThreadPool& pool, const uint8_t* codes, const float* nested, const float* offset,
                  const float* values, int64_t count, int64_t size, float* scales) {
  const int64_t groups = CeilDiv(size, kNested);
  constexpr int64_t kGroupsAtOnce = 64;
  const int64_t tasks = CeilDiv(groups, kGroupsAtOnce);
  ParallelFor(pool, count * tasks, [&](int64_t task) {
    const int64_t matrix = task / tasks, start = task % tasks * kGroupsAtOnce;
    for (int64_t g = start; g < std::min(groups, start + kGroupsAtOnce); ++g) {
      const float scale = nested[matrix * groups + g];
      const int64_t end = std::min(size, (g + 1) * kNested);
      for (int64_t i = matrix * size + g * kNested; i < matrix * size + end; ++i) {
        scales[i] = values[codes[i]] * scale + offset[matrix];  // rounded twice, as the oracle does: -ffp-contract=off
      }
    }
  });
}

ffi::Error TakeNf4Scales(ffi::ThreadPool& pool, const ffi::RemainingArgs& scales, Stack& stack) {
  Matrix& m = stack.first;
  const int64_t rows = m.packed_axis == 0 ? CeilDiv(m.rows, m.block) : m.rows;
  const int64_t cols = m.BlockScaleStride();
  stack.scale_size = rows * cols;
  if (scales.size() != 1 && scales.size() != 4) {
    return ffi::Error::InvalidArgument("nf4 takes 1 or 4 scale buffers, got " + std::to_string(scales.size()));
  }
  const auto absmax = *scales.get<ffi::AnyBuffer>(0);
  if (scales.size() == 1) {
    if (!Is(absmax, ffi::F32, {stack.count, rows, cols})) {
      return ffi::Error::InvalidArgument("absmax must be float32 " + ShapeOf({stack.count, rows, cols}) + ", got " +
                                         Describe(absmax));
    }
    m.scale = absmax.typed_data<float>();
    return ffi::Error::Success();
  }
  const auto nested = *scales.get<ffi::AnyBuffer>(1), offset = *scales.get<ffi::AnyBuffer>(2);
  const auto values = *scales.get<ffi::AnyBuffer>(3);
  if (!Is(absmax, ffi::U8, {stack.count, rows, cols}) ||
      !Is(nested, ffi::F32, {stack.count, CeilDiv(stack.scale_size, kNested)}) || !Is(offset, ffi::F32, {stack.count}) ||
      !Is(values, ffi::F32, {256})) {
    return ffi::Error::InvalidArgument("quantized absmax must be uint8 " + ShapeOf({stack.count, rows, cols}) +
                                       " with float32 nested, offset and 256 values, got " + Describe(absmax) + ", " +
                                       Describe(nested) + ", " + Describe(offset) + " and " + Describe(values));
  }
  stack.decoded_scales.reset(new float[stack.count * stack.scale_size]);
  DecodeScales(pool, absmax.typed_data<uint8_t>(), nested.typed_data<float>(), offset.typed_data<float>(),
               values.typed_data<float>(), stack.count, stack.scale_size, stack.decoded_scales.get());
  m.scale = stack.decoded_scales.get();
  return ffi::Error::Success();
}

ffi::Error TakeScales(const ffi::RemainingArgs& scales, Stack& stack) {
  Matrix& m = stack.first;
  if (scales.size() == 0) return ffi::Error::Success();
  const auto scale = *scales.get<ffi::AnyBuffer>(0);
  const auto shape = scale.dimensions();
  const bool fits = scales.size() == 1 && scale.element_type() == ffi::F32 && shape.size() == 3 &&
                    shape[0] == stack.count && (shape[1] == 1 || shape[1] == m.rows) &&
                    (shape[2] == 1 || shape[2] == m.cols);
  if (!fits) {
    return ffi::Error::InvalidArgument("there must be one scale, float32, that broadcasts over " +
                                       ShapeOf({stack.count, m.rows, m.cols}) + ", got " + Describe(scale));
  }
  m.scale = scale.typed_data<float>();
  m.scale_row_step = shape[1] == 1 ? 0 : shape[2];
  m.scale_col_step = shape[2] == 1 ? 0 : 1;
  stack.scale_size = shape[1] * shape[2];
  return ffi::Error::Success();
}

// Codes of kTernary behind the end of the packed axis stand for nothing, and may be any. Kernels multiply them by 0, which
// is right but for a NaN: if there is one, they get a copy without.
void ClearPadding(Stack& stack) {
  Matrix& m = stack.first;
  const int64_t length = m.packed_axis == 0 ? m.rows : m.cols, lines = m.packed_axis == 0 ? m.cols : m.rows;
  if (m.format != Format::kTernary || length % 4 == 0 || lines == 0) return;
  const int padding = 0xff << 2 * (length % 4) & 0xff;
  const int64_t bytes = m.Bytes(), row_bytes = m.RowBytes();
  const int64_t last = m.packed_axis == 0 ? bytes - row_bytes : row_bytes - 1, step = m.packed_axis == 0 ? 1 : row_bytes;
  const auto ForEachLast = [&](const auto& use) {  // byte along the packed axis
    for (int64_t i = 0; i < stack.count; ++i) {
      for (int64_t line = 0; line < lines; ++line) use(i * bytes + last + line * step);
    }
  };
  int found = 0;
  ForEachLast([&](int64_t at) { found |= m.codes[at] >> 1 & ~m.codes[at] & padding >> 1 & 0x55; });
  if (found == 0) return;
  stack.cleared_codes.reset(new uint8_t[stack.count * bytes]);
  std::memcpy(stack.cleared_codes.get(), m.codes, stack.count * bytes);
  ForEachLast([&](int64_t at) { stack.cleared_codes[at] &= ~padding; });
  m.codes = stack.cleared_codes.get();
}

}  // namespace

std::vector<const char*> InstructionSets() {
  std::vector<const char*> names;
  for (const Kernels* kernels : AllKernels()) names.push_back(kernels->name);
  return names;
}

void OutOfMemory() { throw std::bad_alloc(); }

std::string Describe(const ffi::AnyBuffer& buffer) {
  static constexpr std::pair<ffi::DataType, const char*> kNames[] = {
      {ffi::PRED, "bool"},     {ffi::S8, "int8"},       {ffi::S16, "int16"},   {ffi::S32, "int32"},
      {ffi::S64, "int64"},     {ffi::U8, "uint8"},      {ffi::U16, "uint16"},  {ffi::U32, "uint32"},
      {ffi::U64, "uint64"},    {ffi::F16, "float16"},   {ffi::F32, "float32"}, {ffi::F64, "float64"},
      {ffi::BF16, "bfloat16"}, {ffi::C64, "complex64"},
  };
  std::string text = "dtype " + std::to_string(static_cast<int>(buffer.element_type()));
  for (const auto& [type, name] : kNames) {
    if (type == buffer.element_type()) text = name;
  }
  text += " (";
  for (int64_t length : buffer.dimensions()) text += std::to_string(length) + ", ";
  return text + ")";
}

std::string ShapeOf(std::initializer_list<int64_t> shape) {
  std::string text = "(";
  for (int64_t length : shape) text += std::to_string(length) + ", ";
  return text + ")";
}

bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto found = buffer.dimensions();
  return buffer.element_type() == type && found.size() == shape.size() &&
         std::equal(shape.begin(), shape.end(), found.begin());
}

ffi::Error MakeStack(ffi::ThreadPool& pool, const Attributes& attributes, const ffi::AnyBuffer& codes,
                     const ffi::RemainingArgs& scales, Stack& stack) {
  const auto& a = attributes;
  stack.kernels = FindKernels(a.instruction_set);
  if (stack.kernels == nullptr) {
    return ffi::Error::InvalidArgument("this processor has no instruction set \"" + std::string(a.instruction_set) +
                                       "\", or this build does not know it");
  }
  Matrix& m = stack.first;
  if (a.format == "int8") {
    m.format = Format::kInt8;
  } else if (a.format == "nf4") {
    m.format = Format::kNf4;
  } else if (a.format == "ternary") {
    m.format = Format::kTernary;
  } else {
    return ffi::Error::InvalidArgument("unknown format \"" + std::string(a.format) + "\": there are int8, nf4 and ternary");
  }
  const bool blocks = m.format == Format::kNf4;
  if (a.rows < 0 || a.rows > kLongest || a.cols < 0 || a.cols > kLongest || a.packed_axis < 0 || a.packed_axis > 1 ||
      a.contracted_axis < 0 || a.contracted_axis > 1 || (blocks && (a.block_size < 2 || a.block_size % 2))) {
    return ffi::Error::InvalidArgument(
        "rows and cols must be 0 to 2^40, axes be 0 or 1, block_size even and at least 2; got rows " +
        std::to_string(a.rows) + ", cols " + std::to_string(a.cols) + ", packed_axis " + std::to_string(a.packed_axis) +
        ", contracted_axis " + std::to_string(a.contracted_axis) + ", block_size " + std::to_string(a.block_size));
  }
  m.rows = a.rows;
  m.cols = a.cols;
  int64_t values;  // codes and scales of a matrix are no more, also where there is no matrix
  if (!Product({m.rows, m.cols}, values)) {
    return ffi::Error::InvalidArgument("a matrix " + ShapeOf({m.rows, m.cols}) + " is too large for any memory");
  }
  m.packed_axis = static_cast<int>(a.packed_axis);
  m.contracted_axis = static_cast<int>(a.contracted_axis);
  // A block that is longer than its axis ends with it. Whole strips of 64 stay whole, since they have kernels of their own.
  const int64_t length = m.packed_axis == 0 ? m.rows : m.cols;
  m.block = blocks ? std::min(a.block_size, (length / 64 + 1) * 64) : 2;
  if (codes.dimensions().size() != 3) return ffi::Error::InvalidArgument("codes must have 3 axes, got " + Describe(codes));
  stack.count = codes.dimensions()[0];
  const int64_t rows = m.packed_axis == 0 ? m.Codes(m.rows) : m.rows, cols = m.RowBytes();
  if (!Is(codes, m.format == Format::kInt8 ? ffi::S8 : ffi::U8, {stack.count, rows, cols})) {
    return ffi::Error::InvalidArgument("codes must be " + std::string(m.format == Format::kInt8 ? "int8 " : "uint8 ") +
                                       ShapeOf({stack.count, rows, cols}) + ", got " + Describe(codes));
  }
  m.codes = static_cast<const uint8_t*>(codes.untyped_data());
  ClearPadding(stack);
  return blocks ? TakeNf4Scales(pool, scales, stack) : TakeScales(scales, stack);
}

}  // namespace eformer
