/* A failed check prints one line and ends the process with 1. */
#ifndef CHECK_H
#define CHECK_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(cond, ...)                                        \
  do {                                                          \
    if (!(cond)) {                                              \
      char text_[300];                                          \
      int n_ = snprintf(text_, sizeof text_, __VA_ARGS__);      \
      dprintf(1, "%s:%d: %s: %.*s\n", __FILE__, __LINE__, #cond, n_, text_); \
      _exit(1);                                                 \
    }                                                           \
  } while (0)

/* Sizes that no machine has, out of the compiler's sight. */
__attribute__((unused)) static volatile size_t huge = (size_t)PTRDIFF_MAX - 4096;
__attribute__((unused)) static volatile size_t beyond = (size_t)PTRDIFF_MAX + 1;
__attribute__((unused)) static volatile size_t most = SIZE_MAX;
__attribute__((unused)) static volatile size_t none = 0;

static inline int is_aligned(const void *p, size_t align) { return ((uintptr_t)p & (align - 1)) == 0; }
#endif
