// The matrix that kernels read, the description of a format, and the tables of kernels.
//
// Codes, scales and x come from files of strangers. No value read from a buffer is an index without a mask or a check
// at the place where it is one: a lookup takes the lowest bits of a code, a table of 256 values a whole byte. How far a
// kernel reads and writes follows from sizes alone, which problem.cc has checked against the buffers.
#pragma once

#include <cstdint>

namespace eformer {

// This file is compiled for several instruction sets, and the linker would keep the copy of one: inline everything.
#define EFORMER_INLINE inline __attribute__((always_inline))
#if defined(__AVX2__) || defined(EFORMER_NEON)
#define EFORMER_INLINED __attribute__((always_inline))  // the same, of a lambda
#define EFORMER_INLINE_DECODE EFORMER_INLINE
#else  // there is nothing to gain, and compiling would take ten times as long
#define EFORMER_INLINED
#define EFORMER_INLINE_DECODE __attribute__((noinline))
#endif
#define EFORMER_NOINLINE __attribute__((noinline, unused))

// Rounds a / b up, for a >= 0 and b > 0, without overflow.
EFORMER_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Ends the call with an error, for kernels that get no memory.
[[noreturn]] void OutOfMemory();

enum class ScaleKind {
  kBroadcast,  // none, or one for each row or all rows and each column or all columns
  kPerBlock,   // one for each block of values along the packed axis
};

enum class CodeType { kUint8, kInt8, kE4m3, kE5m2 };

constexpr int kMaxPlanes = 4;

// How scales and offsets of blocks may be stored.
enum class Number : uint8_t { kFloat32, kBfloat16, kFloat16, kE8m0, kE4m3, kUint8, kInt8 };

// What the checks of a call's buffers need to know about a format.
struct FormatInfo {
  const char* name;
  int planes;
  int values_per_byte[kMaxPlanes];  // in each plane, along the packed axis
  int max_values_per_byte;          // rows or columns whose codes share bytes in all planes
  bool reorders;       // whether `dots` wants x in the order of InstructionSet::put_in_lanes, for packed_axis 1
  CodeType codes;      // the dtype of planes
  bool clear_padding;  // whether loops multiply codes behind the end of the packed axis
  ScaleKind scales;
  float centre;  // of the values of blocks that have neither an offset nor a zero
  float (*value)(int code);
};

// A number for each block of a matrix, as it is stored: (rows / block, cols) or (rows, cols / block), rounded up.
struct BlockNumbers {
  const void* entries;  // nullptr if there are none
  Number type;
  Number factor_type;
  const void* factors;      // what superblocks multiply their entries by, or nullptr
  int64_t factor_row_step;  // to the factor of the next row or column; 0 along an axis that shares one
  int64_t factor_col_step;
  int64_t per_factor;  // entries along the packed axis that share a factor
  // Entries may be codes: map[entry] * factors[its place in the matrix / kMappedBlock] + *mean. Else map is nullptr.
  const float* map;
  const float* mean;
  int64_t behind;  // entries that can be read behind the last

  EFORMER_INLINE bool IsPlain() const { return type == Number::kFloat32 && factors == nullptr; }
};

constexpr int64_t kMappedBlock = 256;

// One quantized matrix of `rows` x `cols` values, row-major.
struct Matrix {
  const uint8_t* planes[kMaxPlanes];  // the codes, several values a byte along `packed_axis`
  int64_t rows;
  int64_t cols;
  int packed_axis;         // 0 or 1
  int contracted_axis;     // 0: x @ matrix; 1: x @ matrix.T
  const float* scale;      // kBroadcast: nullptr, or an entry for each value, with steps of 0 along an axis that shares
  int64_t scale_row_step;  // one
  int64_t scale_col_step;
  int64_t block;                        // kPerBlock: values along `packed_axis` that share a scale
  BlockNumbers scales;                  // kPerBlock: scales.h reads them
  BlockNumbers offsets;                 // kPerBlock: what is added to scale * value, or
  bool offsets_are_zeros;               // what is subtracted from values before they are scaled
  float centre;                         // what is subtracted from all values before they are scaled
  const float* result_scale = nullptr;  // what `matmul` multiplies the columns of the result by, or nullptr

