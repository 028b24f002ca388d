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
  int max_values_per_byte;
  CodeType codes;      // the dtype of planes
  bool clear_padding;  // whether loops multiply codes behind the end of the packed axis
  ScaleKind scales;
  bool float_scales;  // kPerBlock: scales must be float32, and there are no offsets
  float centre;       // of the values of blocks that have neither an offset nor a zero
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
};

// One quantized matrix of `rows` x `cols` values, row-major.
struct Matrix {
  const uint8_t* planes[kMaxPlanes];  // the codes, several values a byte along `packed_axis`
  int64_t rows;
  int64_t cols;
  int packed_axis;         // 0 or 1
  int contracted_axis;     // 0: x @ matrix; 1: x @ matrix.T
  const float* scale;      // kPerBlock: (rows / block, cols) or (rows, cols / block), rounded up; else nullptr or an
  int64_t scale_row_step;  // entry for each value, with steps of 0 along an axis that shares one
  int64_t scale_col_step;
  int64_t block;           // kPerBlock: values along `packed_axis` that share a scale
  BlockNumbers scales;     // kPerBlock: stored_scales.h reads them; the same as `scale` if format.h asks for float32
  BlockNumbers offsets;    // kPerBlock: what is added to scale * value, or
  bool offsets_are_zeros;  // what is subtracted from values before they are scaled
  float centre;            // what is subtracted from all values before they are scaled
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

// How `dot_matmul` wants rows of x.
enum class DotOrder {
  kNone,       // there is no such loop for the matrix
  kPlain,      // as they are
  kPairs,      // with values for even and for odd places of codes apart
  kWordsOf4,   // as words of 4 values are looked up, in RowGroups(rows, dot_tile_rows) whose vectors alternate
  kWordsOf8,   // the same for words of 8 values
  kWordsOf16,  // or 16
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

// Rows of x rounded to int8. Blocks of a row share a step: x is about an integer from -127 to 127 times it. Zeros
// follow each row, up to a multiple of kInt8Padding. Blocks of 64 change the logits of SmolLM2-135M in INT8 by 4.0% in
// norm, blocks of 32 by 3.2% (`make llm-bench`).
constexpr int64_t kInt8Block = 32;
constexpr int64_t kMaxInt8Block = 64;  // of x that is split into bytes
constexpr int64_t kInt8Padding = 256;
constexpr int64_t kInt8DepthStep = 256;  // the contracted axis is cut at multiples of this
constexpr int64_t kInt8ChunkRows = 256;  // rows of x in a call of `int8_matmul`: their sums stay in L2

// The order of a row of rounded x: value `places` * byte + place is at byte / span * span * places + place * span +
// byte % span.
struct Int8Order {
  int64_t block;  // of x: 16, 32 or 64; 0: there is no loop for int8
  int64_t places;
  int64_t span;
  int64_t scaled;  // values of x whose sums are scaled together: a multiple of `block`
};

// Rows of rounded x. For several rows in a group, four bytes of each are adjacent, and so are their steps and sums.
struct Int8X {
  const int8_t* values;
  const float* steps;   // of each block
  const int32_t* sums;  // of the integers of each block
  const float* totals;  // of x in each block, and in those before it that are scaled together with it
  int64_t depth;        // of a row, with the zeros behind it
  int64_t block;
  int64_t scaled;  // as Int8Order says
};

// Rows of x split into bytes, as split_x.h says. In a group of rows, four bytes of each part of each row are adjacent,
// and so are the steps and the sums of a block.
constexpr int kXParts = 3;

struct SplitX {
  const int8_t* values;
  const float* steps;       // of each block
  const float* sums;        // of x in each block
  const int32_t* of_parts;  // sums of the bytes of each part, in each block
  int64_t depth;            // of a row, with the zeros behind it
  int64_t block;
};

// The functions for one format on one instruction set. Without `row_matmul`, `matmul` serves for one row of x too.
struct Kernels {
  FormatInfo format;

  // y[0 : n1 - n0] = x[k0:k1] @ matrix[k0:k1, n0:n1], for contracted_axis 0; n0 is a multiple of kSliceColumns.
  void (*row_matmul)(const Matrix& matrix, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1, float* y);

