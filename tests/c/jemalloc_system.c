/* Compiled with jemalloc's own header. */
#define SYSTEM_HEADER
#include "jemalloc_api.c"
