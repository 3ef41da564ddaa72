/* What a Python program calls by ctypes. */
#include "prof.h"

__attribute__((noinline)) int here(size_t size) {
  void *p = malloc(size);
  tell_stack(p, size);
  return 0;
}

void finish(void) {
  dump();
  _exit(0);
}
