// Undoes the definitions of one instruction set before the next.
#undef TARGET
#undef PAIRS
#undef NAME
#undef INLINE
#undef VNNI
#undef WIDE
#undef DENSE_ROWS
#undef BY_LEFT
#undef BY_RIGHT
#undef vi_dot_wide
#undef FOR_QUERIES
#undef CALL
#undef vf
#undef vi
#undef bytes
