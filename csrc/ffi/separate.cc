// The orders of codes in the blocks of GGUF files, and in ours: `checkpoint/gguf/planes.py` has the same in NumPy.
#include "ffi/separate.h"

#include <algorithm>
#include <cstring>

namespace eformer {
namespace {

constexpr int64_t kAtOnce = 1 << 15;  // bytes of blocks that are read again from cache for each move

inline uint32_t Word(const uint8_t* in) {
  uint32_t word;
  std::memcpy(&word, in, 4);
  return word;
}

struct Bytes {
  static constexpr int64_t kIn = 1, kOut = 1;
  static void Do(const uint8_t* in, uint8_t* out) { *out = *in; }
};

// int8 codes; ours have no sign, and 128 is the zero.
struct Signed {
  static constexpr int64_t kIn = 1, kOut = 1;
  static void Do(const uint8_t* in, uint8_t* out) { *out = *in ^ 0x80; }
};

struct MinusHalves {
  static constexpr int64_t kIn = 2, kOut = 2;
  static void Do(const uint8_t* in, uint8_t* out) {
    out[0] = in[0];
    out[1] = in[1] ^ 0x80;
  }
};

// The low halves of `kWidth` bytes are as many elements, and the high halves the next ones. Ours are neighbours.
template <int kWidth>
struct Nibbles {
  static constexpr int64_t kIn = kWidth, kOut = kWidth;
  static void Do(const uint8_t* __restrict in, uint8_t* __restrict out) {
    for (int i = 0; i < kWidth / 2; ++i) {
      out[i] = (in[2 * i] & 15) | (in[2 * i + 1] << 4);
      out[i + kWidth / 2] = (in[2 * i] >> 4) | (in[2 * i + 1] & 0xF0);
    }
  }
};

// The lowest two bits of 32 bytes are 32 elements, the next two the next ones, and so on.
struct Quarters {
  static constexpr int64_t kIn = 32, kOut = 32;
  static void Do(const uint8_t* __restrict in, uint8_t* __restrict out) {
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 8; ++i) {
        uint32_t codes = (Word(in + 4 * i) >> (2 * part)) & 0x03030303u;
        codes |= codes >> 6;
        out[8 * part + i] = static_cast<uint8_t>(codes | codes >> 12);
      }
    }
  }
};

// The lowest bits of 32 bytes are 32 elements, the next ones the next 32, and so on.
struct Bits {
  static constexpr int64_t kIn = 32, kOut = 32;
  static void Do(const uint8_t* __restrict in, uint8_t* __restrict out) {
    for (int i = 0; i < 4; ++i) {
      uint64_t bits = 0;  // 8 x 8, transposed: bits, pairs and fours are swapped across the diagonal
      for (int j = 0; j < 8; ++j) bits |= uint64_t{in[8 * i + j]} << (8 * j);
      for (const auto& [shift, mask] : {std::pair{7, uint64_t{0x00AA00AA00AA00AA}},
                                        {14, uint64_t{0x0000CCCC0000CCCC}},
                                        {28, uint64_t{0x00000000F0F0F0F0}}}) {
        const uint64_t swapped = (bits ^ (bits >> shift)) & mask;
        bits ^= swapped ^ (swapped << shift);
      }
      for (int j = 0; j < 8; ++j) out[4 * j + i] = static_cast<uint8_t>(bits >> (8 * j));
    }
  }
};

// Eight numbers of 6 bits in three words of four bytes: four in word `kWord`, beside the high bits of the other four.
// The low bits of these are in the last word, beside those of another eight numbers.
template <int kWord, int kShift>
struct SixBits {
  static constexpr int64_t kIn = 12, kOut = 8;
  static void Do(const uint8_t* in, uint8_t* out) {
    const uint32_t first = Word(in + 4 * kWord), rest = Word(in + 8) >> kShift;
    const uint32_t numbers[2] = {first & 0x3F3F3F3Fu, (rest & 0x0F0F0F0Fu) | ((first >> 2) & 0x30303030u)};
    std::memcpy(out, numbers, 8);
  }
};

struct Kind {
  const char* name;
  int64_t in, out;  // bytes
  void (*run)(const uint8_t* in, int64_t count, int64_t stride, int64_t units, uint8_t* out);
};

// `units` of them in each of `count` blocks.
template <class Each>
void Run(const uint8_t* in, int64_t count, int64_t stride, int64_t units, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i, in += stride, out += units * Each::kOut) {
    for (int64_t j = 0; j < units; ++j) Each::Do(in + j * Each::kIn, out + j * Each::kOut);
  }
}

template <class Each>
constexpr Kind Named(const char* name) {
  return {name, Each::kIn, Each::kOut, Run<Each>};
}

constexpr Kind kKinds[] = {
    Named<Bytes>("bytes"),
    Named<Signed>("signed"),
    Named<MinusHalves>("minus_halves"),
    Named<Nibbles<16>>("nibbles_16"),
    Named<Nibbles<32>>("nibbles_32"),
    Named<Nibbles<64>>("nibbles_64"),
    Named<Quarters>("quarters"),
    Named<Bits>("bits"),
    Named<SixBits<0, 0>>("six_bits_0"),
    Named<SixBits<1, 4>>("six_bits_1"),
};

const Kind* Find(const std::string& name) {
  const auto* found = std::find_if(std::begin(kKinds), std::end(kKinds), [&](const Kind& k) { return name == k.name; });
  return found == std::end(kKinds) ? nullptr : found;
}

}  // namespace

std::vector<const char*> Moves() {
  std::vector<const char*> names;
  for (const Kind& kind : kKinds) names.push_back(kind.name);
  return names;
}

std::string Separate(const uint8_t* blocks, int64_t bytes, int64_t block_bytes, const std::vector<Move>& moves) {
  if (block_bytes <= 0 || bytes % block_bytes) return "the bytes are no whole number of blocks";
  const int64_t count = bytes / block_bytes, step = std::max<int64_t>(kAtOnce / block_bytes, 1);
  std::vector<const Kind*> kinds;
  for (const Move& move : moves) {
    const Kind* kind = Find(move.how);
    if (kind == nullptr) return std::string("no move is called ") + move.how;
    if (move.first < 0 || move.bytes <= 0 || move.first > block_bytes - move.bytes || move.bytes % kind->in) {
      return "a block does not have these bytes";
    }
    const int64_t each = move.bytes / kind->in * kind->out;
    if (move.out_bytes / each != count || move.out_bytes % each) return "the result has another size";
    kinds.push_back(kind);
  }
  for (int64_t start = 0; start < count; start += step) {
    const int64_t some = std::min(step, count - start);
    for (size_t i = 0; i < moves.size(); ++i) {
      const Move& move = moves[i];
      const int64_t units = move.bytes / kinds[i]->in;
      kinds[i]->run(blocks + start * block_bytes + move.first, some, block_bytes, units,
                    move.out + start * units * kinds[i]->out);
    }
  }
  return "";
}

}  // namespace eformer
