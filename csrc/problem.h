// From the buffers of a call to a stack of matrices, with every dtype, rank and extent checked.
#pragma once

#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "kernels.h"
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
  int64_t plane_bytes[kMaxPlanes] = {};      // of one matrix
  int64_t scale_size = 0;                    // floats of one matrix
  std::unique_ptr<float[]> decoded_scales;   // if the scales are quantized, `first.scale` points here
  std::unique_ptr<uint8_t[]> cleared_codes;  // if padding had to be cleared, `first.planes[0]` points here

  Matrix operator[](int64_t i) const {
    Matrix m = first;
    for (int plane = 0; plane < kMaxPlanes; ++plane) m.planes[plane] += i * plane_bytes[plane];
    if (m.scale != nullptr) m.scale += i * scale_size;
    return m;
  }
};

std::string NameOf(ffi::DataType type);
std::string Describe(const ffi::AnyBuffer& buffer);

// Whether the buffer has that dtype and shape.
bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape);
std::string ShapeOf(std::initializer_list<int64_t> shape);

// Checks that the result is float32 (count, rows, width), and counts its elements.
ffi::Error CheckResult(const ffi::AnyBuffer& y, int64_t count, int64_t rows, int64_t width, int64_t& size);

// Takes the buffers of codes, uint8 or int8 (count, rows, cols), each shorter along the packed axis by its values per
// byte, and then the scales. Those of kBroadcast: none, or float32 (count, rows or 1, cols or 1). Those of kPerBlock:
// float32 (count, rows / block_size, cols) or (count, rows, cols / block_size); or quantized: uint8 codes of that
// shape, float32 (count, one per 256 codes), float32 offsets (count,), and the float32 (256,) that codes stand for.
ffi::Error MakeStack(ffi::ThreadPool& pool, const Attributes& attributes, const ffi::RemainingArgs& buffers,
                     Stack& stack);

}  // namespace eformer
