// Scales of blocks along the columns, for a format with two values a byte. A block may begin anywhere in a strip.
//
// Of(byte) is for the strip that begins at a byte of a row. Of(byte).At(row) gives the scales of its 32 bytes in lane
// order: a Strip, or a Vec if all vectors of the strip have the same.
#pragma once

#include "matrix/codes.h"

namespace eformer::EFORMER_ISA {

static inline bool HasLongBlocks(const Matrix& m) { return m.block % (2 * kStripSize) == 0; }

// Blocks of whole strips.
struct LongBlocks {
  const Matrix& m;

  struct OfStrip {
    const float* scale;
    int64_t stride;

    Vec At(int64_t row) const { return Spread(scale[row * stride]); }
  };
  OfStrip Of(int64_t byte) const { return {m.scale + 2 * byte / m.block, m.BlockScaleStride()}; }
};

// The places of scales for the strips of `bytes` bytes from byte `first` on, which are the same in all rows.
struct ScalePlaces {
  const float* scale;
  int64_t stride, count;  // scales in a row, and in the matrix
  int64_t first;
  Zeros<int64_t> block;    // block of each strip's first byte
  Zeros<int32_t> places;   // block of each byte, counted from that one, in lane order
  bool fit_vector = true;  // whether a vector holds the scales of any strip
  bool alike = true;       // whether the vectors of a strip have the same places

  // Leaves all empty for long blocks, which do not need places.
  ScalePlaces(const Matrix& m, int64_t first, int64_t bytes)
      : scale(m.scale),
        stride(m.BlockScaleStride()),
        count(m.rows * stride),
        first(first),
        block(CeilDiv(bytes, kStripSize)),
        places(CeilDiv(bytes, kStripSize) * kStripSize) {
    if (HasLongBlocks(m)) return;
    const int64_t block_bytes = m.block / 2;
    for (int64_t c = 0; c < bytes; c += kStripSize) {
      const int64_t start = (first + c) / block_bytes;
      int64_t now = start, left = block_bytes - (first + c) % block_bytes;
      float natural[kStripSize];
      for (float& place : natural) {
        place = static_cast<float>(now - start);
        if (--left == 0 && now + 1 < stride) ++now, left = block_bytes;
      }
      block.values[c / kStripSize] = start;
      fit_vector = fit_vector && now - start < kLanes;
      float ordered[kStripSize];
      StoreStrip(ordered, FromNatural(LoadStrip(natural)));
      for (int i = 0; i < kStripSize; ++i) {
        places.values[c + i] = static_cast<int32_t>(ordered[i]);
        alike = alike && ordered[i] == ordered[i % kLanes];
      }
    }
  }
};

// Blocks that begin anywhere. Found is the Vec or Strip that At returns.
template <class Found>
struct AnyBlocks {
  const ScalePlaces& all;

  struct OfStrip {
    const ScalePlaces& all;
    const int32_t* places;
    int64_t block;

    Found At(int64_t row) const {
      const int64_t at = row * all.stride + block;
      const float* scale = all.scale + at;
      const bool can_read = at + kLanes <= all.count;
      return all.fit_vector && can_read ? PickAll(Load(scale), Found{}) : Gather(scale);
    }

   private:
    Vec PickAll(Vec scales, Vec) const { return Pick(scales, LoadPlaces(places)); }
    Strip PickAll(Vec scales, Strip found) const {
      for (int i = 0; i < kStripVecs; ++i) found.v[i] = Pick(scales, LoadPlaces(places + i * kLanes));
      return found;
    }
    Found Gather(const float* scale) const {
      float gathered[kStripSize];
      for (int i = 0; i < kStripSize; ++i) gathered[i] = scale[places[i]];
      Found found;
      std::memcpy(&found, gathered, sizeof found);
      return found;
    }
  };
  OfStrip Of(int64_t byte) const {
    const int64_t at = byte - all.first;
    return {all, all.places.values + at, all.block.values[at / kStripSize]};
  }
};

// Calls use(scales) with the kind that the blocks allow.
template <class Use>
static inline void WithScales(const Matrix& m, const ScalePlaces& places, const Use& use) {
  if (HasLongBlocks(m)) return use(LongBlocks{m});
  if (places.alike) return use(AnyBlocks<Vec>{places});
  use(AnyBlocks<Strip>{places});
}

}  // namespace eformer::EFORMER_ISA
