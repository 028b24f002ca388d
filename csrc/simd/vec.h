// Vectors of floats and their operations, for the instruction set that this file is compiled for.
//
// Arithmetic is that of GCC's and Clang's vector types. A `Strip` is 32 floats. `LookUpLow` and `LookUpHigh` look up
// the low and the high four bits of 32 bytes. Their results are in lane order, since a move across lanes costs as much
// as a lookup; `ToNatural` puts them into the order of the bytes. `LookUpInOrder` gives that order at once.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

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
typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint8_t Sixteen __attribute__((vector_size(16)));

constexpr int kStripSize = 32;  // floats
constexpr int kStripVecs = kStripSize / kLanes;

struct Strip {
  Vec v[kStripVecs];
};

// Sixteen floats to look up. On AVX2 and NEON, which look up bytes, the first bytes of all sixteen come first.
struct alignas(64) Table {
  uint8_t bytes[64];
};

static inline Bytes LowNibbles(Bytes codes) { return codes & 15; }

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

static inline Bytes HighNibbles(Bytes codes) { return ShiftDown(codes, 4) & 15; }

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

#if defined(EFORMER_AVX512) || !(defined(__AVX2__) || defined(EFORMER_NEON))
static inline Table MakeTable(const float (&values)[16]) {
  Table t;
  std::memcpy(t.bytes, values, 64);
  return t;
}
#endif

#if defined(EFORMER_AVX512)

struct LoadedTable {
  __m512 values;
};

static inline LoadedTable LoadTable(const Table& t) { return {_mm512_load_ps(t.bytes)}; }

typedef int32_t Words __attribute__((vector_size(64)));

// Converts sixteen bytes to words, and words to floats.
#if defined(EFORMER_EMULATE_AVX512)  // SIMDe does not have these conversions
template <class Byte>
static inline Words ToWords(const Byte* p) {
  typedef Byte Sixteen __attribute__((vector_size(16)));
  Sixteen bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, Words);
}

static inline Vec ToFloats(Words words) { return __builtin_convertvector(words, Vec); }
#else  // GCC 12 makes sixteen scalar conversions of `__builtin_convertvector`, ten times slower
static inline Words ToWords(const uint8_t* p) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

static inline Words ToWords(const int8_t* p) {
  return (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

static inline Vec ToFloats(Words words) { return (Vec)_mm512_cvtepi32_ps((__m512i)words); }
#endif

static inline Vec LookUp(__m512 values, Words codes) { return (Vec)_mm512_permutexvar_ps((__m512i)codes, values); }

static inline Strip LookUpInOrder(const LoadedTable& table, const uint8_t* codes, int first_bit) {
  return {{LookUp(table.values, ToWords(codes) >> first_bit), LookUp(table.values, ToWords(codes + 16) >> first_bit)}};
}

// Looks up the four bits from `first_bit` on of each byte. A lookup reads the lowest four bits of a word, so a shift of
// the word chooses one of its bytes. Both halves of the vector hold all 32 bytes, and the upper half is shifted two
// bytes more.
static inline Strip LookUpFrom(const LoadedTable& table, Bytes codes, int first_bit) {
  const Words words = (Words)_mm512_broadcast_i64x4((__m256i)codes);
  const Words shift = Words{0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16} + first_bit;
  return {{LookUp(table.values, words >> shift), LookUp(table.values, words >> (shift + 8))}};
}

// In lane order, vector i has the values i, i + 4, i + 8, ... and then i + 2, i + 6, ...
static inline Strip ToNatural(const Strip& s) {
  const Words first = {0, 16, 8, 24, 1, 17, 9, 25, 2, 18, 10, 26, 3, 19, 11, 27};
  const __m512 a = (__m512)s.v[0], b = (__m512)s.v[1];
  return {{(Vec)_mm512_permutex2var_ps(a, (__m512i)first, b), (Vec)_mm512_permutex2var_ps(a, (__m512i)(first + 4), b)}};
}

static inline Strip FromNatural(const Strip& s) {
  const Words first = {0, 4, 8, 12, 16, 20, 24, 28, 2, 6, 10, 14, 18, 22, 26, 30};
  const __m512 a = (__m512)s.v[0], b = (__m512)s.v[1];
  return {{(Vec)_mm512_permutex2var_ps(a, (__m512i)first, b), (Vec)_mm512_permutex2var_ps(a, (__m512i)(first + 1), b)}};
}

static inline Strip FromInt8(const int8_t* p) {
  Strip s;
  for (int i = 0; i < kStripVecs; ++i) s.v[i] = ToFloats(ToWords(p + 16 * i));
  return s;
}

static inline Strip FromUint8(const uint8_t* p) {
  Strip s;
  for (int i = 0; i < kStripVecs; ++i) s.v[i] = ToFloats(ToWords(p + 16 * i));
  return s;
}

// Looks up the lowest two bits of `codes >> shift`, for kLanes bytes.
static inline Vec LookUpPair(const float (&values)[4], const uint8_t* codes, int shift) {
  float table[16];
  for (int i = 0; i < 16; ++i) table[i] = values[i % 4];  // repeated, so that higher bits do not matter
  return LookUp(_mm512_loadu_ps(table), ToWords(codes) >> shift);
}

#elif defined(__AVX2__)

static inline Table SplitBytes(Vec low, Vec high) {
  const __m256i grouped = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                           0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m256i a = _mm256_shuffle_epi8((__m256i)low, grouped), b = _mm256_shuffle_epi8((__m256i)high, grouped);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  Table t;
  __m256i* out = reinterpret_cast<__m256i*>(t.bytes);
  _mm256_store_si256(out, _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(a, b), order));
  _mm256_store_si256(out + 1, _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi32(a, b), order));
  return t;
}

