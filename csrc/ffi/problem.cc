#include "ffi/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/parallel.h"

namespace eformer {
namespace {

// The buffers behind those of codes, by the names that the call gives them.
struct NamedBuffers {
  struct Entry {
    std::string_view name;
    ffi::AnyBuffer buffer;
  };
  std::vector<Entry> all;

  const ffi::AnyBuffer* Find(std::string_view name) const {
    for (const Entry& each : all) {
      if (each.name == name) return &each.buffer;
    }
    return nullptr;
  }
};

ffi::Error NameBuffers(const FormatInfo& format, std::string_view names, const Buffers& buffers, NamedBuffers& found) {
  static constexpr std::string_view kKnown[] = {"scale",        "zero",   "offset", "scale_scale",
                                                "offset_scale", "nested", "mean",   "map"};
  size_t at = format.planes;
  for (size_t start = 0; start < names.size(); ++at) {
    const size_t end = std::min(names.find(' ', start), names.size());
    const std::string_view name = names.substr(start, end - start);
    start = end + 1;
    if (std::find(std::begin(kKnown), std::end(kKnown), name) == std::end(kKnown) || found.Find(name) != nullptr) {
      return ffi::Error::InvalidArgument("scale_names must be different names of scales with a space between, got \"" +
                                         std::string(names) + "\"");
    }
    if (at < buffers.size()) found.all.push_back({name, buffers[at]});
  }
  if (at == buffers.size()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("scale_names \"" + std::string(names) + "\" go with " +
                                     std::to_string(at - format.planes) + " buffers of scales, got " +
                                     std::to_string(buffers.size() - format.planes));
}

constexpr struct {
  ffi::DataType type;
  Number number;
  int64_t bytes;
  bool wide;   // may be a factor of others
  bool alone;  // needs no factor
} kNumbers[] = {
    {ffi::F32, Number::kFloat32, 4, true, true},    {ffi::BF16, Number::kBfloat16, 2, true, true},
    {ffi::F16, Number::kFloat16, 2, true, true},    {ffi::F8E8M0FNU, Number::kE8m0, 1, false, true},
    {ffi::F8E4M3FN, Number::kE4m3, 1, false, true}, {ffi::U8, Number::kUint8, 1, false, false},
    {ffi::S8, Number::kInt8, 1, false, false},
};

// Takes scales or offsets; `bytes` are those of a matrix, of the entries and of the factors.
ffi::Error TakeNumbers(const Attributes& a, const Stack& stack, const std::string& name, const ffi::AnyBuffer& entries,
                       const ffi::AnyBuffer* factors, BlockNumbers& found, int64_t (&bytes)[2]) {
  const Matrix& m = stack.first;
  const bool by_rows = m.packed_axis == 0;
  const int64_t rows = by_rows ? CeilDiv(m.rows, m.block) : m.rows, cols = m.BlockScaleStride();
  bool known = false;
  for (const auto& each : kNumbers) {
    const bool fits = name == "zero" ? each.type == ffi::U8 : each.alone || factors != nullptr;
    if (!fits || !Is(entries, each.type, {stack.count, rows, cols})) continue;
    known = true;
    found.entries = entries.untyped_data();
    found.type = each.number;
    bytes[0] = rows * cols * each.bytes;
  }
  if (!known) {
    const std::string types =
        name == "zero" ? "uint8 " : "floating point of at most 32 bits or, with " + name + "_scale, uint8 or int8 ";
    return ffi::Error::InvalidArgument(name + " must be " + types + ShapeOf({stack.count, rows, cols}) + ", got " +
                                       Describe(entries));
  }
  if (factors == nullptr) return ffi::Error::Success();
  const int64_t superblock = a.superblock_size == 0 ? a.block_size : a.superblock_size;
  const auto shape = factors->dimensions();
  const int64_t all_rows = by_rows ? CeilDiv(m.rows, superblock) : m.rows;
  const int64_t all_cols = by_rows ? m.cols : CeilDiv(m.cols, superblock);
  const bool fits = shape.size() == 3 && shape[0] == stack.count && (shape[1] == 1 || shape[1] == all_rows) &&
                    (shape[2] == 1 || shape[2] == all_cols);
  for (const auto& each : kNumbers) {
    if (!fits || !each.wide || factors->element_type() != each.type) continue;
    found.factors = factors->untyped_data();
    found.factor_type = each.number;
    found.factor_row_step = shape[1] == 1 ? 0 : shape[2];
    found.factor_col_step = shape[2] == 1 ? 0 : 1;
    found.per_factor = superblock / a.block_size;
    bytes[1] = shape[1] * shape[2] * each.bytes;
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(name + "_scale must be float32, bfloat16 or float16 that broadcasts over " +
                                     ShapeOf({stack.count, all_rows, all_cols}) + ", got " + Describe(*factors));
}

// Takes scales that are codes of a table of 256 floats, times a factor for each kMappedBlock of them, plus a mean.
ffi::Error TakeMappedScales(const NamedBuffers& named, Stack& stack) {
  Matrix& m = stack.first;
  const int64_t rows = m.packed_axis == 0 ? CeilDiv(m.rows, m.block) : m.rows, cols = m.BlockScaleStride();
  const int64_t groups = CeilDiv(rows * cols, kMappedBlock);
  const auto *scale = named.Find("scale"), *nested = named.Find("nested"), *mean = named.Find("mean"),
             *map = named.Find("map");
  if (scale == nullptr || nested == nullptr || mean == nullptr || map == nullptr || named.all.size() != 4) {
    return ffi::Error::InvalidArgument(stack.kernels->format.name +
                                       std::string(" takes quantized scales as scale_names \"scale nested mean map\""));
  }
  if (!Is(*scale, ffi::U8, {stack.count, rows, cols}) || !Is(*nested, ffi::F32, {stack.count, groups}) ||
      !Is(*mean, ffi::F32, {stack.count}) || !Is(*map, ffi::F32, {256})) {
    return ffi::Error::InvalidArgument("a quantized scale must be uint8 " + ShapeOf({stack.count, rows, cols}) +
                                       " with float32 nested, mean and 256 values, got " + Describe(*scale) + ", " +
                                       Describe(*nested) + ", " + Describe(*mean) + " and " + Describe(*map));
  }
  m.scales.entries = scale->untyped_data();
  m.scales.type = Number::kUint8;
  m.scales.factors = nested->untyped_data();
  m.scales.map = map->typed_data<float>();
  m.scales.mean = mean->typed_data<float>();
  stack.bytes_of_scales[0] = rows * cols;
  stack.bytes_of_scales[1] = groups * static_cast<int64_t>(sizeof(float));
  m.centre = stack.kernels->format.centre;
  return ffi::Error::Success();
}

ffi::Error TakeBlockScales(const Attributes& a, const NamedBuffers& named, Stack& stack) {
  Matrix& m = stack.first;
  const FormatInfo& format = stack.kernels->format;
  if (named.Find("map") != nullptr) return TakeMappedScales(named, stack);
  const auto *scale = named.Find("scale"), *scale_scale = named.Find("scale_scale");
  const auto *zero = named.Find("zero"), *offset = named.Find("offset"), *offset_scale = named.Find("offset_scale");
  const size_t known = (scale != nullptr) + (scale_scale != nullptr) + (zero != nullptr) + (offset != nullptr) +
                       (offset_scale != nullptr);
  if (scale == nullptr || (zero != nullptr && offset != nullptr) || (offset_scale != nullptr && offset == nullptr) ||
      named.all.size() != known) {
    return ffi::Error::InvalidArgument(std::string(format.name) +
                                       " takes as scale_names: scale, and maybe scale_scale, and then zero, or offset "
                                       "and maybe offset_scale");
  }
  if (auto error = TakeNumbers(a, stack, "scale", *scale, scale_scale, m.scales, stack.bytes_of_scales);
      error.failure()) {
    return error;
  }
  m.centre = zero == nullptr && offset == nullptr ? format.centre : 0;
  if (zero == nullptr && offset == nullptr) return ffi::Error::Success();
  m.offsets_are_zeros = zero != nullptr;
  return TakeNumbers(a, stack, zero != nullptr ? "zero" : "offset", zero != nullptr ? *zero : *offset, offset_scale,
                     m.offsets, stack.bytes_of_offsets);
}

ffi::Error TakeBroadcastScale(const NamedBuffers& named, Stack& stack) {
  Matrix& m = stack.first;
  if (named.all.empty()) return ffi::Error::Success();
  const ffi::AnyBuffer& scale = named.all[0].buffer;
  const auto shape = scale.dimensions();
  const bool fits = named.all.size() == 1 && named.all[0].name == "scale" && scale.element_type() == ffi::F32 &&
                    shape.size() == 3 && shape[0] == stack.count && (shape[1] == 1 || shape[1] == m.rows) &&
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

ffi::DataType TypeOf(CodeType codes) {
  switch (codes) {
    case CodeType::kUint8:
      return ffi::U8;
    case CodeType::kInt8:
      return ffi::S8;
    case CodeType::kE4m3:
      return ffi::F8E4M3FN;
    case CodeType::kE5m2:
      return ffi::F8E5M2;
  }
  return ffi::DataType::INVALID;
}

ffi::Error TakePlanes(const FormatInfo& format, const Buffers& buffers, Stack& stack) {
  Matrix& m = stack.first;
  if (buffers.size() < static_cast<size_t>(format.planes)) {
    return ffi::Error::InvalidArgument(format.name + std::string(" takes ") + std::to_string(format.planes) +
                                       " buffers of codes, got " + std::to_string(buffers.size()) + " in all");
  }
  const ffi::DataType type = TypeOf(format.codes);
  for (int plane = 0; plane < format.planes; ++plane) {
    const auto codes = buffers[plane];
    if (codes.dimensions().size() != 3) {
      return ffi::Error::InvalidArgument("codes must have 3 axes, got " + Describe(codes));
    }
    if (plane == 0) stack.count = codes.dimensions()[0];
    const int per_byte = format.values_per_byte[plane];
    const int64_t rows = m.packed_axis == 0 ? CeilDiv(m.rows, per_byte) : m.rows, cols = m.RowBytes(per_byte);
    if (!Is(codes, type, {stack.count, rows, cols})) {
      return ffi::Error::InvalidArgument("codes must be " + NameOf(type) + " " + ShapeOf({stack.count, rows, cols}) +
                                         ", got " + Describe(codes));
    }
    m.planes[plane] = static_cast<const uint8_t*>(codes.untyped_data());
    stack.plane_bytes[plane] = rows * cols;
  }
  return ffi::Error::Success();
}

// Some loops multiply the codes behind the end of the packed axis by 0, which gives NaN if one stands for no finite
// value. If there is such a code, the loops get a copy in which all of them are 0.
void ClearPadding(const FormatInfo& format, Stack& stack) {
  Matrix& m = stack.first;
  const int64_t length = m.packed_axis == 0 ? m.rows : m.cols, lines = m.packed_axis == 0 ? m.cols : m.rows;
  const int per_byte = format.values_per_byte[0], bits = 8 / per_byte;
  const int used_bits = static_cast<int>(length % per_byte) * bits;
  if (!format.clear_padding || used_bits == 0 || lines == 0) return;
  const int padding = 0xff << used_bits & 0xff;
  const int64_t bytes = stack.plane_bytes[0], row_bytes = m.RowBytes(per_byte);
  const int64_t last = m.packed_axis == 0 ? bytes - row_bytes : row_bytes - 1,
                step = m.packed_axis == 0 ? 1 : row_bytes;
  const auto for_each_last_byte = [&](const auto& use) {
    for (int64_t i = 0; i < stack.count; ++i) {
      for (int64_t line = 0; line < lines; ++line) use(i * bytes + last + line * step);
    }
  };
  bool finite = true;
  for_each_last_byte([&](int64_t at) {
    if ((m.planes[0][at] & padding) == 0) return;
    for (int bit = used_bits; bit < 8; bit += bits) {
      finite = finite && std::isfinite(format.value(m.planes[0][at] >> bit & ((1 << bits) - 1)));
    }
  });
  if (finite) return;
  stack.cleared_codes.reset(new uint8_t[stack.count * bytes]);
  std::memcpy(stack.cleared_codes.get(), m.planes[0], stack.count * bytes);
  for_each_last_byte([&](int64_t at) { stack.cleared_codes[at] &= ~padding; });
  m.planes[0] = stack.cleared_codes.get();
}

}  // namespace

std::vector<const char*> InstructionSets() {
  std::vector<const char*> names;
  for (const InstructionSet* each : AllInstructionSets()) names.push_back(each->name);
  return names;
}

std::vector<const char*> Formats() {
  std::vector<const char*> names;
  const InstructionSet& any = portable::Instructions();
  for (const Kernels* each = any.begin; each != any.end; ++each) names.push_back(each->format.name);
  return names;
}

void OutOfMemory() { throw std::bad_alloc(); }

std::string NameOf(ffi::DataType type) {
  static constexpr std::pair<ffi::DataType, const char*> kNames[] = {
      {ffi::PRED, "bool"},
      {ffi::S8, "int8"},
      {ffi::S16, "int16"},
      {ffi::S32, "int32"},
      {ffi::S64, "int64"},
      {ffi::U8, "uint8"},
      {ffi::U16, "uint16"},
      {ffi::U32, "uint32"},
      {ffi::U64, "uint64"},
      {ffi::F16, "float16"},
      {ffi::F32, "float32"},
      {ffi::F64, "float64"},
      {ffi::BF16, "bfloat16"},
      {ffi::C64, "complex64"},
      {ffi::F8E8M0FNU, "float8_e8m0fnu"},
      {ffi::F8E4M3FN, "float8_e4m3fn"},
      {ffi::F8E5M2, "float8_e5m2"},
  };
  for (const auto& [known, name] : kNames) {
    if (known == type) return name;
  }
  return "dtype " + std::to_string(static_cast<int>(type));
}

std::string Describe(const ffi::AnyBuffer& buffer) {
  std::string text = NameOf(buffer.element_type()) + " (";
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

ffi::Error CheckResult(const ffi::AnyBuffer& y, int64_t count, int64_t rows, int64_t width, int64_t& size) {
  if (!Is(y, ffi::F32, {count, rows, width})) {
    return ffi::Error::InvalidArgument("the result must be float32 " + ShapeOf({count, rows, width}) + ", got " +
                                       Describe(y));
  }
  if (rows > kMaxAxis || !Product({count, rows, width}, size)) {
    return ffi::Error::InvalidArgument("the result " + Describe(y) + " would be too large for any memory");
  }
  return ffi::Error::Success();
}

Buffers AllOf(const ffi::RemainingArgs& buffers) {
  Buffers all;
  all.reserve(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) all.push_back(*buffers.get<ffi::AnyBuffer>(i));
  return all;
}

ffi::Error ChooseKernels(const Attributes& a, Stack& stack) {
  for (const InstructionSet* each : AllInstructionSets()) {
    if (a.instruction_set.empty() || a.instruction_set == each->name) {
      stack.instructions = each;
      break;
    }
  }
  if (stack.instructions == nullptr) {
    return ffi::Error::InvalidArgument("this processor has no instruction set \"" + std::string(a.instruction_set) +
                                       "\", or this build does not know it");
  }
  for (const Kernels* each = stack.instructions->begin; each != stack.instructions->end; ++each) {
    if (a.format != each->format.name) continue;
    stack.kernels = each;
    Matrix& m = stack.first;
    m.rows = a.rows;
    m.cols = a.cols;
    m.contracted_axis = static_cast<int>(a.contracted_axis);
    // Codes of whole bytes without blocks are packed along both axes alike.
    const bool is_alike = each->format.max_values_per_byte == 1 && each->format.scales == ScaleKind::kBroadcast;
    m.packed_axis = is_alike ? m.contracted_axis : static_cast<int>(a.packed_axis);
    return ffi::Error::Success();
  }
  std::string names;
  for (const char* each : Formats()) names += (names.empty() ? "" : ", ") + std::string(each);
  return ffi::Error::InvalidArgument("unknown format \"" + std::string(a.format) + "\": there are " + names);
}

ffi::Error MakeStack(const Attributes& a, const Buffers& buffers, Stack& stack) {
  if (auto error = ChooseKernels(a, stack); error.failure()) return error;
  const FormatInfo& format = stack.kernels->format;
  const bool in_blocks = format.scales == ScaleKind::kPerBlock;
  if (a.rows < 0 || a.rows > kMaxAxis || a.cols < 0 || a.cols > kMaxAxis || a.packed_axis < 0 || a.packed_axis > 1 ||
      a.contracted_axis < 0 || a.contracted_axis > 1 || (in_blocks && a.block_size < 1)) {
    return ffi::Error::InvalidArgument(
        "rows and cols must be 0 to 2^40, axes be 0 or 1, block_size a positive integer; got rows " +
        std::to_string(a.rows) + ", cols " + std::to_string(a.cols) + ", packed_axis " + std::to_string(a.packed_axis) +
        ", contracted_axis " + std::to_string(a.contracted_axis) + ", block_size " + std::to_string(a.block_size));
  }
  if (in_blocks && (a.superblock_size < 0 || a.superblock_size % a.block_size != 0)) {
    return ffi::Error::InvalidArgument("superblock_size must be a multiple of block_size, got " +
                                       std::to_string(a.superblock_size) + " and " + std::to_string(a.block_size));
  }
  Matrix& m = stack.first;
  int64_t values;  // no matrix has more codes or scales, also where the stack is empty
  if (!Product({m.rows, m.cols}, values)) {
    return ffi::Error::InvalidArgument("a matrix " + ShapeOf({m.rows, m.cols}) + " is too large for any memory");
  }
  // A block longer than its axis ends with it. It becomes a multiple of 256, for which there are faster loops.
  const int64_t length = m.packed_axis == 0 ? m.rows : m.cols;
  m.block = in_blocks ? std::min(a.block_size, (length / 256 + 1) * 256) : 1;
  if (auto error = TakePlanes(format, buffers, stack); error.failure()) return error;
  ClearPadding(format, stack);
  NamedBuffers named;
  if (auto error = NameBuffers(format, a.scale_names, buffers, named); error.failure()) return error;
  if (!in_blocks) return TakeBroadcastScale(named, stack);
  return TakeBlockScales(a, named, stack);
}

}  // namespace eformer
