// Rows of bfloat16 times any matrix, whose values are rounded to bfloat16 too: on AMX, which multiplies tiles of 16 x 32
// by tiles of 32 x 16. A part of the matrix is decoded into cache, as such tiles, and used for all rows.
#ifndef EFORMER_BFLOATS_H_
#define EFORMER_BFLOATS_H_

#include "multiply.h"

#if defined(EFORMER_AMX)
#include "amx.h"
#endif

namespace eformer {
namespace EFORMER_ISA {

#if defined(EFORMER_AMX)

constexpr int kTileColumns = 16;
constexpr int kTilesWide = kGrain / kTileColumns;  // in a part
constexpr int64_t kTilesDeep = 8;                  // in a part: half of its columns stay in the first level of cache
constexpr int kTileSize = kTileRows * kTileDepth;  // bfloat16 values of x, or of the matrix
constexpr int kTileSums = kTileRows * kTileColumns;

// The sums of one or two tiles of rows and two of columns, which start at 0 or at what there is.
template <bool Two>
static inline void AddTiles(const uint16_t* x, int64_t second, const uint16_t* part, int64_t deep, bool starts, float* sums) {
  float* others = sums + kTilesWide * kTileSums;
  FinishStores();
  if (starts) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTileSums, 64);
    if (Two) {
      _tile_loadd(2, others, 64);
      _tile_loadd(3, others + kTileSums, 64);
    }
  }
  for (int64_t t = 0; t < deep; ++t, x += kTileSize, part += kTilesWide * kTileSize) {
    _tile_loadd(4, part, 64);
    _tile_loadd(5, part + kTileSize, 64);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if (Two) {
      _tile_loadd(7, x + second, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileSums, 64);
  if (Two) {
    _tile_stored(2, others, 64);
    _tile_stored(3, others + kTileSums, 64);
  }
}

// Tiles of the matrix from (k, n) on: pairs of values of one column side by side, and zeros behind the end.
static inline void DecodeTiles(const Matrix& m, const LoadedTable& table, int64_t k, int64_t n, int64_t width,
                               const Ahead& ahead, float* values, uint16_t* tiles) {
  const int64_t depth = Min(kTileDepth, m.Depth() - k);
  (m.contracted_axis == 0 ? DecodeRows : DecodeColumns)(m, table, k, depth, n, width, ahead, values);
  if (depth < kTileDepth) std::memset(values + depth * kStride, 0, (kTileDepth - depth) * kStride * sizeof(float));
  for (int pair = 0; pair < kTileDepth / 2; ++pair, values += 2 * kStride) {
    for (int wide = 0; wide < kTilesWide; ++wide) {
      const float* from = values + wide * kTileColumns;
      StorePairs(tiles + wide * kTileSize + pair * 2 * kTileColumns, Load(from), Load(from + kStride));
    }
  }
}

// As Kernels::multiply_bfloats says.
static void MultiplyBfloats(const Matrix& m, const uint16_t* x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                            int64_t n1, float* y) {
  const int64_t deep = CeilDiv(m.Depth(), kTileDepth), rows = CeilDiv(count, kTileRows);
  const int64_t first = k0 / kTileDepth, last = CeilDiv(k1, kTileDepth);
  const int64_t part_sums = rows * kTilesWide * kTileSums;
  const Floats values((kTileDepth + 8) * kStride), tiles(kTilesDeep * kTilesWide * kTileSize / 2);
  const Floats all_sums(CeilDiv(n1 - n0, kGrain) * part_sums);
  uint16_t* part = reinterpret_cast<uint16_t*>(tiles.values);
  const LoadedTable table = TableOf(m);
  const Tiles registers;
  for (int64_t t0 = first; t0 < last; t0 += kTilesDeep) {
    const int64_t t1 = Min(t0 + kTilesDeep, last);
    for (int64_t n = n0; n < n1; n += kGrain) {
      const Ahead ahead(m, Min(t1 * kTileDepth, k1) - t0 * kTileDepth, n, n0, n1);
      for (int64_t t = t0; t < t1; ++t) {
        DecodeTiles(m, table, t * kTileDepth, n, Min(kGrain, n1 - n), ahead, values.values,
                    part + (t - t0) * kTilesWide * kTileSize);
      }
      for (int wide = 0; wide < kTilesWide; wide += 2) {
        for (int64_t r = 0; r < rows; r += 2) {
          float* sums = all_sums.values + (n - n0) / kGrain * part_sums + (r * kTilesWide + wide) * kTileSums;
          (r + 1 < rows ? AddTiles<true> : AddTiles<false>)(x + (r * deep + t0) * kTileSize, deep * kTileSize,
                                                            part + wide * kTileSize, t1 - t0, t0 == first, sums);
        }
      }
    }
  }
  for (int64_t n = n0; n < n1; n += kTileColumns) {
    const int64_t part_of_n = (n - n0) / kGrain, wide = (n - n0) % kGrain / kTileColumns;
    for (int64_t row = 0; row < count; ++row) {
      const float* sums = all_sums.values + part_of_n * part_sums +
                          (row / kTileRows * kTilesWide + wide) * kTileSums + row % kTileRows * kTileColumns;
      std::memcpy(y + row * m.Width() + n, sums, Min(kTileColumns, n1 - n) * sizeof(float));
    }
  }
}

constexpr auto kMultiplyBfloats = MultiplyBfloats;

#else

constexpr decltype(Kernels::multiply_bfloats) kMultiplyBfloats = nullptr;

#endif

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_BFLOATS_H_
