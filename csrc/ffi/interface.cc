// The C interface that Python calls through ctypes. It knows nothing of Python: one build serves every version.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/handlers.h"
#include "ffi/separate.h"

#define EFORMER_PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

using Handler = XLA_FFI_Handler* (*)();
constexpr std::pair<const char*, Handler> kHandlers[] = {
    {"eformer_matmul", eformer::MatmulHandler},
    {"eformer_matmuls", eformer::MatmulsHandler},
    {"eformer_decode", eformer::DecodeHandler},
    {"eformer_segments", eformer::SegmentsHandler},
};

// Keeps a text until the next call of the same thread.
const char* Kept(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

// The names of one kind, separated by spaces: "handlers", "formats", "moves", or "instruction_sets" of this processor,
// the best first. Null for another kind.
EFORMER_PUBLIC const char* eformer_names(const char* kind) {
  const std::string_view asked = kind;
  std::vector<const char*> names;
  if (asked == "handlers") {
    for (const auto& each : kHandlers) names.push_back(each.first);
  } else if (asked == "formats") {
    names = eformer::Formats();
  } else if (asked == "moves") {
    names = eformer::Moves();
  } else if (asked == "instruction_sets") {
    names = eformer::InstructionSets();
  } else {
    return nullptr;
  }
  std::string joined;
  for (const char* name : names) joined += joined.empty() ? name : std::string(" ") + name;
  return Kept(joined);
}

// The handler that XLA calls, or null.
EFORMER_PUBLIC void* eformer_handler(const char* name) {
  for (const auto& [own, handler] : kHandlers) {
    if (std::strcmp(own, name) == 0) return reinterpret_cast<void*>(handler());
  }
  return nullptr;
}

// The name of the loop that multiplies.
EFORMER_PUBLIC const char* eformer_loop(const eformer::LoopQuery* query) { return Kept(eformer::LoopOf(*query)); }

// Writes codes and scales of blocks to arrays of their own. The result is empty, or says what is wrong.
EFORMER_PUBLIC const char* eformer_separate(const uint8_t* blocks, int64_t bytes, int64_t block_bytes,
                                            const eformer::Move* moves, int64_t count) {
  return Kept(eformer::Separate(blocks, bytes, block_bytes, {moves, moves + count}));
}

// Finds the end of `number` texts from byte `at` on, each after its length in 8 bytes; -1 if the data ends before.
// Unless `joined` is null, writes them to it, with a byte between two of them that no UTF-8 has.
EFORMER_PUBLIC int64_t eformer_texts(const uint8_t* data, int64_t size, int64_t at, int64_t number, uint8_t* joined) {
  if (at < 0 || at > size || number < 0 || number > (size - at) / 8) return -1;
  for (int64_t i = 0; i < number; ++i) {
    uint64_t length = 0;
    if (size - at < 8) return -1;
    for (int j = 0; j < 8; ++j) length |= uint64_t{data[at + j]} << (8 * j);
    at += 8;
    if (length > static_cast<uint64_t>(size - at)) return -1;
    if (joined != nullptr) {
      if (i > 0) *joined++ = 0xFF;
      joined = std::copy_n(data + at, length, joined);
    }
    at += static_cast<int64_t>(length);
  }
  return at;
}
