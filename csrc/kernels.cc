// The kernels of one instruction set. The build compiles this file once for each, with EFORMER_ISA its name.
#include "kernels.h"

#include "bfloats.h"
#include "columns.h"
#include "integers.h"
#include "multiply.h"
#include "rows.h"

namespace eformer {
namespace EFORMER_ISA {

#define EFORMER_STRING_(name) #name
#define EFORMER_STRING(name) EFORMER_STRING_(name)

static bool HasRowKernel(const Matrix& m) {
  return m.format == Format::kNf4 || m.scale_row_step == 0 || m.scale_col_step == 0;
}

extern const Kernels kKernels;
const Kernels kKernels = {EFORMER_STRING(EFORMER_ISA), HasRowKernel, MultiplyRowByRows, HasIntegerKernel,
                          MultiplyIntegersByRows, MultiplyRowByColumns, Panel, kTall, Multiply, kMultiplyBfloats, Decode};

}  // namespace EFORMER_ISA
}  // namespace eformer