  // y[n0:n1] = x @ matrix[n0:n1].T, for contracted_axis 1; n0 starts a block, or a byte.
  void (*row_matmul_transposed)(const Matrix& matrix, const float* x, int64_t n0, int64_t n1, float* y);

  // y[:, n0:n1] for up to kChunkRows rows of x, from depth k0 to k1; n0 starts a panel, and k0 is a multiple of
  // kDepthStep. Rows of y are Width() apart.
  void (*matmul)(const Matrix& matrix, const PlainX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                 float* y);

  // The order that x must have for `dot_matmul`.
  DotOrder (*dot_order)(const Matrix& matrix);

  // As `matmul` for all of the depth, up to kDotRows rows of x in the order for it, followed by zeros up
  // to a multiple of kXPadding, and contracted_axis 1; n0 starts a byte.
  void (*dot_matmul)(const Matrix& matrix, const PlainX& x, int64_t count, int64_t n0, int64_t n1, float* y);

  // As `matmul` for up to kBfloatChunkRows rows of bfloat16 x, with values rounded to bfloat16; nullptr without AMX.
  void (*bfloat_matmul)(const Matrix& matrix, const uint16_t* x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                        int64_t n1, float* y);

  // The order that x must have for `int8_dots` (one row of x and contracted_axis 1) or `int8_matmul`.
  Int8Order (*int8_order)(const Matrix& matrix, bool dots);

  // y[n0:n1] = x @ matrix[n0:n1].T for one row of rounded x, for contracted_axis 1.
  void (*int8_dots)(const Matrix& matrix, const Int8X& x, int64_t n0, int64_t n1, float* y);

  // As `matmul` for up to kInt8ChunkRows rows of rounded x in RowGroups(count, int8_tile_rows); k0 is a multiple of
  // kInt8DepthStep.
  void (*int8_matmul)(const Matrix& matrix, const Int8X& x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                      int64_t n1, float* y);

  // The order that x must have for `split_matmul`, if that is the fastest way to multiply few rows of x.
  Int8Order (*split_order)(const Matrix& matrix);

  // As `int8_matmul` for rows of split x in RowGroups(count, split_tile_rows).
  void (*split_matmul)(const Matrix& matrix, const SplitX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                       int64_t n1, float* y);

  // All values of the rows r0 to r1.
  void (*decode)(const Matrix& matrix, int64_t r0, int64_t r1, float* values);
};

struct InstructionSet {
  const char* name;
  int64_t int8_tile_rows;   // rows of rounded x whose sums fit into registers
  int64_t split_tile_rows;  // the same for split x
  int64_t dot_tile_rows;    // the same for float x in the orders of words

  // Puts `count` values of a row of x, a multiple of kXPadding, into an order: those of row `row` of `rows` side by
  // side for the orders of words, of one row otherwise.
  void (*order)(DotOrder order, const float* x, int64_t count, int64_t row, int64_t rows, float* to);

  // Rounds a row of x; false if it is not finite or beyond 2^100, or its steps are not. What follows the last block
  // stays as it is.
  bool (*round)(const float* x, int64_t depth, const Int8Order& order, int8_t* values, float* steps, int32_t* sums);

  // Splits a row of x, whose depth is a multiple of kInt8Padding, one part behind the other; false if it is not finite,
  // or has blocks that are beyond 2^100 or below 2^-100.
  bool (*split)(const float* x, int64_t depth, const Int8Order& order, int8_t* values, float* steps, float* sums,
                int32_t* of_parts);

  const Kernels* begin;
  const Kernels* end;
};

namespace amx { extern const InstructionSet kInstructionSet; }
namespace avx512_vnni { extern const InstructionSet kInstructionSet; }
namespace avx512 { extern const InstructionSet kInstructionSet; }
namespace avx2_vnni { extern const InstructionSet kInstructionSet; }
namespace avx2 { extern const InstructionSet kInstructionSet; }
namespace neon_i8mm { extern const InstructionSet kInstructionSet; }
namespace neon_dot { extern const InstructionSet kInstructionSet; }
namespace neon { extern const InstructionSet kInstructionSet; }
namespace portable { extern const InstructionSet kInstructionSet; }

}  // namespace eformer
