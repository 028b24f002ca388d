// What libstdc++.a asks for of newer C libraries than a wheel may need: the core defines it for itself.
#include <sched.h>

// From glibc 2.32 on. "No" makes libstdc++ count references atomically, as it did before.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// In libc.so.6 from glibc 2.34 on. libstdc++ calls it when the first stream is made.
extern "C" int pthread_once(int* once, void (*run)()) {
  enum { kNew, kRunning, kDone };
  int state = kNew;
  if (__atomic_compare_exchange_n(once, &state, kRunning, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) {
    run();
    __atomic_store_n(once, kDone, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(once, __ATOMIC_ACQUIRE) != kDone) sched_yield();
  return 0;
}
