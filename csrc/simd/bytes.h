// Multiplications of bytes and exact sums of them, for the instruction set that this file is compiled for.
#pragma once

#include "matrix/byte_codes.h"

// For the intrinsic, GCC 12 copies each sum to another register and back: a tile takes twice the time.
#if defined(__GNUC__) && !defined(__clang__)
#define EFORMER_GCC_MOVES_SUMS
#endif

namespace eformer::EFORMER_ISA {

// How many bytes ahead of the codes being read dot products along rows prefetch, on Zen 5: at least, and at most, so
// that prefetched lines still are in L1 when they are read.
constexpr int64_t kDotBytesAhead = 16384, kDotMostAhead = 32768;
constexpr int64_t kDotScalesAhead = 4;  // rows of scales ahead, times the rows whose scales are read at once

#if defined(EFORMER_VNNI) && defined(__AVX512VNNI__)
#define EFORMER_BYTE_DOTS
constexpr int kIntBytes = 64;
#elif defined(EFORMER_NEON)
constexpr int kIntBytes = 16;
#else
constexpr int kIntBytes = 32;
#endif
constexpr int kIntLanes = kIntBytes / 4;

typedef int32_t Ints __attribute__((vector_size(kIntBytes)));
typedef float Reals __attribute__((vector_size(kIntBytes)));
typedef int16_t Shorts __attribute__((vector_size(kIntBytes)));
typedef uint8_t IntBytes __attribute__((vector_size(kIntBytes)));

template <class Vector>
EFORMER_INLINE Vector LoadVector(const void* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class Vector>
EFORMER_INLINE void StoreVector(void* p, Vector v) {
  std::memcpy(p, &v, sizeof v);
}

EFORMER_INLINE Reals ToReals(Ints ints) {
#if defined(EFORMER_BYTE_DOTS)
  return (Reals)_mm512_cvtepi32_ps((__m512i)ints);
#elif defined(__AVX2__)
  return (Reals)_mm256_cvtepi32_ps((__m256i)ints);
#else
  return __builtin_convertvector(ints, Reals);
#endif
}

// Sums of the parts of x, dots(0) to dots(kParts - 1), as one in steps.
template <int kParts, class Dots>
EFORMER_INLINE Reals Joined(const Dots& dots) {
  Reals sum = ToReals(dots(kParts - 1));
#pragma GCC unroll 3
  for (int part = kParts - 2; part >= 0; --part) sum += ToReals(dots(part)) * kPartUnits[kXParts - kParts + part];
  return sum;
}

// values[places[i]] for each lane i; places are below kIntLanes.
EFORMER_INLINE Reals PickReals(Reals values, Ints places) {
#if defined(EFORMER_BYTE_DOTS)
  return (Reals)_mm512_permutexvar_ps((__m512i)places, (__m512)values);
#elif defined(__AVX2__)
  return (Reals)_mm256_permutevar8x32_ps((__m256)values, (__m256i)places);
#elif defined(EFORMER_NEON)
  return Pick(values, places);
#else
  Reals found;
  for (int i = 0; i < kIntLanes; ++i) found[i] = values[places[i]];
  return found;
#endif
}

// The same for the first kCount of the floats at `values`: a load of more would cross cache lines more often.
template <int kCount>
EFORMER_INLINE Reals PickFirst(const float* values, Ints places) {
#if defined(EFORMER_BYTE_DOTS)
  if constexpr (kCount <= 4) return PickReals((Reals)_mm512_castps128_ps512(_mm_loadu_ps(values)), places);
  if constexpr (kCount <= 8) return PickReals((Reals)_mm512_castps256_ps512(_mm256_loadu_ps(values)), places);
#endif
  return PickReals(LoadVector<Reals>(values), places);
}

// -1 in the first `count` lanes, and 0 in the others.
EFORMER_INLINE Ints FirstLanes(int64_t count) {
  Ints lanes;
  for (int i = 0; i < kIntLanes; ++i) lanes[i] = i;
  return lanes < static_cast<int32_t>(count < kIntLanes ? count : kIntLanes) - Ints{};
}

// The sums of all lanes of each vector.
EFORMER_INLINE void AddUp(const Reals (&sums)[1], float* to) {
  float lanes[kIntLanes], total = 0;
  StoreVector(lanes, sums[0]);
  for (float lane : lanes) total += lane;
  *to = total;
}

EFORMER_INLINE void AddUp(const Reals (&sums)[4], float* to) {
#if defined(__AVX2__)
  __m256 halves[4];
  for (int i = 0; i < 4; ++i) {
#if defined(EFORMER_BYTE_DOTS)
    const __m512 sum = (__m512)sums[i];
    halves[i] = _mm512_castps512_ps256(sum) + _mm512_extractf32x8_ps(sum, 1);
#else
    halves[i] = (__m256)sums[i];
#endif
  }
  const __m256 quarters = _mm256_hadd_ps(_mm256_hadd_ps(halves[0], halves[1]), _mm256_hadd_ps(halves[2], halves[3]));
  _mm_storeu_ps(to, _mm256_castps256_ps128(quarters) + _mm256_extractf128_ps(quarters, 1));
#else
  for (int i = 0; i < 4; ++i) {
    const Reals one[1] = {sums[i]};
    AddUp(one, to + i);
  }
#endif
}

// Four bytes of x, repeated.
EFORMER_INLINE Ints SpreadFour(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return four - Ints{};
}

#if defined(EFORMER_BYTE_DOTS)
EFORMER_INLINE IntBytes ShiftDown(IntBytes codes, int bits) {
  return (IntBytes)_mm512_srli_epi16((__m512i)codes, bits);
}

EFORMER_INLINE IntBytes LookUpBytes(const ByteTable& table, IntBytes codes) {
  const __m512i twice = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table.bytes)));
  return (IntBytes)_mm512_shuffle_epi8(twice, (__m512i)codes);
}
#elif defined(EFORMER_NEON)
EFORMER_INLINE IntBytes ShiftDown(IntBytes codes, int bits) { return codes >> bits; }

