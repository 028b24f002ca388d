// The kernels of one instruction set. The build compiles this file once for each, with EFORMER_ISA its name.
#include "format_list.h"  // made by CMake: includes formats/*.h and defines EFORMER_FORMATS(use) as use(Int8, "int8") ...
#include "loops/dots_bytes.h"
#include "loops/dots_floats.h"
#include "loops/gemm_bfloat.h"
#include "loops/gemm_bytes.h"
#include "loops/gemm_floats.h"
#include "loops/gemv_floats.h"
#include "loops/x_bytes.h"
#include "matrix/matrix.h"

namespace eformer::EFORMER_ISA {

#define EFORMER_STRING_(name) #name
#define EFORMER_STRING(name) EFORMER_STRING_(name)

template <class Format>
constexpr Kernels KernelsOf() {
  FormatInfo info = DescribeFormat<Format>();
  info.reorders = kReorders<Format>;
  return {info,
          Gemv<Format>,
          GemvAny<Format>,
          FloatDots<Format>,
          DotsAny<Format>,
          Matmul<Format>,
          kBfloatMatmul<Format>,
          ByteOrderOf<Format>,
          ByteDotsOrNull<Format>(),
          ByteMatmulOrNull<Format>(),
          DecodeRows<Format>};
}

#define EFORMER_CHECK_FORMAT(Format, file_name) \
  static_assert(CheckFormat<Format>(file_name), "kName must be the name of the format's file");
EFORMER_FORMATS(EFORMER_CHECK_FORMAT)

extern const InstructionSet kInstructionSet;

#if defined(EFORMER_EXTENDS)

// The kernels of another instruction set, which are not compiled again, and those that this one has better.
#if defined(EFORMER_AMX)
template <class Format>
static void Replace(Kernels& kernels) {
  kernels.bfloat_matmul = kBfloatMatmul<Format>;
  kernels.byte_order = ByteOrderOf<Format>;
  kernels.byte_matmul = ByteMatmulOrNull<Format>();
}
#else
template <class Format>
static void Replace(Kernels& kernels) {
  kernels.byte_dots = ByteDotsOrNull<Format>();
  kernels.byte_matmul = ByteMatmulOrNull<Format>();
}
#endif

#define EFORMER_COUNT(Format, file_name) +1
struct Extended {
  Kernels all[EFORMER_FORMATS(EFORMER_COUNT)];

  Extended() {
    Kernels* at = all;
    const Kernels* from = EFORMER_EXTENDS::kInstructionSet.begin;
#define EFORMER_REPLACE(Format, file_name) \
  *at = *from++;                           \
  Replace<Format>(*at++);
    EFORMER_FORMATS(EFORMER_REPLACE)
  }
};

static InstructionSet WithKernels(const Extended& kernels) {
  InstructionSet set = EFORMER_EXTENDS::kInstructionSet;
  set.name = EFORMER_STRING(EFORMER_ISA);
  set.begin = kernels.all;
  set.end = kernels.all + sizeof kernels.all / sizeof *kernels.all;
  return set;
}

static const Extended kExtended;
const InstructionSet kInstructionSet = WithKernels(kExtended);

#else

#define EFORMER_KERNELS_OF(Format, file_name) KernelsOf<Format>(),
static constexpr Kernels kAll[] = {EFORMER_FORMATS(EFORMER_KERNELS_OF)};

const InstructionSet kInstructionSet = {
    EFORMER_STRING(EFORMER_ISA), kLanes, PutInLanes, ToBytes, kAll,
    kAll + sizeof kAll / sizeof *kAll};

#endif

}  // namespace eformer::EFORMER_ISA
