// bfloat16 x times any matrix, whose values are rounded to bfloat16, on AMX: it multiplies tiles of 16 x 32 by tiles of
// 32 x 16. A panel of the matrix is decoded into cache as such tiles, and used for all rows of x.
#pragma once

#include "matrix/pack_floats.h"

#if defined(EFORMER_AMX)
#include "simd/amx.h"
#endif

namespace eformer::EFORMER_ISA {

#if defined(EFORMER_AMX)

constexpr int kAmxColumns = 16;
constexpr int kPanelTiles = kPanelColumns / kAmxColumns;  // tiles side by side in a panel
constexpr int64_t kPanelDepthTiles = 8;                   // along the depth: half of a panel's columns stay in L1
constexpr int kAmxTileValues = kAmxRows * kAmxDepth;      // bfloat16 values of x, or of the matrix
constexpr int kAmxTileSums = kAmxRows * kAmxColumns;

// Adds x @ panel for two tiles of columns and one or two of rows, the second `second` values after the first. `sums` is
// overwritten if this `starts` them.
template <bool kTwo>
static inline void AddTiles(const uint16_t* x, int64_t second, const uint16_t* panel, int64_t depth_tiles, bool starts,
                            float* sums) {
  float* others = sums + kPanelTiles * kAmxTileSums;
  FinishStores();
  if (starts) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kAmxTileSums, 64);
    if (kTwo) {
      _tile_loadd(2, others, 64);
      _tile_loadd(3, others + kAmxTileSums, 64);
    }
  }
  for (int64_t t = 0; t < depth_tiles; ++t, x += kAmxTileValues, panel += kPanelTiles * kAmxTileValues) {
    _tile_loadd(4, panel, 64);
    _tile_loadd(5, panel + kAmxTileValues, 64);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if (kTwo) {
      _tile_loadd(7, x + second, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kAmxTileSums, 64);
  if (kTwo) {
    _tile_stored(2, others, 64);
    _tile_stored(3, others + kAmxTileSums, 64);
  }
}

// Writes the tiles of the matrix from (k, n) on: pairs of values of one column are adjacent, and zeros fill the depth.
template <class Format>
static inline void DecodeTiles(PackFloats<Format>& panels, int64_t k, int64_t n, int64_t width,
                               const PrefetchDistances& ahead, float* values, uint16_t* tiles) {
  const int64_t depth = Min(kAmxDepth, panels.m.Depth() - k);
  panels.Pack(k, depth, n, width, ahead, values);
  if (depth < kAmxDepth)
    std::memset(values + depth * kPanelStride, 0, (kAmxDepth - depth) * kPanelStride * sizeof(float));
  for (int pair = 0; pair < kAmxDepth / 2; ++pair, values += 2 * kPanelStride) {
    for (int wide = 0; wide < kPanelTiles; ++wide) {
      const float* from = values + wide * kAmxColumns;
      StorePairs(tiles + wide * kAmxTileValues + pair * 2 * kAmxColumns, Load(from), Load(from + kPanelStride));
    }
  }
}

// As Kernels::bfloat_matmul says.
template <class Format>
static void BfloatMatmul(const Matrix& m, const uint16_t* x, int64_t count, int64_t k0, int64_t k1, int64_t n0,
                         int64_t n1, float* y) {
  const int64_t depth_tiles = CeilDiv(m.Depth(), kAmxDepth), rows = CeilDiv(count, kAmxRows);
  const int64_t first = k0 / kAmxDepth, last = CeilDiv(k1, kAmxDepth);
  const int64_t panel_sums = rows * kPanelTiles * kAmxTileSums;
  const Floats values((kAmxDepth + 8) * kPanelStride), tiles(kPanelDepthTiles * kPanelTiles * kAmxTileValues / 2);
  const Floats all_sums(CeilDiv(n1 - n0, kPanelColumns) * panel_sums);
  uint16_t* panel = reinterpret_cast<uint16_t*>(tiles.values);
  PackFloats<Format> panels(m, n0, n1);
  const Tiles registers;
  for (int64_t t0 = first; t0 < last; t0 += kPanelDepthTiles) {
    const int64_t t1 = Min(t0 + kPanelDepthTiles, last);
    for (int64_t n = n0; n < n1; n += kPanelColumns) {
      const int64_t depth = Min(t1 * kAmxDepth, k1) - t0 * kAmxDepth;
      const PrefetchDistances ahead(m, kValuesPerByte<Format>, depth, n, n0, n1);
      for (int64_t t = t0; t < t1; ++t) {
        DecodeTiles(panels, t * kAmxDepth, n, Min(kPanelColumns, n1 - n), ahead, values.values,
                    panel + (t - t0) * kPanelTiles * kAmxTileValues);
      }
      for (int wide = 0; wide < kPanelTiles; wide += 2) {
        for (int64_t r = 0; r < rows; r += 2) {
          float* sums =
              all_sums.values + (n - n0) / kPanelColumns * panel_sums + (r * kPanelTiles + wide) * kAmxTileSums;
          (r + 1 < rows ? AddTiles<true> : AddTiles<false>)(x + (r * depth_tiles + t0) * kAmxTileValues,
                                                            depth_tiles * kAmxTileValues, panel + wide * kAmxTileValues,
                                                            t1 - t0, t0 == first, sums);
        }
      }
    }
  }
  for (int64_t n = n0; n < n1; n += kAmxColumns) {
    const int64_t panel_of_n = (n - n0) / kPanelColumns, wide = (n - n0) % kPanelColumns / kAmxColumns;
    for (int64_t row = 0; row < count; ++row) {
      const float* sums = all_sums.values + panel_of_n * panel_sums +
                          (row / kAmxRows * kPanelTiles + wide) * kAmxTileSums + row % kAmxRows * kAmxColumns;
      std::memcpy(y + row * m.Width() + n, sums, Min(kAmxColumns, n1 - n) * sizeof(float));
    }
  }
}

template <class Format>
constexpr auto kBfloatMatmul = BfloatMatmul<Format>;

#else

template <class Format>
constexpr std::nullptr_t kBfloatMatmul = nullptr;

#endif

}  // namespace eformer::EFORMER_ISA
