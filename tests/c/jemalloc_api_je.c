/* The names of a bundled build. */
#define PREFIX je_
#include "jemalloc_api.c"
