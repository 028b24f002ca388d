// Vectors of floats and words and their operations, for the instruction set that this file is compiled for.
//
// Arithmetic is that of GCC's and Clang's vector types. A `Strip` is 32 floats.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "matrix/matrix.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(EFORMER_NEON)
#include <arm_neon.h>
#endif
#if defined(EFORMER_EMULATE_AVX512)  // to test it on processors that do not have it
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include "simd/simde_lacks.h"
#endif
#if defined(__AVX512F__) || defined(EFORMER_EMULATE_AVX512)
#define EFORMER_AVX512
#endif

namespace eformer::EFORMER_ISA {

#if defined(EFORMER_AVX512)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Whether an instruction looks values of codes up. Without it, codes are decoded a row at a time, whatever the loop.
#if defined(__AVX2__) || defined(EFORMER_NEON)
constexpr bool kHasLookups = true;
#else
constexpr bool kHasLookups = false;
#endif

static inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }

// Memory for `count` values, zero at first, which starts at a cache line: vectors of 64 bytes that cross one take twice
// as long to load. A type of this namespace: the linker could take a std::vector's functions
// from another instruction set.
template <class T>
struct Zeros {
  void* all;
  T* values;

  explicit Zeros(int64_t count) : all(std::calloc(count + 64 / sizeof(T), sizeof(T))) {
    if (all == nullptr) OutOfMemory();
    values = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(all) + 63) / 64 * 64);
  }
  ~Zeros() { std::free(all); }
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
};

typedef Zeros<float> Floats;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Places __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint8_t Sixteen __attribute__((vector_size(16)));

constexpr int kStripSize = 32;  // floats
constexpr int kStripVecs = kStripSize / kLanes;

struct Strip {
  Vec v[kStripVecs];
};

// These may shift bits in from the neighbouring byte: mask the result.
static inline Bytes ShiftDown(Bytes codes, int bits) {
#if defined(__AVX2__)
  return (Bytes)_mm256_srli_epi16((__m256i)codes, bits);
#else
  return codes >> bits;
#endif
}

static inline Bytes ShiftUp(Bytes codes, int bits) {
#if defined(__AVX2__)
  return (Bytes)_mm256_slli_epi16((__m256i)codes, bits);
#else
  return codes << bits;
#endif
}

static inline Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

static inline Vec Spread(float x) { return x - Vec{}; }

static inline Places LoadPlaces(const int32_t* p) {
  Places places;
  std::memcpy(&places, p, sizeof places);
  return places;
}

// values[places[i]] for each lane i; places are below kLanes.
static inline Vec Pick(Vec values, Places places) {
#if defined(EFORMER_AVX512)
  return (Vec)_mm512_permutexvar_ps((__m512i)places, (__m512)values);
#elif defined(__AVX2__)
  return (Vec)_mm256_permutevar8x32_ps((__m256)values, (__m256i)places);
#elif defined(EFORMER_NEON)
  return (Vec)vqtbl1q_u8((uint8x16_t)values, (uint8x16_t)(places * 0x04040404 + 0x03020100));
#else
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = values[places[i]];
  return found;
#endif
}

static inline Bytes LoadBytes(const uint8_t* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return b;
}

static inline float Sum(Vec v) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &v, sizeof v);
  Four sum = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) sum += parts[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static inline Strip LoadStrip(const float* p) {
  Strip s;
  for (int i = 0; i < kStripVecs; ++i) s.v[i] = Load(p + i * kLanes);
  return s;
}

static inline void StoreStrip(float* p, const Strip& s) {
  for (int i = 0; i < kStripVecs; ++i) Store(p + i * kLanes, s.v[i]);
}

static inline void AddProduct(Strip& sum, const Strip& values, Vec factor) {
  for (int i = 0; i < kStripVecs; ++i) sum.v[i] += values.v[i] * factor;
}

static inline void AddProduct(Strip& sum, const Strip& a, const Strip& b) {
  for (int i = 0; i < kStripVecs; ++i) sum.v[i] += a.v[i] * b.v[i];
}

static inline Vec Times(Vec values, Vec factor) { return values * factor; }

static inline Strip Times(Strip values, Vec factor) {
  for (int i = 0; i < kStripVecs; ++i) values.v[i] *= factor;
  return values;
}

static inline Strip Times(Strip values, const Strip& factors) {
  for (int i = 0; i < kStripVecs; ++i) values.v[i] *= factors.v[i];
  return values;
}

static inline Strip Plus(Strip values, const Strip& others) {
  for (int i = 0; i < kStripVecs; ++i) values.v[i] += others.v[i];
  return values;
}

static inline Strip Minus(Strip values, const Strip& others) {
  for (int i = 0; i < kStripVecs; ++i) values.v[i] -= others.v[i];
  return values;
}

// The values as they are, rounded: the compiler can't fuse the product that made them with what follows.
static inline Strip Rounded(Strip values) {
#if defined(__AVX512F__)
  for (Vec& v : values.v) asm("" : "+v"(v));
#elif defined(__x86_64__) && !defined(EFORMER_EMULATE_AVX512)
  for (Vec& v : values.v) asm("" : "+x"(v));
#elif defined(EFORMER_NEON)
  for (Vec& v : values.v) asm("" : "+w"(v));
#else
  for (Vec& v : values.v) asm("" : "+m"(v));
#endif
  return values;
}

static inline void Add(Strip& sum, const Strip& values) {
  for (int i = 0; i < kStripVecs; ++i) sum.v[i] += values.v[i];
}

static inline float Sum(const Strip& s) {
  Vec sum = s.v[0];
  for (int i = 1; i < kStripVecs; ++i) sum += s.v[i];
  return Sum(sum);
}

// A word for each of kLanes bytes.
EFORMER_INLINE Words LoadWords(const uint8_t* p) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(EFORMER_NEON)
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return (Words)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
  typedef uint8_t Few __attribute__((vector_size(kLanes)));
  Few bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Words);
