// From the buffers of a call to a stack of matrices, with every dtype, rank and extent checked.
#ifndef EFORMER_PROBLEM_H_
#define EFORMER_PROBLEM_H_

#include <memory>
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

// Equally shaped quantized matrices, one behind the other.
struct Stack {
  const Kernels* kernels = nullptr;
  Matrix first = {};
  int64_t count = 0;
  int64_t scale_size = 0;                   // floats of one matrix
  std::unique_ptr<float[]> decoded_scales;  // where they were quantized themselves; `first.scale` points here

  Matrix operator[](int64_t i) const {
    Matrix m = first;
    m.codes += i * m.Bytes();
    if (m.scale != nullptr) m.scale += i * scale_size;
    return m;
  }
};

std::string Describe(const ffi::AnyBuffer& buffer);

// The scales of "int8" and "ternary": none, or float32 (count, rows or 1, cols or 1). Those of "nf4": float32 (count,
// rows / block_size, cols) or (count, rows, cols / block_size); or quantized: uint8 codes of that shape, float32 (count,
// one per 256 codes), float32 (count,), and the float32 (256,) that codes stand for.
ffi::Error MakeStack(ffi::ThreadPool& pool, const Attributes& attributes, const ffi::AnyBuffer& codes,
                     const ffi::RemainingArgs& scales, Stack& stack);

}  // namespace eformer

#endif  // EFORMER_PROBLEM_H_
