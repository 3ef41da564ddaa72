// The same from C++.
#include <jemalloc/jemalloc.h>
#include <thermalloc/jemalloc.h>
#include <thermalloc/thermalloc.h>

#include "check.h"

#if JEMALLOC_VERSION_MAJOR != 5 || JEMALLOC_VERSION_MINOR != 3
#error version
#endif

#define ALL(p)                                                                                           \
  (void *)p##mallocx, (void *)p##rallocx, (void *)p##xallocx, (void *)p##sallocx, (void *)p##dallocx,    \
      (void *)p##sdallocx, (void *)p##nallocx, (void *)p##mallctl, (void *)p##mallctlnametomib,          \
      (void *)p##mallctlbymib, (void *)p##malloc_stats_print, (void *)p##malloc, (void *)p##calloc,      \
      (void *)p##posix_memalign, (void *)p##aligned_alloc, (void *)p##realloc, (void *)p##free,          \
      (void *)p##malloc_usable_size, (void *)p##memalign, (void *)p##valloc, (void *)p##pvalloc,         \
      (void *)p##free_sized, (void *)p##free_aligned_sized, (void *)&p##malloc_conf,                     \
      (void *)&p##malloc_message

int main(void) {
  void *const names[] = {ALL(), ALL(je_), ALL(jemalloc_)};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) CHECK(names[i], "%zu", i);
  /* One allocator behind all names. */
  void *p = je_malloc(100);
  jemalloc_free(p);
  p = mallocx(100, MALLOCX_ALIGN(64));
  p = je_realloc(p, 1000);
  CHECK(p && jemalloc_sallocx(p, 0) == malloc_usable_size(p), "%zu", malloc_usable_size(p));
  free(p);
  extent_hooks_t hooks = {};
  CHECK(!hooks.alloc && MALLCTL_ARENAS_ALL == 4096 && MALLCTL_ARENAS_DESTROYED == 4097, "types");
  return 0;
}
