// What the kernels of every instruction set have in common: the matrix they multiply by, and their table of functions.
//
// Codes, scales and x come from files of strangers. No value read from a buffer is an index without a mask or a check at
// the place where it is one: a lookup takes the lowest bits of a code, a table of 256 values a whole byte. How far a
// kernel reads and writes follows from sizes alone, which problem.cc has checked against the buffers.
#ifndef EFORMER_KERNELS_H_
#define EFORMER_KERNELS_H_

#include <cstdint>

namespace eformer {

// This file is compiled for several instruction sets, of which the linker would keep one copy of a function: no copies.
#define EFORMER_INLINE inline __attribute__((always_inline))

// Of sizes: neither is negative, and b is not 0. No sum that could overflow.
EFORMER_INLINE int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// For kernels, none of which may end the process: a call in which memory runs out returns an error.
[[noreturn]] void OutOfMemory();

enum class Format { kInt8, kNf4, kTernary };

// One quantized matrix of `rows` x `cols` values, row-major.
struct Matrix {
  Format format;
  const uint8_t* codes;  // one value a byte (kInt8), two (kNf4) or four (kTernary) along `packed_axis`
  int64_t rows;
  int64_t cols;
  int packed_axis;         // 0 or 1
  int contracted_axis;     // 0: x @ matrix; 1: x @ matrix.T
  const float* scale;      // kNf4: of each block, (rows / block, cols) or (rows, cols / block), rounded up; else of each
  int64_t scale_row_step;  // value, with steps of 0 where one serves a whole axis; a nullptr is 1
  int64_t scale_col_step;
  int64_t block;  // values of kNf4 along `packed_axis` that share a scale; even, and little longer than the axis

  EFORMER_INLINE int64_t Codes(int64_t values) const {  // bytes that hold so many values of the packed axis
    const int64_t per_byte = format == Format::kInt8 ? 1 : format == Format::kNf4 ? 2 : 4;
    return CeilDiv(values, per_byte);
  }
  EFORMER_INLINE int64_t RowBytes() const { return packed_axis == 1 ? Codes(cols) : cols; }
  EFORMER_INLINE int64_t Bytes() const { return RowBytes() * (packed_axis == 0 ? Codes(rows) : rows); }
  EFORMER_INLINE const uint8_t* CodesAt(int64_t row, int64_t col) const {
    const int64_t packed = Codes((packed_axis == 0 ? row : col) + 1) - 1;
    return packed_axis == 0 ? codes + packed * RowBytes() + col : codes + row * RowBytes() + packed;
  }
  EFORMER_INLINE int64_t Depth() const { return contracted_axis == 0 ? rows : cols; }  // how long the sums are
  EFORMER_INLINE int64_t Width() const { return contracted_axis == 0 ? cols : rows; }  // how many there are per row of x
  EFORMER_INLINE int64_t BlockScaleStride() const { return packed_axis == 0 ? cols : CeilDiv(cols, block); }
};

// Floats behind the end of each row of `x` that kernels may read, and that must be zero.
constexpr int64_t kReadAhead = 64;
// Columns a call of `multiply_row_by_rows` may cover: its sums stay in the first-level cache.
constexpr int64_t kStripe = 4096;
// Depth must be cut at multiples of this when `multiply_row_by_rows` covers a part, and at whole blocks.
constexpr int64_t kDepthStep = 64;
// Rows of x that `multiply` takes at a time: their sums stay in cache.
constexpr int64_t kMany = 240;

// Rows of x in groups that share a tile of the result: as few as there can be, as equal as they can be. The groups lie
// one behind the other, and in each the values of one depth side by side.
struct RowGroups {
  int64_t rows;
  int64_t count;

  EFORMER_INLINE RowGroups(int64_t rows, int64_t tall) : rows(rows), count(CeilDiv(rows, tall)) {}
  EFORMER_INLINE int64_t First(int64_t group) const { return rows * group / count; }
  EFORMER_INLINE int64_t Size(int64_t group) const { return First(group + 1) - First(group); }
};

// Tiles of bfloat16 rows of x, as `multiply_bfloats` takes them: those of 16 rows one behind the other along the depth,
// row by row, with zeros where there are no rows or no depth.
constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
constexpr int64_t kManyBfloats = 512;  // rows at a time: their sums stay in cache

struct Kernels {
  const char* name;

  // Whether the two functions for one row of `x` can take the matrix; `multiply` can take any.
  bool (*has_row_kernel)(const Matrix& matrix);

  // y[0 : n1 - n0] = x[k0:k1] @ matrix[k0:k1, n0:n1], of a matrix contracted over axis 0; n0 a multiple of kStripe.
  void (*multiply_row_by_rows)(const Matrix& matrix, const float* x, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                               float* y);

  // The same of an x of whole numbers of at most 127, with kReadAhead zeros behind them, where there is a kernel.
  bool (*has_integer_kernel)(const Matrix& matrix);
  void (*multiply_integers_by_rows)(const Matrix& matrix, const int8_t* x, int64_t k0, int64_t k1, int64_t n0,
                                    int64_t n1, float* y);

  // y[n0:n1] = x @ matrix[n0:n1].T, of a matrix contracted over axis 1; n0 a multiple of what shares a scale or a byte.
  void (*multiply_row_by_columns)(const Matrix& matrix, const float* x, int64_t n0, int64_t n1, float* y);

  // How many columns of the result a call of `multiply` should make, and start at a multiple of.
  int64_t (*panel)(const Matrix& matrix, int64_t count);

  // y[:, n0:n1] of up to kMany rows of x, which lie as RowGroups(count, tall) says, from their elements k0 to k1; k0 a
  // multiple of kDepthStep. Rows of y are Width() apart.
  int64_t tall;
  void (*multiply)(const Matrix& matrix, const float* x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                   float* y);

  // The same of up to kManyBfloats rows of bfloat16, in tiles, and of values rounded to it; nullptr where none is faster.
  void (*multiply_bfloats)(const Matrix& matrix, const uint16_t* x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                           int64_t n1, float* y);

  // All values of a row.
  void (*decode)(const Matrix& matrix, int64_t row, float* values);
};

namespace amx {  // and all of AVX-512
extern const Kernels kKernels;
}
namespace avx512_vnni {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace portable {
extern const Kernels kKernels;
}

}  // namespace eformer

#endif  // EFORMER_KERNELS_H_