  EFORMER_INLINE int64_t RowBytes(int values_per_byte) const {
    return packed_axis == 1 ? CeilDiv(cols, values_per_byte) : cols;
  }
  EFORMER_INLINE int64_t Bytes(int values_per_byte) const {
    return RowBytes(values_per_byte) * (packed_axis == 0 ? CeilDiv(rows, values_per_byte) : rows);
  }
  EFORMER_INLINE int64_t Depth() const { return contracted_axis == 0 ? rows : cols; }  // length of the contracted axis
  EFORMER_INLINE int64_t Width() const { return contracted_axis == 0 ? cols : rows; }  // columns of the result
  EFORMER_INLINE int64_t BlockScaleStride() const { return packed_axis == 0 ? cols : CeilDiv(cols, block); }
};

constexpr int64_t kXPadding = 64;        // zeros that follow each row of x for `row_matmul`, which reads beyond its end
constexpr int64_t kSliceColumns = 4096;  // columns of the result in a call of `row_matmul`: their sums stay in L1
constexpr int64_t kDepthStep = 64;       // the contracted axis is cut at multiples of this, and at whole blocks
constexpr int64_t kPanelColumns = 64;    // columns of the result in a panel: the values that are decoded at a time
constexpr int64_t kFewRows = 16;         // for fewer rows of x, decoding takes as long as multiplying
constexpr int64_t kDotRows = 24;         // for more rows of x, it pays to transpose codes for `matmul`
constexpr int64_t kChunkRows = 512;      // rows of x in a call of `matmul`: the sums of two panels stay in L2

// Splits rows of x into groups that share a register tile: as few as possible, of sizes as equal as possible.
struct RowGroups {
  int64_t rows;
  int64_t count;

  EFORMER_INLINE RowGroups(int64_t rows, int64_t max_rows) : rows(rows), count(CeilDiv(rows, max_rows)) {}
  EFORMER_INLINE int64_t First(int64_t group) const { return rows * group / count; }
  EFORMER_INLINE int64_t Size(int64_t group) const { return First(group + 1) - First(group); }
};

// Rows of float32 x, `stride` apart.
struct PlainX {
  const float* values;
  int64_t stride;
};

// `bfloat_matmul` takes x in AMX tiles of 16 rows by 32 of depth. Tiles of the same rows follow each other along the
// depth, and zeros fill what rows and depth leave of a tile.
constexpr int kAmxRows = 16;
constexpr int kAmxDepth = 32;
constexpr int64_t kBfloatChunkRows = 512;  // rows of x in a call of `bfloat_matmul`: their sums stay in L2

// Rows of x as bytes, in one part or in three. Blocks of a row share a step. In one part, x is rounded: it is about an
// integer from -127 to 127 times the step. In three, it is split into rows of weights 65536, 256 and 1: it is about
// step * (65536 a + 256 b + c), with a, b and c from -128 to 127, and a step that is a power of two: off by at most
// half a step, 2^-23 of the largest x of its block. Sums over a block are exact either way.
//
// Blocks of 64 of rounded x change the logits of SmolLM2-135M in INT8 by 4.0% in norm, blocks of 32 by 3.2%
// (`make llm-bench`).
constexpr int kXParts = 3;  // of split x
constexpr float kPartUnits[kXParts] = {65536, 256, 1};
constexpr int64_t kRoundedBlock = 32, kSplitBlock = 64;  // at most
constexpr int64_t kBytePadding = 256;                    // zeros follow each row up to a multiple of this
constexpr int64_t kByteDepthStep = 256;                  // the contracted axis is cut at multiples of this
constexpr int64_t kByteChunkRows = 256;                  // rows of x in a call of `byte_matmul`: their sums stay in L2

// The order of a row of bytes: value `places` * byte + place is at byte / span * span * places + place * span +
// byte % span. In a group of rows, `span` bytes of each part of each row are adjacent.
struct ByteOrder {
  int64_t parts;  // 1 or kXParts
  int64_t rows;   // of a group: RowGroups(rows, this) share what is read of the matrix
  int64_t block;  // of x: 16, 32 or 64; 0: there is no loop for bytes, or floats are faster
  int64_t places;
  int64_t span;    // 4 or 64
  int64_t scaled;  // values of x whose sums are scaled together: a multiple of `block`
};

// A group of rows of x as bytes. The steps, sums and totals of a block lie side by side for all rows of the group.
struct ByteX {
  const int8_t* values;
  const float* steps;   // of each block
  const int32_t* sums;  // of the bytes of each part of each block
  const float* totals;  // of x in each block, and in those before it that are scaled together with it
  int64_t depth;        // of a row, with the zeros behind it
  ByteOrder order;