EFORMER_INLINE IntBytes LookUpBytes(const ByteTable& table, IntBytes codes) {
  return (IntBytes)vqtbl1q_u8(vld1q_u8(table.bytes), (uint8x16_t)codes);
}
#endif

EFORMER_INLINE Bytes LookUpBytes(const ByteTable& table, Bytes codes) {
#if defined(__AVX2__)
  return (Bytes)_mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(table.bytes)), (__m256i)codes);
#elif defined(EFORMER_NEON)
  IntBytes halves[2];
  std::memcpy(halves, &codes, sizeof codes);
  for (IntBytes& half : halves) half = LookUpBytes(table, half);
  return LoadVector<Bytes>(halves);
#else
  for (int i = 0; i < kStripSize; ++i) codes[i] = table.bytes[codes[i] & 15];
  return codes;
#endif
}

// Turns packed codes into bytes of Int8Codes where that takes flipping bits alone.
template <class Format, int kPlaces, class Vector>
EFORMER_INLINE Vector FlipPacked(Vector packed) {
  if constexpr (Int8Codes<Format>::kLooksUp || Int8Codes<Format>::FlippedBits() == 0) {
    return packed;
  } else {
    int bits = 0;
    for (int place = 0; place < kPlaces; ++place) bits |= Int8Codes<Format>::FlippedBits() << place * (8 / kPlaces);
    return packed ^ static_cast<uint8_t>(bits);
  }
}

// The bytes of Int8Codes at a place of packed codes, after FlipPacked.
template <class Format, int kPlaces, int kPlace, class Vector>
EFORMER_INLINE Vector BytesAt(Vector packed) {
  constexpr int kBits = 8 / kPlaces;
  constexpr int kShift = kBits * (Format::kHighBitsFirst ? kPlaces - 1 - kPlace : kPlace);
  Vector codes = packed;
  if constexpr (kShift > 0) codes = ShiftDown(codes, kShift);
  if constexpr (kBits < 8) codes = codes & static_cast<uint8_t>((1 << kBits) - 1);
  if constexpr (Int8Codes<Format>::kLooksUp) {
    static constexpr ByteTable kTable = ByteTableOf<Format>();
    codes = LookUpBytes(kTable, codes);
  }
  return codes;
}

// The low bits of codes that are NaN, after FlipPacked.
template <class Vector>
EFORMER_INLINE Vector FindNaN(Vector flipped) {
  return flipped & ShiftDown(flipped, 1) & static_cast<uint8_t>(0x55);
}

