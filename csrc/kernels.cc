// The kernels of one instruction set. The build compiles this file once for each, with EFORMER_ISA its name.
#include "kernels.h"

#include "bfloats.h"
#include "dot_tiles.h"
#include "format_list.h"  // made by CMake: includes formats/*.h and defines EFORMER_FORMATS(use) as use(Int8, "int8") ...
#include "int8_dots.h"
#include "int8_matmul.h"
#include "int8_round.h"
#include "matmul.h"
#include "split_matmul.h"

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
          RowParts<Format>::DotOrderOf,
          DotMatmul<Format>,
          kBfloatMatmul<Format>,
          Int8OrderOf<Format>,
          Int8DotsOrNull<Format>(),
          Int8MatmulOrNull<Format>(),
          SplitOrderOf<Format>,
          SplitMatmulOrNull<Format>(),
          Decode<Format>};
}

#define EFORMER_CHECK_FORMAT(Format, file_name) \
  static_assert(CheckFormat<Format>(file_name), "kName must be the name of the format's file");
EFORMER_FORMATS(EFORMER_CHECK_FORMAT)

extern const InstructionSet kInstructionSet;

#if defined(EFORMER_AMX)

// AMX adds tiles of bfloat16. All else is that of AVX-512 with VNNI, and not compiled again.
#define EFORMER_BFLOAT_MATMUL_OF(Format, file_name) kBfloatMatmul<Format>,
static constexpr decltype(Kernels::bfloat_matmul) kBfloatMatmuls[] = {EFORMER_FORMATS(EFORMER_BFLOAT_MATMUL_OF)};

struct WithTiles {
  Kernels all[sizeof kBfloatMatmuls / sizeof *kBfloatMatmuls];

  WithTiles() {
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
      all[i] = avx512_vnni::kInstructionSet.begin[i];
      all[i].bfloat_matmul = kBfloatMatmuls[i];
    }
  }
};

static InstructionSet WithKernels(const WithTiles& kernels) {
  InstructionSet set = avx512_vnni::kInstructionSet;
  set.name = EFORMER_STRING(EFORMER_ISA);
  set.begin = kernels.all;
  set.end = kernels.all + sizeof kernels.all / sizeof *kernels.all;
  return set;
}

static const WithTiles kWithTiles;
const InstructionSet kInstructionSet = WithKernels(kWithTiles);

#else

#define EFORMER_KERNELS_OF(Format, file_name) KernelsOf<Format>(),
static constexpr Kernels kAll[] = {EFORMER_FORMATS(EFORMER_KERNELS_OF)};

const InstructionSet kInstructionSet = {EFORMER_STRING(EFORMER_ISA),
                                        kTileRows,
                                        kInt8TileRows,
                                        kSplitTileRows,
                                        Interleave,
                                        OrderPairs,
                                        RoundRow,
                                        SplitRow,
                                        kAll,
                                        kAll + sizeof kAll / sizeof *kAll};

#endif

}  // namespace eformer::EFORMER_ISA
