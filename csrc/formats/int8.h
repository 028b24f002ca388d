// INT8: a byte is its own value.
#pragma once

#include "matrix/format.h"

namespace eformer::EFORMER_ISA {

struct Int8 : FormatDefaults {
  static constexpr const char* kName = "int8";
  static constexpr int kPlaneBits[] = {8};
  static constexpr ScaleKind kScales = ScaleKind::kBroadcast;
  static constexpr CodeType kCodes = CodeType::kInt8;
  static constexpr float kInt8Steps = 1;
  static constexpr float Value(int code) { return static_cast<int8_t>(code); }

  static Strip Values(const uint8_t* codes);
};

inline Strip Int8::Values(const uint8_t* codes) {
  Strip found;
  for (int i = 0; i < kStripVecs; ++i) found.v[i] = FloatsOfSigned(codes + i * kLanes);
  return found;
}

}  // namespace eformer::EFORMER_ISA
