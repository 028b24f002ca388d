// The kernels of one instruction set. The build compiles this file once for each, with EFORMER_ISA its name.
#include "matrix/matrix.h"

#include "loops/gemm_bfloat.h"
#include "loops/few_rows.h"
#include "format_list.h"  // made by CMake: includes formats/*.h and defines EFORMER_FORMATS(use) as use(Int8, "int8") ...
#include "loops/dots_bytes.h"
#include "loops/gemm_bytes.h"
#include "loops/round_x.h"
#include "loops/gemm_floats.h"
#include "loops/split_matmul.h"
#include "loops/word_dots.h"

namespace eformer::EFORMER_ISA {

#define EFORMER_STRING_(name) #name
#define EFORMER_STRING(name) EFORMER_STRING_(name)

// Calls a format's loop with sums that have room for a strip behind the last column, as y does not.
template <auto kLoop>
static void RowMatmul(const Matrix& m, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y) {
  alignas(64) float sums[kSliceColumns + kStripSize] = {};
  kLoop(m, x, k0, k1, n0, n1, sums);
  std::memcpy(y, sums, (n1 - n0) * sizeof(float));
}

template <auto kLoop>
constexpr decltype(Kernels::row_matmul) RowMatmulOrNull() {
  if constexpr (std::is_null_pointer_v<decltype(kLoop)>) {
    return nullptr;
  } else {
    return RowMatmul<kLoop>;
  }
}

template <class Format>
constexpr Kernels KernelsOf() {
  return {DescribeFormat<Format>(),
          RowMatmulOrNull<Format::RowMatmul>(),
          RowMatmulTransposedOf<Format>(),
          Matmul<Format>,
          DotOrderOf<Format>,
          DotMatmul<Format>,
          kBfloatMatmul<Format>,
          Int8OrderOf<Format>,
          Int8DotsOrNull<Format>(),
          Int8FewMatmulOrNull<Format>(),
          SplitOrderOf<Format>,
          SplitMatmulOrNull<Format>(),
          Decode<Format>};
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
  kernels.int8_matmul = Int8MatmulOrNull<Format>();
}
#else
template <class Format>
static void Replace(Kernels& kernels) {
  kernels.int8_dots = Int8DotsOrNull<Format>();
  kernels.int8_matmul = Int8MatmulOrNull<Format>();
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
  set.int8_tile_rows = kInt8TileRows;
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
    EFORMER_STRING(EFORMER_ISA),      kInt8TileRows, kSplitTileRows, kWordTileRows, OrderX, RoundRow, SplitRow, kAll,
    kAll + sizeof kAll / sizeof *kAll};

#endif

}  // namespace eformer::EFORMER_ISA
