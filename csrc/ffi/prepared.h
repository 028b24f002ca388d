// Rows of x, made ready once for all matrices of a call that take them alike.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/x_bytes.h"
#include "ffi/x_forms.h"

namespace eformer {

class PreparedX {
 public:
  const ffi::AnyBuffer buffer;  // (count, rows, depth)
  const int64_t rows;

  explicit PreparedX(ffi::AnyBuffer x) : buffer(x), rows(x.dimensions().size() == 3 ? x.dimensions()[1] : 0) {}

  std::shared_ptr<const PanelRows> Panels(ffi::ThreadPool& pool, const Stack& stack) {
    return Find(panels_, stack, {PanelRows::ChunkRows(pool, stack, rows)}, pool, stack, buffer);
  }

  std::shared_ptr<const TiledRows> Tiled(ffi::ThreadPool& pool, const Stack& stack) {
    return Find(tiled_, stack, {}, pool, stack, buffer);
  }

  std::shared_ptr<const PaddedRows> Padded(ffi::ThreadPool& pool, const Stack& stack, bool in_lanes) {
    return Find(padded_, stack, {in_lanes}, pool, stack, buffer, in_lanes);
  }

  std::shared_ptr<const ByteRows> Bytes(ffi::ThreadPool& pool, const Stack& stack, const ByteOrder& order) {
    return Find(bytes_, stack, {order.parts, order.rows, order.block, order.places, order.span, order.scaled}, pool,
                stack, buffer, order);
  }

 private:
  typedef std::array<int64_t, 6> Order;

  template <class Rows>
  using All = std::vector<std::pair<Order, std::shared_ptr<const Rows>>>;

  // If a matrix folds its scale into x, the result fits that matrix only, so it is not cached.
  template <class Rows, class... Args>
  std::shared_ptr<const Rows> Find(All<Rows>& all, const Stack& stack, std::initializer_list<int64_t> order,
                                   Args&&... args) const {
    Order wanted = {};
    std::copy(order.begin(), order.end(), wanted.begin());
    const bool is_scaled = Rows::Scales(rows) && OuterScale(stack.kernels->format, stack.first).of_depth != nullptr;
    for (const auto& [each, found] : all) {
      if (each == wanted && !is_scaled) return found;
    }
    auto made = std::make_shared<const Rows>(std::forward<Args>(args)...);
    if (!is_scaled) all.emplace_back(wanted, made);
    return made;
  }

  All<PanelRows> panels_;
  All<TiledRows> tiled_;
  All<PaddedRows> padded_;
  All<ByteRows> bytes_;
};

}  // namespace eformer
