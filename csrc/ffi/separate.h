// Blocks of a file, each with codes and scales side by side, into arrays that have one kind of them each.
#ifndef EFORMER_SEPARATE_H_
#define EFORMER_SEPARATE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace eformer {

// Some bytes of every block, from byte `first` on, go to `out`, as many in `how`'s order for each block.
struct Move {
  const char* how;
  int64_t first, bytes;
  uint8_t* out;
  int64_t out_bytes;  // of all of `out`
};

// The names that `Move::how` takes.
std::vector<const char*> Moves();

// Does the moves for blocks of `block_bytes` each, one after the other from `blocks` on. The result is empty, or says
// what is wrong with the arguments; then nothing is written.
std::string Separate(const uint8_t* blocks, int64_t bytes, int64_t block_bytes, const std::vector<Move>& moves);

}  // namespace eformer

#endif  // EFORMER_SEPARATE_H_
