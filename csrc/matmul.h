// Several rows of x times any matrix: a panel of the matrix is decoded into cache and used for all rows.
#pragma once

#include <utility>

#include "decoded_rows.h"
#include "panels.h"

namespace eformer::EFORMER_ISA {

constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;  // rows of x whose sums fit into registers

// The sums of kRows rows of x.
template <int kRows>
struct Tile {
  static constexpr int kVectors = 2 * kRows <= kTileRows ? 4 : 2;

  // sums[r] += x[:, r] @ panel * scale; a scale of nullptr is 1.
  static void Add(const float* panel, const float* x, int64_t depth, const float* scale, float* sums) {
    Vec found[kRows][kVectors] = {};
    for (int64_t k = 0; k < depth; ++k, panel += kPanelStride, x += kRows) {
      Vec values[kVectors];
      for (int j = 0; j < kVectors; ++j) values[j] = Load(panel + j * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec factor = Spread(x[r]);
        for (int j = 0; j < kVectors; ++j) found[r][j] += values[j] * factor;
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      const Vec factor = scale != nullptr ? Load(scale + j * kLanes) : Spread(1);
      for (int r = 0; r < kRows; ++r) {
        float* sum = sums + r * kPanelColumns + j * kLanes;
        Store(sum, Load(sum) + found[r][j] * factor);
      }
    }
  }

  // The same for `columns` of the panel.
  static void AddAll(const float* panel, int64_t columns, const float* x, int64_t depth, const float* scale,
                     float* sums) {
    for (int64_t i = 0; i < columns; i += kVectors * kLanes) {
      Add(panel + i, x, depth, scale != nullptr ? scale + i : nullptr, sums + i);
    }
  }
};

template <class Rows>
struct TileFunctions;

template <int... kRowsLessOne>
struct TileFunctions<std::integer_sequence<int, kRowsLessOne...>> {
  static constexpr decltype(&Tile<1>::AddAll) kOf[] = {nullptr, Tile<kRowsLessOne + 1>::AddAll...};
};

template <class Format>
constexpr decltype(Kernels::row_matmul_transposed) RowMatmulTransposedOf() {
  if constexpr (std::is_null_pointer_v<decltype(Format::RowMatmulTransposed)>) {
    return DecodedRowMatmulTransposed<Format>;
  } else {
    return Format::RowMatmulTransposed;
  }
}

// As Kernels::matmul says.
template <class Format>
static void Matmul(const Matrix& m, const float* x, int64_t count, int64_t k0, int64_t k1, int64_t n0, int64_t n1,
                   float* y) {
  typedef typename Format::Panels Own;
  std::conditional_t<std::is_void_v<Own>, DecodedPanels<Format>, Own> panels(m, count, n0, n1);
  const bool few = count <= kFewRows;
  const int64_t max_depth = few ? 64 : kMaxPanelDepth;       // for few rows, a panel stays in L1
  const int64_t at_once = few ? kPanelColumns : 2 * kLanes;  // for many, this part of it does
  const int64_t depth = m.Depth();
  const RowGroups groups(count, kTileRows);
  const Floats panel((max_depth + 8) * kPanelStride), all_sums(CeilDiv(n1 - n0, kPanelColumns) * count * kPanelColumns);
  for (int64_t k = k0, end; k < k1; k = end) {
    end = panels.End(k, Min(k + max_depth, k1));
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      const PrefetchDistances ahead(m, kValuesPerByte<Format>, end - k, n, n0, n1);
      const float* scale = panels.Decode(k, end - k, n, Min(kPanelColumns, n1 - n), ahead, panel.values);
      float* sums = all_sums.values + (n - n0) * count;
      for (int64_t i = 0; i < kPanelColumns; i += at_once) {
        for (int64_t g = 0; g < groups.count; ++g) {
          const int64_t first = groups.First(g), rows = groups.Size(g);
          const auto add = TileFunctions<std::make_integer_sequence<int, kTileRows>>::kOf[rows];
          add(panel.values + i, at_once, x + first * depth + k * rows, end - k, scale != nullptr ? scale + i : nullptr,
              sums + first * kPanelColumns + i);
        }
      }
    }
  }
  uint8_t columns[kPanelColumns];
  panels.Order(columns);
  for (int64_t n = n0; n < n1; n += kPanelColumns) {
    const float* sums = all_sums.values + (n - n0) * count;
    for (int64_t r = 0; r < count; ++r, sums += kPanelColumns) {
      float row[kPanelColumns];
      for (int i = 0; i < kPanelColumns; ++i) row[columns[i]] = sums[i];
      std::memcpy(y + r * m.Width() + n, row, Min(kPanelColumns, n1 - n) * sizeof(float));
    }
  }
}

}  // namespace eformer::EFORMER_ISA
