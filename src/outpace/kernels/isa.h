/* Instruction sets that loops are compiled for, and the compiler's names of their parts. */

#pragma once

enum { WIDTH = 16 }; /* outputs of a tile, and numbers that are added lane by lane */

enum isa { AVX2 = 1, AVX_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, NEON };

/* Windows is left out: its `long` has 32 bits. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)
#define X86 1
#define AVX2_TARGET "avx2,fma,f16c"
#ifndef AVX_VNNI_TARGET /* a test names AVX512's form of the same instruction */
#define AVX_VNNI_TARGET "avx2,fma,f16c,avxvnni"
#endif
#define AVX512_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define AVX512_VNNI_TARGET AVX512_TARGET ",avx512vnni"
#define AVX512_BF16_TARGET AVX512_TARGET ",avx512bf16"
#elif defined(__AARCH64EL__) && defined(__GNUC__) && !defined(_WIN32)
#define ARM 1
#define NEON_TARGET "arch=armv8.2-a+dotprod"
#endif

/* Whether this processor has all instructions of a set. */
int outpace_has_isa(int isa);
