// From the buffers of a call to a stack of matrices, with every dtype, rank and extent checked.
#ifndef EFORMER_PROBLEM_H_
#define EFORMER_PROBLEM_H_

#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace eformer {

namespace ffi = xla::ffi;

struct Attributes {
  std::string_view format;           // "int8", "nf4" or "ternary"
  std::string_view instruction_set;  // "" is the best there is
  int64_t rows;
  int64_t cols;
  int64_t packed_axis;
  int64_t contracted_axis;
  int64_t block_size;
};

// The longest axis that a call may have: far beyond any memory, and far from where sums and products of sizes with the
// constants of this library overflow.
constexpr int64_t kLongest = int64_t{1} << 40;

// The product of sizes that are not negative, 0 if one is; false if it overflows.
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

// A handler that returns an error also where memory runs out.
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

// Equally shaped quantized matrices, one behind the other.
struct Stack {
  const Kernels* kernels = nullptr;
  Matrix first = {};
  int64_t count = 0;
  int64_t scale_size = 0;                   // floats of one matrix
  std::unique_ptr<float[]> decoded_scales;  // where they were quantized themselves; `first.scale` points here
  std::unique_ptr<uint8_t[]> cleared_codes;  // where they had to be changed; `first.codes` points here

  Matrix operator[](int64_t i) const {
    Matrix m = first;
    m.codes += i * m.Bytes();
    if (m.scale != nullptr) m.scale += i * scale_size;
    return m;
  }
};

std::string Describe(const ffi::AnyBuffer& buffer);

// Whether the buffer has that dtype and shape.
bool Is(const ffi::AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape);
std::string ShapeOf(std::initializer_list<int64_t> shape);

// The scales of "int8" and "ternary": none, or float32 (count, rows or 1, cols or 1). Those of "nf4": float32 (count,
// rows / block_size, cols) or (count, rows, cols / block_size); or quantized: uint8 codes of that shape, float32 (count,
// one per 256 codes), float32 (count,), and the float32 (256,) that codes stand for.
ffi::Error MakeStack(ffi::ThreadPool& pool, const Attributes& attributes, const ffi::AnyBuffer& codes,
                     const ffi::RemainingArgs& scales, Stack& stack);

}  // namespace eformer

#endif  // EFORMER_PROBLEM_H_
