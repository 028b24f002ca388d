// What the processor can run.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(EFORMER_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <vector>

#include "ffi/problem.h"

namespace eformer {
namespace {

#if defined(EFORMER_EMULATE_AVX512)

bool HasAmx() { return true; }

#elif defined(EFORMER_AMX) && defined(__linux__)

// Asks Linux for the tile registers, for the whole process.
bool HasAmx() {
  constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;  // in EDX: tiles of bfloat16, tiles, of int8
  constexpr long kAskForState = 0x1023, kTileData = 18;      // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

#elif defined(EFORMER_AMX)

bool HasAmx() { return false; }

#endif

#if defined(__aarch64__)

// Instructions of ARM64 that sum products of bytes: four of them, or those of small matrices.
struct ByteInstructions {
  bool dots = false, matrices = false;

  ByteInstructions() {
#if defined(__linux__)
    dots = (getauxval(AT_HWCAP) >> 20 & 1) != 0;       // HWCAP_ASIMDDP; old headers do not have these names
    matrices = (getauxval(AT_HWCAP2) >> 13 & 1) != 0;  // HWCAP2_I8MM
#elif defined(__APPLE__)
    dots = HasFeature("hw.optional.arm.FEAT_DotProd");
    matrices = HasFeature("hw.optional.arm.FEAT_I8MM");
#endif
  }

#if defined(__APPLE__)
  static bool HasFeature(const char* name) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
  }
#endif
};

#endif

// What this processor can run, the best first.
std::vector<const InstructionSet*> FindInstructionSets() {
  std::vector<const InstructionSet*> found;
#if defined(__x86_64__) && !defined(EFORMER_PORTABLE)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(EFORMER_EMULATE_AVX512)
  const bool has_avx512 = has_avx2, has_vnni = has_avx2;
#else
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(EFORMER_AMX)
  if (has_vnni && HasAmx()) found.push_back(&amx::Instructions());
#endif
  if (has_vnni) found.push_back(&avx512_vnni::Instructions());
  if (has_avx512) found.push_back(&avx512::Instructions());
#if defined(EFORMER_AVX2_VNNI)
  unsigned a, b, c, d;
  const bool has_avx_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
  if (has_avx2 && has_avx_vnni) found.push_back(&avx2_vnni::Instructions());
#endif
  if (has_avx2) found.push_back(&avx2::Instructions());
#elif defined(__aarch64__) && !defined(EFORMER_PORTABLE)
  const ByteInstructions has;
  if (has.dots && has.matrices) found.push_back(&neon_i8mm::Instructions());
  if (has.dots) found.push_back(&neon_dot::Instructions());
  found.push_back(&neon::Instructions());
#endif
  found.push_back(&portable::Instructions());
  return found;
}

}  // namespace

const std::vector<const InstructionSet*>& AllInstructionSets() {
  static const std::vector<const InstructionSet*> all = FindInstructionSets();
  return all;
}

}  // namespace eformer
