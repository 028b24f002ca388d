#ifndef EFORMER_HANDLERS_H_
#define EFORMER_HANDLERS_H_

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace eformer {

XLA_FFI_Handler* MatmulHandler();    // x, codes, scales... -> x @ matrix in float32
XLA_FFI_Handler* SegmentsHandler();  // x, codes... -> x @ matrix of bits in float32
XLA_FFI_Handler* DecodeHandler();    // codes, scales... -> the matrix in float32

// What this processor can run, the best first.
std::vector<const char*> InstructionSets();

}  // namespace eformer

#endif  // EFORMER_HANDLERS_H_
