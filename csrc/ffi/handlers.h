#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace eformer {

XLA_FFI_Handler* MatmulHandler();    // x, planes of codes..., scales... -> x @ matrix in float32
XLA_FFI_Handler* MatmulsHandler();   // x, index, buffers of matrices... -> x @ each of them
XLA_FFI_Handler* SegmentsHandler();  // x, codes... -> x @ matrix of bits in float32
XLA_FFI_Handler* DecodeHandler();    // planes of codes..., scales... -> the matrix in float32

// The name of the loop that runs this matmul, or what is wrong with the query. If x may be rounded and is not, a line
// with the reason follows. `contracted_axis` is 0 or 1.
struct LoopQuery {
  const char *format, *instruction_set;  // "" is the best there is
  int64_t x_rows, rows, cols, packed_axis, contracted_axis, block_size;
  bool round_x;
};
std::string LoopOf(const LoopQuery& query);

// What this processor can run, the best first.
std::vector<const char*> InstructionSets();

// The formats that this build knows.
std::vector<const char*> Formats();

}  // namespace eformer