// Calls use(std::integral_constant<int, place>) for each place.
template <int kPlaces, int kPlace = 0, class Use>
EFORMER_INLINE void ForEachPlace(const Use& use) {
  use(std::integral_constant<int, kPlace>());
  if constexpr (kPlace + 1 < kPlaces) ForEachPlace<kPlaces, kPlace + 1>(use);
}

// In each lane, the sum of four bytes of codes times four bytes of x; no byte of x is -128. Sums that start with
// Start(first) end with Finish(sum, first).
struct ByteDots {
  typedef IntBytes Codes;
  typedef Ints Sum;
  static constexpr int kMaxTerms = 16;

  EFORMER_INLINE static Codes Prepare(IntBytes codes) { return codes; }
  EFORMER_INLINE static Sum Add(Sum sum, Codes codes, Ints x) {
#if defined(EFORMER_BYTE_DOTS) && defined(EFORMER_GCC_MOVES_SUMS)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
#elif defined(EFORMER_BYTE_DOTS)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__) && defined(EFORMER_GCC_MOVES_SUMS)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
    return sum;
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(EFORMER_NEON) && defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
#elif defined(EFORMER_NEON)
    const int8x16_t a = (int8x16_t)codes, b = (int8x16_t)x;
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
    return (Ints)vpadalq_s16((int32x4_t)sum, pairs);
#else
    typedef int8_t Factors __attribute__((vector_size(kIntBytes)));
    const Factors factors = (Factors)x;
    for (int i = 0; i < kIntBytes; ++i) sum[i / 4] += static_cast<int32_t>(codes[i]) * factors[i];
    return sum;
#endif
  }
  EFORMER_INLINE static Ints Widen(Sum sum) { return sum; }
  EFORMER_INLINE static Sum Start(Ints first) { return first; }
  EFORMER_INLINE static Ints Finish(Sum sum, Ints) { return sum; }
};

#if defined(__AVX2__) && !defined(EFORMER_BYTE_DOTS) && !defined(__AVXVNNI__)

// The same in 16 bits, for codes of few bits.
template <int kTerms>
struct ShortDots {
  typedef IntBytes Codes;
  typedef Shorts Sum;
  static constexpr int kMaxTerms = kTerms;

  EFORMER_INLINE static Codes Prepare(IntBytes codes) { return codes; }
  EFORMER_INLINE static Sum Add(Sum sum, Codes codes, Ints x) {
    return sum + (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
  }
  EFORMER_INLINE static Ints Widen(Sum sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
  EFORMER_INLINE static Sum Start(Ints) { return Sum{}; }
  EFORMER_INLINE static Ints Finish(Sum sum, Ints first) { return Widen(sum) + first; }
};

// The same for signed codes: their sizes, times x with their signs.
struct SignedDots {
  struct Codes {
    __m256i signs, sizes;
  };
  typedef Ints Sum;
  static constexpr int kMaxTerms = 16;

  EFORMER_INLINE static Codes Prepare(IntBytes codes) { return {(__m256i)codes, _mm256_abs_epi8((__m256i)codes)}; }
  EFORMER_INLINE static Sum Add(Sum sum, const Codes& codes, Ints x) {
    const __m256i pairs = _mm256_maddubs_epi16(codes.sizes, _mm256_sign_epi8((__m256i)x, codes.signs));
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  EFORMER_INLINE static Ints Widen(Sum sum) { return sum; }
  EFORMER_INLINE static Sum Start(Ints first) { return first; }
  EFORMER_INLINE static Ints Finish(Sum sum, Ints) { return sum; }
};

constexpr int ShortTerms(int fit) {
  int terms = ByteDots::kMaxTerms;
  while (terms > fit) terms /= 2;
  return terms;
}

template <class Format>
using DotsOf =
    std::conditional_t<Int8Codes<Format>::kSigned, SignedDots, ShortDots<ShortTerms(Int8Codes<Format>::kShortSums)>>;

// For fields of few bits.
template <int kBits>
using FieldDots = ShortDots<ShortTerms(ShortSums((1 << kBits) - 1))>;

#else

template <class Format>
using DotsOf = ByteDots;

template <int kBits>
using FieldDots = ByteDots;

#endif

}  // namespace eformer::EFORMER_ISA
