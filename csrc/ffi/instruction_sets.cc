// What the processor can run.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(EFORMER_HAS_amx) && defined(__linux__)
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

#elif defined(EFORMER_HAS_amx) && defined(__linux__)

// Asks Linux for the tile registers, for the whole process.
bool HasAmx() {
  constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;  // in EDX: tiles of bfloat16, tiles, of int8
  constexpr long kAskForState = 0x1023, kTileData = 18;      // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

#elif defined(EFORMER_HAS_amx)

bool HasAmx() { return false; }

#endif

#if defined(EFORMER_HAS_neon)

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

// What this processor can run, the best first, of what the build has.
std::vector<const InstructionSet*> FindInstructionSets() {
  std::vector<const InstructionSet*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a, b, c, d;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
  [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
#if defined(EFORMER_EMULATE_AVX512)
  [[maybe_unused]] const bool has_avx512 = has_avx2, has_vnni = has_avx2;
#else
  [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                           __builtin_cpu_supports("avx512dq");
  [[maybe_unused]] const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(EFORMER_HAS_amx)
  if (has_vnni && HasAmx()) found.push_back(&amx::Instructions());
#endif
#if defined(EFORMER_HAS_avx512_vnni)
  if (has_vnni) found.push_back(&avx512_vnni::Instructions());
#endif
#if defined(EFORMER_HAS_avx512)
  if (has_avx512) found.push_back(&avx512::Instructions());
#endif
#if defined(EFORMER_HAS_avx2_vnni)
  const bool has_avx_vnni = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
  if (has_avx2 && has_avx_vnni) found.push_back(&avx2_vnni::Instructions());
#endif
#if defined(EFORMER_HAS_avx2)
  if (has_avx2) found.push_back(&avx2::Instructions());
#endif
#elif defined(EFORMER_HAS_neon)
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