  EFORMER_INLINE int64_t Blocks() const { return depth / order.block; }
};

// The functions for one format on one instruction set.
struct Kernels {
  FormatInfo format;

  // y[0 : n1 - n0] = x[k0:k1] @ matrix[k0:k1, n0:n1], for contracted_axis 0; n0 is a multiple of kSliceColumns. For the
  // blocks that FitsGemv lets it have; nullptr where codes can't be looked up by an instruction.
  void (*gemv)(const Matrix& matrix, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y);

  // y[:, n0:n1] = x @ matrix[n0:n1].T for up to kDotRows rows of x, followed by zeros up to a multiple of kXPadding,
  // for contracted_axis 1; n0 is a multiple of 4. For the blocks that FitsDots lets it have; nullptr as `gemv` is.
  void (*dots)(const Matrix& matrix, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y);

  // y[:, n0:n1] for up to kChunkRows rows of x, from depth k0 to k1; n0 starts a panel, and k0 is a multiple of
  // kDepthStep. Rows of y are Width() apart.
  void (*matmul)(const Matrix& matrix, const PlainX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                 float* y);

  // As `matmul` for up to kBfloatChunkRows rows of bfloat16 x, with values rounded to bfloat16; nullptr without AMX.
  void (*bfloat_matmul)(const Matrix& matrix, const uint16_t* x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                        int64_t n1, float* y);

  // The order that `rows` rows of x must have as bytes, for `byte_dots` if it is one and contracted_axis is 1, else for
  // `byte_matmul`. In three parts only where that is faster than floats.
  ByteOrder (*byte_order)(const Matrix& matrix, int64_t rows, int64_t parts);

  // y[n0:n1] = x @ matrix[n0:n1].T for one row of x, for contracted_axis 1.
  void (*byte_dots)(const Matrix& matrix, const ByteX& x, int64_t n0, int64_t n1, float* y);

  // As `matmul` for up to kByteChunkRows rows of x; k0 is a multiple of kByteDepthStep.
  void (*byte_matmul)(const Matrix& matrix, const ByteX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                      int64_t n1, float* y);

  // All values of the rows r0 to r1.
  void (*decode)(const Matrix& matrix, int64_t r0, int64_t r1, float* values);
};

struct InstructionSet {
  const char* name;
  int64_t lanes;  // floats in a vector

  // Puts a multiple of kXPadding values of x into the order in which `dots` looks codes up.
  void (*put_in_lanes)(const float* x, int64_t count, float* to);

  // Makes bytes of row `row` of a group of `rows`, which `values` to `totals` are of. What follows the last block stays
  // as it is. False if x is not finite or beyond 2^100, or so small that its steps are not normal (2^-100 in parts).
  bool (*to_bytes)(const float* x, int64_t depth, const ByteOrder& order, int64_t row, int64_t rows, int8_t* values,
                   float* steps, int32_t* sums, float* totals);

  const Kernels* begin;
  const Kernels* end;
};

namespace amx { const InstructionSet& Instructions(); }
namespace avx512_vnni { const InstructionSet& Instructions(); }
namespace avx512 { const InstructionSet& Instructions(); }
namespace avx2_vnni { const InstructionSet& Instructions(); }
namespace avx2 { const InstructionSet& Instructions(); }
namespace neon_i8mm { const InstructionSet& Instructions(); }
namespace neon_dot { const InstructionSet& Instructions(); }
namespace neon { const InstructionSet& Instructions(); }
namespace portable { const InstructionSet& Instructions(); }

}  // namespace eformer
