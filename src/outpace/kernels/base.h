/* The instruction set that every processor with loops has. */

#if X86
#define ISA avx2
#define TARGET AVX2_TARGET
#include "ymm.h"
#else
#define ISA neon
#define TARGET NEON_TARGET
#include "neon.h"
#endif
