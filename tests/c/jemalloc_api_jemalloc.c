/* The names of TensorFlow's build. */
#define PREFIX jemalloc_
#include "jemalloc_api.c"