#endif
}

// The same for signed bytes, as floats.
EFORMER_INLINE Vec FloatsOfSigned(const uint8_t* p) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__) && !defined(EFORMER_EMULATE_AVX512)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector((Places)(LoadWords(p) << 24) >> 24, Vec);
#endif
}

// words >> shifts in each lane, for shifts below 32.
EFORMER_INLINE Words ShiftEach(Words words, Words shifts) {
#if defined(EFORMER_NEON)
  return (Words)vshlq_u32((uint32x4_t)words, -(int32x4_t)shifts);
#else
  return words >> shifts;
#endif
}

// Each word rotated down by the lowest five bits of its shift.
EFORMER_INLINE Words RotateEach(Words words, Words shifts) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm512_rorv_epi32((__m512i)words, (__m512i)shifts);
#else
  return ShiftEach(words, shifts & 31) | (words << (-shifts & 31));
#endif
}

// The bits of `a` where `mask` has bits, and those of `b` elsewhere.
EFORMER_INLINE Words Select(uint32_t mask, Words a, Words b) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  return (Words)_mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), (__m512i)a, (__m512i)b, 0xCA);
#else
  return (a & mask) | (b & ~mask);
#endif
}

constexpr int kMaxTableBits = kLanes == 16 ? 5 : 4;
constexpr int kMaxTable = 1 << kMaxTableBits;

// Floats to be looked up by the lowest kBits of words.
template <int kBits>
struct Table {
  static_assert(kBits <= kMaxTableBits);
#if defined(EFORMER_AVX512)
  Vec all, others;  // the others are behind the first sixteen

  EFORMER_INLINE Vec LookUp(Words words) const {
    if constexpr (kBits <= 4) return (Vec)_mm512_permutexvar_ps((__m512i)words, (__m512)all);
    return (Vec)_mm512_permutex2var_ps((__m512)all, (__m512i)words, (__m512)others);
  }
#elif defined(__AVX2__)
  __m256 low, high;

  EFORMER_INLINE Vec LookUp(Words words) const {
    const __m256i places = (__m256i)words;
    if constexpr (kBits <= 2) return (Vec)_mm256_permutevar_ps(low, places);
    const __m256 found = _mm256_permutevar8x32_ps(low, places);
    if constexpr (kBits == 3) return (Vec)found;
    const __m256 others = _mm256_permutevar8x32_ps(high, places);
    return (Vec)_mm256_blendv_ps(found, others, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
  }
#elif defined(EFORMER_NEON)
  uint8x16x4_t all;

  EFORMER_INLINE Vec LookUp(Words words) const {
    const Words places = (words & ((1u << kBits) - 1)) * 0x04040404 + 0x03020100;
    return (Vec)vqtbl4q_u8(all, (uint8x16_t)places);
  }
#else
  float all[16];

  EFORMER_INLINE Vec LookUp(Words words) const {
    Vec found;
    for (int i = 0; i < kLanes; ++i) found[i] = all[words[i] & ((1u << kBits) - 1)];
    return found;
  }
#endif

  Table() = default;
  explicit Table(const float (&values)[kMaxTable]) {  // repeated, if there are fewer
#if defined(EFORMER_AVX512)
    all = Load(values);
    others = Load(values + kLanes);
#elif defined(__AVX2__)
    low = (__m256)Load(values);
    high = (__m256)Load(values + 8);
#elif defined(EFORMER_NEON)
    for (int i = 0; i < 4; ++i) all.val[i] = vld1q_u8(reinterpret_cast<const uint8_t*>(values + 4 * i));
#else
    std::memcpy(all, values, sizeof all);
#endif
  }

#if defined(EFORMER_AVX512)
  EFORMER_INLINE Strip Values() const { return {{all, others}}; }
  EFORMER_INLINE void Set(const Strip& values) { all = values.v[0], others = values.v[1]; }
#endif
};

// Words below 2^23 as floats, less `centre`: the mantissa of 2^23 counts ones.
EFORMER_INLINE Vec ToFloats(Words words, uint32_t mask, float centre) {
#if defined(EFORMER_AVX512) && !defined(EFORMER_EMULATE_AVX512)
  const __m512i masks = _mm512_set1_epi32(static_cast<int>(mask)), bits = _mm512_set1_epi32(0x4B000000);
  const Vec counted = (Vec)_mm512_ternarylogic_epi32((__m512i)words, masks, bits, 0xEA);
#else
  const Vec counted = (Vec)((words & mask) | 0x4B000000u);
#endif
  return counted - Spread(0x1p23f + centre);
}

// Calls use(std::integral_constant<int, i>()) for 0 <= i < kCount.
template <class Use, int... kI>
EFORMER_INLINE void ForEachOf(std::integer_sequence<int, kI...>, const Use& use) {
  (use(std::integral_constant<int, kI>()), ...);
}

template <int kCount, class Use>
EFORMER_INLINE void ForEach(const Use& use) {
  ForEachOf(std::make_integer_sequence<int, kCount>(), use);
}

}  // namespace eformer::EFORMER_ISA