static inline Table MakeTable(const float (&values)[16]) { return SplitBytes(Load(values), Load(values + 8)); }

struct LoadedTable {
  __m256i byte[4];
};

static inline LoadedTable LoadTable(const Table& t) {
  LoadedTable loaded;
  for (int i = 0; i < 4; ++i) {
    loaded.byte[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(t.bytes + 16 * i)));
  }
  return loaded;
}

// Looks up each byte of the floats, then interleaves them within 128 bits. In lane order, vector i has the values 4 i
// to 4 i + 3 and 4 i + 16 to 4 i + 19.
static inline Strip LookUp(const LoadedTable& table, Bytes codes) {
  const __m256i c = (__m256i)codes;
  const __m256i b0 = _mm256_shuffle_epi8(table.byte[0], c), b1 = _mm256_shuffle_epi8(table.byte[1], c);
  const __m256i b2 = _mm256_shuffle_epi8(table.byte[2], c), b3 = _mm256_shuffle_epi8(table.byte[3], c);
  const __m256i low0 = _mm256_unpacklo_epi8(b0, b1), low1 = _mm256_unpackhi_epi8(b0, b1);
  const __m256i high0 = _mm256_unpacklo_epi8(b2, b3), high1 = _mm256_unpackhi_epi8(b2, b3);
  return {{(Vec)_mm256_unpacklo_epi16(low0, high0), (Vec)_mm256_unpackhi_epi16(low0, high0),
           (Vec)_mm256_unpacklo_epi16(low1, high1), (Vec)_mm256_unpackhi_epi16(low1, high1)}};
}

static inline Strip ToNatural(const Strip& s) {
  const __m256 a = (__m256)s.v[0], b = (__m256)s.v[1], c = (__m256)s.v[2], d = (__m256)s.v[3];
  return {{(Vec)_mm256_permute2f128_ps(a, b, 0x20), (Vec)_mm256_permute2f128_ps(c, d, 0x20),
           (Vec)_mm256_permute2f128_ps(a, b, 0x31), (Vec)_mm256_permute2f128_ps(c, d, 0x31)}};
}

static inline Strip FromNatural(const Strip& s) {
  const __m256 a = (__m256)s.v[0], b = (__m256)s.v[1], c = (__m256)s.v[2], d = (__m256)s.v[3];
  return {{(Vec)_mm256_permute2f128_ps(a, c, 0x20), (Vec)_mm256_permute2f128_ps(a, c, 0x31),
           (Vec)_mm256_permute2f128_ps(b, d, 0x20), (Vec)_mm256_permute2f128_ps(b, d, 0x31)}};
}

