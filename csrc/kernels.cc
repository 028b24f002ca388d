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
  Kernels found = {info,
                   nullptr,
                   nullptr,
                   Matmul<Format>,
                   kBfloatMatmul<Format>,
                   ByteOrderOf<Format>,
                   ByteDotsOrNull<Format>(),
                   ByteMatmulOrNull<Format>(),
                   DecodeRows<Format>};
  if constexpr (kHasLookups) {
    found.gemv = Gemv<Format>;
    found.dots = FloatDots<Format>;
  }
  return found;
}

#define EFORMER_CHECK_FORMAT(Format, file_name) \
  static_assert(CheckFormat<Format>(file_name), "kName must be the name of the format's file");
EFORMER_FORMATS(EFORMER_CHECK_FORMAT)

#if defined(EFORMER_EXTENDS)

// Takes the kernels of another instruction set as they are compiled, and replaces those that are faster here.
template <class Format>
static void Replace(Kernels& kernels) {
  kernels.byte_order = ByteOrderOf<Format>;
  kernels.byte_matmul = ByteMatmulOrNull<Format>();
#if defined(EFORMER_AMX)
  kernels.bfloat_matmul = kBfloatMatmul<Format>;
#else
  kernels.byte_dots = ByteDotsOrNull<Format>();
#endif
}

#define EFORMER_COUNT(Format, file_name) +1
struct Extended {
  Kernels all[EFORMER_FORMATS(EFORMER_COUNT)];
  InstructionSet set = EFORMER_EXTENDS::Instructions();

  Extended() {
    Kernels* at = all;
    const Kernels* from = set.begin;
#define EFORMER_REPLACE(Format, file_name) \
  *at = *from++;                           \
  Replace<Format>(*at++);
    EFORMER_FORMATS(EFORMER_REPLACE)
    set.name = EFORMER_STRING(EFORMER_ISA);
    set.to_bytes = ToBytes;
    set.begin = all;
    set.end = at;
  }
};

const InstructionSet& Instructions() {
  static const Extended extended;
  return extended.set;
}

#else

#define EFORMER_KERNELS_OF(Format, file_name) KernelsOf<Format>(),
static constexpr Kernels kAll[] = {EFORMER_FORMATS(EFORMER_KERNELS_OF)};

const InstructionSet& Instructions() {
  static constexpr InstructionSet kSet = {EFORMER_STRING(EFORMER_ISA),      kLanes, PutInLanes, ToBytes, kAll,
                                          kAll + sizeof kAll / sizeof *kAll};
  return kSet;
}

#endif

}  // namespace eformer::EFORMER_ISA
