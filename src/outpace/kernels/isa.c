/* Detection of instruction sets. */

#include "isa.h"

#if X86

#include <cpuid.h>

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* CPUID, leaf 7.1, bit 4 of EAX: compilers differ in their name of this feature. */
static int has_avx_vnni(void) {
    unsigned eax, ebx, ecx, edx;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}

int outpace_has_isa(int isa) {
    __builtin_cpu_init();
    switch (isa) {
        case AVX2: return has_avx2();
        case AVX_VNNI: return has_avx_vnni();
        case AVX512: return has_avx512();
        case AVX512_VNNI: return has_avx512() && __builtin_cpu_supports("avx512vnni");
        case AVX512_BF16: return has_avx512() && __builtin_cpu_supports("avx512bf16");
        default: return 0;
    }
}

#elif ARM && defined(__APPLE__)

/* Each Arm processor of Apple's computers has the dot product. */
int outpace_has_isa(int isa) { return isa == NEON; }

#elif ARM && defined(__linux__)

#include <sys/auxv.h>

int outpace_has_isa(int isa) {
    const unsigned long dot_product = 1ul << 20; /* HWCAP_ASIMDDP */
    return isa == NEON && getauxval(AT_HWCAP) & dot_product;
}

#else

int outpace_has_isa(int isa) { return 0; }

#endif