static inline Strip FromInt8(const int8_t* p) {
  Strip s;
  for (int i = 0; i < kStripVecs; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
    s.v[i] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  return s;
}

static inline Strip FromUint8(const uint8_t* p) {
  Strip s;
  for (int i = 0; i < kStripVecs; ++i) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
    s.v[i] = (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  return s;
}

static inline Vec LookUpPair(const float (&values)[4], const uint8_t* codes, int shift) {
  const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  const __m256 table = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(values));
  return (Vec)_mm256_permutevar_ps(table, _mm256_srli_epi32(words, shift));
}

#elif defined(EFORMER_NEON)

static inline uint8x16x2_t HalvesOf(Bytes bytes) {
  uint8x16x2_t halves;
  std::memcpy(&halves, &bytes, sizeof halves);
  return halves;
}

static inline Bytes Joined(uint8x16x2_t halves) {
  Bytes bytes;
  std::memcpy(&bytes, &halves, sizeof bytes);
  return bytes;
}

// words[i] has bytes 4 i to 4 i + 3 of each: first those of four[0] to four[3] at place 4 i, and so on.
static inline void InterleaveFour(const uint8x16_t (&four)[4], uint8x16_t (&words)[4]) {
  const uint8x16x2_t low = vzipq_u8(four[0], four[1]), high = vzipq_u8(four[2], four[3]);
  for (int i = 0; i < 2; ++i) {
    const uint16x8x2_t zipped = vzipq_u16((uint16x8_t)low.val[i], (uint16x8_t)high.val[i]);
    words[2 * i] = (uint8x16_t)zipped.val[0];
    words[2 * i + 1] = (uint8x16_t)zipped.val[1];
  }
}

// Four bytes as words.
static inline Places ToWords(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return (Places)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

static inline Table MakeTable(const float (&values)[16]) {
  Table t;
  const uint8x16x4_t bytes = vld4q_u8(reinterpret_cast<const uint8_t*>(values));
  for (int i = 0; i < 4; ++i) vst1q_u8(t.bytes + 16 * i, bytes.val[i]);
  return t;
}

struct LoadedTable {
  uint8x16_t byte[4];
};

static inline LoadedTable LoadTable(const Table& t) {
  LoadedTable loaded;
  for (int i = 0; i < 4; ++i) loaded.byte[i] = vld1q_u8(t.bytes + 16 * i);
  return loaded;
}

// Looks up each byte of the floats, then interleaves them.
static inline Strip LookUp(const LoadedTable& table, Bytes codes) {
  const uint8x16x2_t halves = HalvesOf(codes);
  Strip s;
  for (int i = 0; i < 2; ++i) {
    uint8x16_t four[4], words[4];
    for (int j = 0; j < 4; ++j) four[j] = vqtbl1q_u8(table.byte[j], halves.val[i]);
    InterleaveFour(four, words);
    for (int j = 0; j < 4; ++j) s.v[4 * i + j] = (Vec)words[j];
  }
  return s;
}

static inline Vec LookUpPair(const float (&values)[4], const uint8_t* codes, int shift) {
  return Pick(Load(values), (ToWords(codes) >> shift) & 3);
}

#else

struct LoadedTable {
  float values[16];
};

static inline LoadedTable LoadTable(const Table& t) {
  LoadedTable loaded;
  std::memcpy(loaded.values, t.bytes, 64);
  return loaded;
}

static inline Strip LookUp(const LoadedTable& table, Bytes codes) {
  float found[kStripSize];
  for (int i = 0; i < kStripSize; ++i) found[i] = table.values[codes[i] & 15];
  return LoadStrip(found);
}

static inline Vec LookUpPair(const float (&values)[4], const uint8_t* codes, int shift) {
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = values[(codes[i] >> shift) & 3];
  return found;
}

#endif

#if !defined(EFORMER_AVX512) && !defined(__AVX2__)
static inline Strip ToNatural(const Strip& s) { return s; }
static inline Strip FromNatural(const Strip& s) { return s; }

static inline Strip FromInt8(const int8_t* p) {
  float values[kStripSize];
  for (int i = 0; i < kStripSize; ++i) values[i] = p[i];
  return LoadStrip(values);
}

static inline Strip FromUint8(const uint8_t* p) {
  float values[kStripSize];
  for (int i = 0; i < kStripSize; ++i) values[i] = p[i];
  return LoadStrip(values);
}
#endif

#if !defined(EFORMER_AVX512)
static inline Strip LookUpFrom(const LoadedTable& table, Bytes codes, int first_bit) {
  return LookUp(table, LowNibbles(first_bit == 0 ? codes : ShiftDown(codes, first_bit)));
}

static inline Strip LookUpInOrder(const LoadedTable& table, const uint8_t* codes, int first_bit) {
  return ToNatural(LookUpFrom(table, LoadBytes(codes), first_bit));
}
#endif

static inline Strip LookUpLow(const LoadedTable& table, Bytes codes) { return LookUpFrom(table, codes, 0); }
static inline Strip LookUpHigh(const LoadedTable& table, Bytes codes) { return LookUpFrom(table, codes, 4); }

}  // namespace eformer::EFORMER_ISA
