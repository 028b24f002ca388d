// The tile registers of AMX, or their emulation in a build that tests the rest on a processor without them.
#pragma once

#include "matrix/matrix.h"
#include "simd/vec.h"

namespace eformer::EFORMER_ISA {

#if defined(EFORMER_EMULATE_AVX512)

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(config) ConfigureEmulated(config)
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, stride) LoadEmulated(tile, from, stride)
#define _tile_stored(tile, to, stride) StoreEmulated(tile, to, stride)
#define _tile_zero(tile) std::memset(emulated[tile], 0, sizeof emulated[tile])
#define _tile_dpbf16ps(sums, a, b) MultiplyEmulated(sums, a, b)
#define _tile_dpbssd(sums, a, b) MultiplyBytesEmulated<int8_t>(sums, a, b)
#define _tile_dpbsud(sums, a, b) MultiplyBytesEmulated<uint8_t>(sums, a, b)

static thread_local uint32_t emulated[8][16][16];
static thread_local uint16_t emulated_bytes[8];  // of a row
static thread_local uint8_t emulated_rows[8];

static inline void ConfigureEmulated(const void* config) {
  std::memcpy(emulated_bytes, static_cast<const char*>(config) + 16, sizeof emulated_bytes);
  std::memcpy(emulated_rows, static_cast<const char*>(config) + 48, sizeof emulated_rows);
}

static inline void LoadEmulated(int tile, const void* from, int64_t stride) {
  std::memset(emulated[tile], 0, sizeof emulated[tile]);
  for (int row = 0; row < emulated_rows[tile]; ++row) {
    std::memcpy(emulated[tile][row], static_cast<const char*>(from) + row * stride, emulated_bytes[tile]);
  }
}

static inline void StoreEmulated(int tile, void* to, int64_t stride) {
  for (int row = 0; row < emulated_rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, emulated[tile][row], emulated_bytes[tile]);
  }
}

// Signed bytes of `a` times bytes of `b`.
template <class Byte>
static inline void MultiplyBytesEmulated(int sums, int a, int b) {
  for (int row = 0; row < emulated_rows[sums]; ++row) {
    for (int col = 0; col < 16; ++col) {
      int32_t sum = static_cast<int32_t>(emulated[sums][row][col]);
      for (int four = 0; four < emulated_rows[b]; ++four) {
        int8_t x[4];
        Byte y[4];
        std::memcpy(x, &emulated[a][row][four], sizeof x);
        std::memcpy(y, &emulated[b][four][col], sizeof y);
        for (int i = 0; i < 4; ++i) sum += x[i] * y[i];
      }
      emulated[sums][row][col] = static_cast<uint32_t>(sum);
    }
  }
}

static inline float AsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline void MultiplyEmulated(int sums, int a, int b) {
  for (int row = 0; row < 16; ++row) {
    for (int col = 0; col < 16; ++col) {
      float sum = AsFloat(emulated[sums][row][col]);
      for (int pair = 0; pair < 16; ++pair) {
        const uint32_t x = emulated[a][row][pair], y = emulated[b][pair][col];
        sum += AsFloat(x << 16) * AsFloat(y << 16);
        sum += AsFloat(x & 0xffff0000) * AsFloat(y & 0xffff0000);
      }
      std::memcpy(&emulated[sums][row][col], &sum, sizeof sum);
    }
  }
}

// Rounds to the nearest, and ties to even.
static inline uint32_t ToBfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Stores sixteen pairs of bfloat16, the first of each in the lower half of a word.
static inline void StorePairs(uint16_t* to, Vec first, Vec second) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t pair = ToBfloat(first[i]) | ToBfloat(second[i]) << 16;
    std::memcpy(to + 2 * i, &pair, sizeof pair);
  }
}

#else

static inline void StorePairs(uint16_t* to, Vec first, Vec second) {
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, halves));
}

#endif

// Makes GCC finish earlier stores: it does not know that tiles are loaded from memory.
static inline void FinishStores() { asm volatile("" ::: "memory"); }

// Configures eight tiles, for as long as this lives: 0 to 3 are sums, 4 and 5 of the matrix, 6 and 7 of x.
struct Tiles {
  explicit Tiles(int x_rows = kAmxRows, int x_bytes = 64) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.rows[tile] = static_cast<uint8_t>(tile / 2 == 2 ? x_bytes / 4 : x_rows);
      if (tile >= 6) config.row_bytes[tile] = static_cast<uint16_t>(x_bytes);
    }
    FinishStores();
    _tile_loadconfig(&config);
    FinishStores();
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Multiplies a tile of rounded x by four tiles of bytes, side by side in rows of 256 bytes, and writes rows of 64 sums.
template <bool kSigned>
EFORMER_INLINE void MultiplyBytes(const int8_t* x, int64_t stride, const uint8_t* bytes, int32_t* sums) {
#define EFORMER_MULTIPLY_TILE(tile, matrix)    \
  _tile_zero(tile);                            \
  _tile_loadd(matrix, bytes + 64 * tile, 256); \
  if constexpr (kSigned) {                     \
    _tile_dpbssd(tile, 6, matrix);             \
  } else {                                     \
    _tile_dpbsud(tile, 6, matrix);             \
  }                                            \
  _tile_stored(tile, sums + 16 * tile, 256)
  FinishStores();
  _tile_loadd(6, x, stride);
  EFORMER_MULTIPLY_TILE(0, 4);
  EFORMER_MULTIPLY_TILE(1, 5);
  EFORMER_MULTIPLY_TILE(2, 4);
  EFORMER_MULTIPLY_TILE(3, 5);
  FinishStores();
#undef EFORMER_MULTIPLY_TILE
}

}  // namespace eformer::EFORMER_ISA
