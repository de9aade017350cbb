/* The end of the loops of an instruction set. */

#undef ISA
#undef TARGET
#undef VNNI
#undef LANES
#undef SIGNED_CODES
#undef ALL_FLOATS
#undef ALL_INTS
#undef FMA
#undef MAX
#undef MIN
#undef ROUND
#undef LARGEST
#undef MAX_INTS
#undef LARGEST_INT
#undef TOTAL
#undef LOAD_HALVES
#undef STORE_HALVES
#undef LOAD_BYTES
#undef STORE_BYTES
#undef LOAD_SIGNED_BYTES
#undef DOT
#undef UNSIGNED_PAIRS
#undef TIMES
#undef BF16_DOT
#undef LOOP
