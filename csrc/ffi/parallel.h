// Loops over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace eformer {

// Calls body(i) for 0 <= i < count on up to `threads`. The calling thread works too, so the loop also ends if the pool
// is busy. Throws std::bad_alloc after all calls if one of them threw.
template <class Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, int64_t threads, const Body& body) {
  const int64_t helpers = std::min({pool.num_threads(), count, threads}) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
    int64_t count;
    const Body* body;  // valid until every `i` is done
  };
  auto state = std::make_shared<State>();
  state->count = count;
  state->body = &body;
  auto work = [state] {
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < state->count;) {
      try {
        (*state->body)(i);
      } catch (...) {
        state->failed.store(true, std::memory_order_relaxed);
      }
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(work)>(work));
  work();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
  if (state->failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// The same on all threads.
template <class Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  ParallelFor(pool, count, count, body);
}

}  // namespace eformer
