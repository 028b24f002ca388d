// From the buffers of a call to a stack of matrices, with every dtype, rank and extent checked.
#pragma once

#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "matrix/matrix.h"
#include "xla/ffi/api/ffi.h"

namespace eformer {

namespace ffi = xla::ffi;

struct Attributes {
  std::string_view format;           // the name of a format in formats/
  std::string_view instruction_set;  // "" is the best there is
  int64_t rows;
  int64_t cols;
  int64_t packed_axis;
  int64_t contracted_axis;
  int64_t block_size;
  int64_t superblock_size;       // values along the packed axis that share a factor of their scales; 0 is block_size
  std::string_view scale_names;  // of the buffers behind the codes, with a space between
};

// The longest axis of any array in a call: beyond any memory, yet sums and products of it with this library's constants
// do not overflow.
constexpr int64_t kMaxAxis = int64_t{1} << 40;

// Multiplies sizes that are not negative; false if the product overflows.
inline bool Product(std::initializer_list<int64_t> sizes, int64_t& product) {
  product = 1;
  for (int64_t size : sizes) {
    if (size == 0) return product = 0, true;
  }
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(product, size, &product)) return false;
  }
  return true;
}

// Calls the handler, and returns an error if it runs out of memory.
template <auto handler>
struct WithMemory;

template <class... Args, ffi::Error (*handler)(Args...)>
struct WithMemory<handler> {
  static ffi::Error Call(Args... args) {
    try {
      return handler(std::move(args)...);
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted, "there is no memory for a copy of x and for partial sums");
    }
  }
};

// Quantized matrices of one shape, stored one after the other.
struct Stack {
  const InstructionSet* instructions = nullptr;
  const Kernels* kernels = nullptr;  // those of the format
  Matrix first = {};
  int64_t count = 0;
  int64_t plane_bytes[kMaxPlanes] = {};  // of one matrix
  int64_t scale_size = 0;                // floats of one matrix
  int64_t bytes_of_scales[2] = {};       // entries and factors of one matrix
  int64_t bytes_of_offsets[2] = {};
  std::unique_ptr<uint8_t[]> cleared_codes;  // if padding had to be cleared, `first.planes[0]` points here

  Matrix operator[](int64_t i) const {
    Matrix m = first;
    for (int plane = 0; plane < kMaxPlanes; ++plane) m.planes[plane] += i * plane_bytes[plane];
    if (m.scale != nullptr) m.scale += i * scale_size;
    Move(m.scales, i, bytes_of_scales);
    Move(m.offsets, i, bytes_of_offsets);
    return m;
  }

 private:
  static void Move(BlockNumbers& numbers, int64_t i, const int64_t (&bytes)[2]) {
    if (numbers.entries != nullptr) numbers.entries = static_cast<const uint8_t*>(numbers.entries) + i * bytes[0];
    if (numbers.factors != nullptr) numbers.factors = static_cast<const uint8_t*>(numbers.factors) + i * bytes[1];
    if (numbers.mean != nullptr) numbers.mean += i;
  }
};

// What this processor can run, the best first.
const std::vector<const InstructionSet*>& AllInstructionSets();

// Takes the kernels of the format on the instruction set, and the shape.
ffi::Error ChooseKernels(const Attributes& attributes, Stack& stack);

typedef std::vector<ffi::AnyBuffer> Buffers;

Buffers AllOf(const ffi::RemainingArgs& buffers);

std::string NameOf(ffi::DataType type);
std::string Describe(const ffi::AnyBuffer& buffer);

// Whether the buffer has that dtype and shape.
bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape);
std::string ShapeOf(std::initializer_list<int64_t> shape);

// Checks that the result is float32 (count, rows, width), and counts its elements.
ffi::Error CheckResult(const ffi::AnyBuffer& y, int64_t count, int64_t rows, int64_t width, int64_t& size);

// Takes the buffers of codes, uint8 or int8 (count, rows, cols), each shorter along the packed axis by its values per
// byte, and then the buffers in `scale_names`. Of kBroadcast: none, or "scale", float32 (count, rows or 1, cols or
// 1). Of kPerBlock, where `blocks` is (count, rows / block_size, cols) or (count, rows, cols / block_size):
//
//   scale         `blocks`: float32, bfloat16, float16, float8_e8m0fnu, float8_e4m3fn, or with scale_scale uint8 or
//   int8 scale_scale   float32, bfloat16 or float16: `blocks` with superblock_size, or 1 along rows or columns zero
//   `blocks`: uint8; or offset        `blocks`: as scale, with offset_scale as scale_scale
//
// Or "scale nested mean map": uint8 codes, float32 (count, one per 256 codes), (count,), and the (256,) values of
// codes.
ffi::Error MakeStack(const Attributes& attributes, const Buffers& buffers, Stack& stack);

}  // namespace eformer
