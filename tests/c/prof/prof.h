/* The profiler's functions, where the library is preloaded. */
#ifndef PROF_H
#define PROF_H
#include "../check.h"
#include <execinfo.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma weak thermalloc_prof_dump
#pragma weak thermalloc_scope_push
#pragma weak thermalloc_scope_pop
#pragma weak thermalloc_scope_capture
#pragma weak thermalloc_scope_attach
#pragma weak thermalloc_scope_step
#pragma weak thermalloc_scope_mark
int thermalloc_prof_dump(const char *path);
uint32_t thermalloc_scope_push(const char *name);
void thermalloc_scope_pop(uint32_t token);
uint32_t thermalloc_scope_capture(void);
uint32_t thermalloc_scope_attach(uint32_t token);
void thermalloc_scope_step(uint64_t number);
int thermalloc_scope_mark(void *ptr, uint32_t token);
#ifdef __cplusplus
}
#endif

/* Writes without allocating: one line of a block and its size, and the stack as the C library sees it. */
static inline void tell_stack(void *block, size_t size) {
  void *frames[128];
  int n = backtrace(frames, 128);
  char line[4096];
  int at = snprintf(line, sizeof line, "stack %zu %zu", (size_t)block, size);
  for (int i = 0; i < n && at < (int)sizeof line - 20; i++)
    at += snprintf(line + at, sizeof line - at, " %zu", (size_t)frames[i]);
  line[at++] = '\n';
  CHECK(write(1, line, at) == at, "%d", at);
}

static inline void dump(void) {
  int error = thermalloc_prof_dump(getenv("DUMP"));
  CHECK(error == 0, "%d", error);
}
#endif
