// Which loop multiplies.
#pragma once

#include "ffi/work.h"

namespace eformer {

// What a matmul may round.
struct Rounding {
  bool x;       // to int8, where that is faster
  bool values;  // of the matrix to bfloat16, if x is bfloat16
};

// A matmul of `rows` rows of x with a matrix.
struct Problem {
  const InstructionSet& instructions;
  const Kernels& kernels;
  const Matrix& matrix;
  int64_t rows;
  bool x_is_bfloat;
  Rounding rounding;
};

// The name of the loop that multiplies, if x has no values that keep it from being bytes.
const char* LoopName(const Problem& problem);

// x times the matrices of a stack, by that loop.
Work PlanMatmul(ffi::ThreadPool& pool, const Stack& stack, PreparedX& x, const Rounding& rounding, float* y);

}  // namespace eformer
