// The scales of NF4 blocks along the columns, which may be of any length.
//
// Of(byte) is for the strip that begins at a byte of a row, and Of(byte).At(row) gives the scales of its bytes there, in
// lane order: a Strip, or a Vec that serves for each vector of it.
#ifndef EFORMER_SCALES_H_
#define EFORMER_SCALES_H_

#include "codes.h"

namespace eformer {
namespace EFORMER_ISA {

static inline bool HasLongBlocks(const Matrix& m) { return m.block % (2 * kStrip) == 0; }

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

// Where strips find their scales, which is the same in all rows.
struct Positions {
  const float* scale;
  int64_t stride, count;   // between rows, and in all
  int64_t first;           // byte
  Zeros<int64_t> block;    // of each strip's first byte
  Zeros<int32_t> places;   // of each byte's block after that, in lane order
  bool fit_vector = true;  // the scales of a strip
  bool alike = true;       // the vectors of a strip

  // Of the `bytes` from byte `first` on. Long blocks need none.
  Positions(const Matrix& m, int64_t first, int64_t bytes)
      : scale(m.scale),
        stride(m.BlockScaleStride()),
        count(m.rows * stride),
        first(first),
        block(CeilDiv(bytes, kStrip)),
        places(CeilDiv(bytes, kStrip) * kStrip) {
    if (HasLongBlocks(m)) return;
    const int64_t in_block = m.block / 2;  // bytes
    for (int64_t c = 0; c < bytes; c += kStrip) {
      const int64_t start = (first + c) / in_block;
      int64_t now = start, left = in_block - (first + c) % in_block;
      float natural[kStrip];
      for (float& place : natural) {
        place = static_cast<float>(now - start);
        if (--left == 0 && now + 1 < stride) ++now, left = in_block;
      }
      block.values[c / kStrip] = start;
      fit_vector = fit_vector && now - start < kLanes;
      float ordered[kStrip];
      StoreStrip(ordered, FromNatural(LoadStrip(natural)));
      for (int i = 0; i < kStrip; ++i) {
        places.values[c + i] = static_cast<int32_t>(ordered[i]);
        alike = alike && ordered[i] == ordered[i % kLanes];
      }
    }
  }
};

// Blocks that begin anywhere, of which Found, a Vec or a Strip, holds the scales.
template <class Found>
struct AnyBlocks {
  const Positions& positions;

  struct OfStrip {
    const Positions& positions;
    const int32_t* places;
    int64_t block;

    Found At(int64_t row) const {
      const int64_t at = row * positions.stride + block;
      const float* scale = positions.scale + at;
      const bool can_read = at + kLanes <= positions.count;
      return positions.fit_vector && can_read ? PickAll(Load(scale), Found{}) : Gather(scale);
    }

   private:
    Vec PickAll(Vec scales, Vec) const { return Pick(scales, LoadPlaces(places)); }
    Strip PickAll(Vec scales, Strip found) const {
      for (int i = 0; i < kVecs; ++i) found.v[i] = Pick(scales, LoadPlaces(places + i * kLanes));
      return found;
    }
    Found Gather(const float* scale) const {
      float gathered[kStrip];
      for (int i = 0; i < kStrip; ++i) gathered[i] = scale[places[i]];
      Found found;
      std::memcpy(&found, gathered, sizeof found);
      return found;
    }
  };
  OfStrip Of(int64_t byte) const {
    return {positions, positions.places.values + byte - positions.first, positions.block.values[(byte - positions.first) / kStrip]};
  }
};

// Calls use(scales).
template <class Use>
static inline void WithScales(const Matrix& m, const Positions& positions, const Use& use) {
  if (HasLongBlocks(m)) return use(LongBlocks{m});
  if (positions.alike) return use(AnyBlocks<Vec>{positions});
  use(AnyBlocks<Strip>{positions});
}

}  // namespace EFORMER_ISA
}  // namespace eformer

#endif  // EFORMER_SCALES_H_
