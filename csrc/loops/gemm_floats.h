// Several rows of x times any matrix: a panel of the matrix is decoded into cache and used for all rows.
#pragma once

#include <utility>

#include "matrix/pack_floats.h"

namespace eformer::EFORMER_ISA {

// Rows of x whose sums fit into registers. NEON has room for 12, but GCC 12 would keep some of them in memory.
#if defined(EFORMER_NEON)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
#endif

// Rows of a tile where x has many (MR), and its columns (NR): all columns of a panel where registers suffice, so that x
// is read less often; otherwise as many columns as stay in L1.
constexpr int kManyTileRows = kLanes == 16 ? kTileRows / 2 : kTileRows;
constexpr int64_t kManyTileColumns = kLanes == 16 ? kPanelColumns : 2 * kLanes;

// The micro-kernel: sums of kRows rows of x times a panel.
template <int kRows>
struct Tile {
  static constexpr int kVectors = 2 * kRows <= kTileRows ? 4 : 2;

  // sums[r] += x[r] @ panel, or = if this `starts` them.
  static void Add(const float* panel, const PlainX& x, int64_t depth, bool starts, float* sums) {
    Vec found[kRows][kVectors] = {};
    constexpr int kNear = 3;  // rows that an address reaches from a pointer: 0, 1 or 2 times the stride away
    constexpr int kPointers = (kRows + kNear - 1) / kNear;
    const int64_t stride = x.stride;
    const float* from[kPointers];
    for (int i = 0; i < kPointers; ++i) from[i] = x.values + i * kNear * stride;
    for (int64_t k = 0; k < depth; ++k, panel += kPanelStride) {
      Vec values[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) values[j] = Load(panel + j * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = Spread(from[r / kNear][r % kNear * stride]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) found[r][j] += values[j] * factor;
      }
      for (int i = 0; i < kPointers; ++i) ++from[i];
    }
#pragma GCC unroll 12  // without these, GCC 12 keeps the sums in memory too
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        float* sum = sums + r * kPanelColumns + j * kLanes;
        Store(sum, starts ? found[r][j] : Load(sum) + found[r][j]);
      }
    }
  }

  // The same for `columns` of the panel.
  static void AddAll(const float* panel, int64_t columns, const PlainX& x, int64_t depth, bool starts, float* sums) {
    for (int64_t i = 0; i < columns; i += kVectors * kLanes) {
      Add(panel + i, x, depth, starts, sums + i);
    }
  }
};

template <class Rows>
struct TileFunctions;

template <int... kRowsLessOne>
struct TileFunctions<std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&Tile<1>::AddAll) kOf[] = {nullptr, Tile<kRowsLessOne + 1>::AddAll...};
};

// Writes the first `width` sums of the columns of a panel, times `scale` unless it is nullptr.
EFORMER_INLINE void WriteSums(const float* sums, int64_t width, const float* scale, float* y) {
  if (width < kPanelColumns) {
    for (int64_t i = 0; i < width; ++i) y[i] = scale != nullptr ? sums[i] * scale[i] : sums[i];
  } else if (scale != nullptr) {
    for (int i = 0; i < kPanelColumns; i += kLanes) Store(y + i, Load(sums + i) * Load(scale + i));
  } else {
    for (int i = 0; i < kPanelColumns; i += kLanes) Store(y + i, Load(sums + i));
  }
}

// As Kernels::matmul says.
template <class Format>
static void Matmul(const Matrix& m, const PlainX& x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                   float* y) {
  PackFloats<Format> panels(m, n0, n1);
  const bool few = count <= kFewRows;
  const int64_t max_depth = few ? 64 : kMaxPanelDepth;  // for few rows, a panel stays in L1
  const int64_t at_once = few ? kPanelColumns : kManyTileColumns;
  const RowGroups groups(count, few ? kTileRows : kManyTileRows);
  alignas(64) float panel[(kMaxPanelDepth + 8) * kPanelStride];
  const Lines all_sums(CeilDiv(n1 - n0, kPanelColumns) * count * kPanelColumns);
  for (int64_t k = k0, end; k < k1; k = end) {
    end = Min(k + max_depth, k1);
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      const PrefetchDistances ahead(m, kValuesPerByte<Format>, end - k, n, n0, n1);
      panels.Pack(k, end - k, n, Min(kPanelColumns, n1 - n), ahead, panel);
      const float* result_scale = m.result_scale != nullptr ? m.result_scale + n : nullptr;
      for (int64_t i = 0; i < kPanelColumns; i += at_once) {
        const bool ends = end == k1 && i + at_once == kPanelColumns;
        for (int64_t g = 0; g < groups.count; ++g) {
          const int64_t first = groups.First(g), rows = groups.Size(g);
          const auto add = TileFunctions<std::make_integer_sequence<int, kTileRows>>::kOf[rows];
          float* sums = all_sums.values + (n - n0) * count + first * kPanelColumns;
          add(panel + i, at_once, {x.values + first * x.stride + k, x.stride}, end - k, k == k0, sums + i);
          for (int64_t r = 0; ends && r < rows; ++r, sums += kPanelColumns) {  // while they are in L1
            WriteSums(sums, Min(kPanelColumns, n1 - n), result_scale, y + (first + r) * m.Width() + n);
          }
        }
      }
    }
  }
}

}  // namespace eformer::EFORMER_ISA
