// The buffers of a matrix among those of a call, of stacks of many only the entries that an index chooses.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ffi/problem.h"

namespace eformer {

class Slices {
 public:
  // `index` is an int32 scalar. As in XLA's dynamic slices, one beyond a stack chooses its first or last entries.
  ffi::Error Choose(const ffi::AnyBuffer& index) {
    if (!Is(index, ffi::S32, {})) {
      return ffi::Error::InvalidArgument("the index must be an int32 scalar, got " + Describe(index));
    }
    index_ = *static_cast<const int32_t*>(index.untyped_data());
    return ffi::Error::Success();
  }

  // Adds to `all` the buffer, or of a stack of n * count entries those from index * count on, `count` of them.
  ffi::Error Add(const ffi::AnyBuffer& buffer, bool is_stack, int64_t count, Buffers& all) {
    const auto shape = buffer.dimensions();
    if (!is_stack || count == 0) {
      all.push_back(buffer);
      return ffi::Error::Success();
    }
    if (shape.size() == 0 || shape[0] < count || shape[0] % count != 0) {
      return ffi::Error::InvalidArgument("a stack must have a multiple of " + std::to_string(count) + " entries, got " +
                                         Describe(buffer));
    }
    const int64_t chosen = std::clamp<int64_t>(index_, 0, shape[0] / count - 1);
    const int64_t bytes = static_cast<int64_t>(buffer.size_bytes()) / shape[0];
    slices_.push_back(std::make_unique<Slice>());
    auto& [slice, own] = *slices_.back();
    own.assign(shape.begin(), shape.end());
    own[0] = count;
    slice.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    slice.dtype = static_cast<XLA_FFI_DataType>(buffer.element_type());
    slice.data = static_cast<uint8_t*>(buffer.untyped_data()) + chosen * count * bytes;
    slice.rank = static_cast<int64_t>(own.size());
    slice.dims = own.data();
    all.emplace_back(&slice);
    return ffi::Error::Success();
  }

 private:
  struct Slice {
    XLA_FFI_Buffer buffer = {};
    std::vector<int64_t> shape;
  };

  int64_t index_ = 0;
  std::vector<std::unique_ptr<Slice>> slices_;  // buffers point at these
};

}  // namespace eformer
