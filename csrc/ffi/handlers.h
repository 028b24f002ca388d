#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace eformer {

XLA_FFI_Handler* MatmulHandler();    // x, planes of codes..., scales... -> x @ matrix in float32
XLA_FFI_Handler* MatmulsHandler();   // x, index, buffers of matrices... -> x @ each of them
XLA_FFI_Handler* SegmentsHandler();  // x, codes... -> x @ matrix of bits in float32
XLA_FFI_Handler* DecodeHandler();    // planes of codes..., scales... -> the matrix in float32

// What this processor can run, the best first.
std::vector<const char*> InstructionSets();

// The formats that this build knows.
std::vector<const char*> Formats();

}  // namespace eformer
