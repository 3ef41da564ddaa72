/* What an explicit arena does not use goes back while the program does nothing, and what it works with stays. */
#include <thermalloc/jemalloc.h>

#include "check.h"

static unsigned arena;

static size_t dirty_pages(void) {
  uint64_t epoch = 1;
  size_t pages, len = sizeof pages;
  char name[60];
  snprintf(name, sizeof name, "stats.arenas.%u.pdirty", arena);
  CHECK(mallctl("epoch", NULL, NULL, &epoch, sizeof epoch) == 0, "epoch");
  CHECK(mallctl(name, &pages, &len, NULL, 0) == 0, "%s", name);
  return pages;
}

int main(void) {
  size_t len = sizeof arena;
  CHECK(mallctl("arenas.create", &arena, &len, NULL, 0) == 0, "arena");
  int flags = MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE;
  enum { BYTES = 64 << 20 };
  for (int round = 0; round < 10; round++) {
    char *p = mallocx(BYTES, flags);
    CHECK(p, "%d", round);
    memset(p, 1, BYTES);
    dallocx(p, flags);
    CHECK(dirty_pages() >= BYTES / 4096, "round %d: %zu", round, dirty_pages());
  }
  /* The options' window and decay together are half a second. */
  size_t left = dirty_pages();
  for (int tenths = 0; left > 0 && tenths < 200; tenths++) {
    usleep(100000);
    left = dirty_pages();
  }
  CHECK(left == 0, "%zu pages stay", left);
  char *p = mallocx(BYTES, flags);
  CHECK(p && p[0] == 0 && p[BYTES - 1] == 0, "they were given back");
  /* Grown by moving its pages, or where it is: the bytes come along. */
  memset(p, 7, BYTES);
  void *behind = mallocx(BYTES, flags);
  p = realloc(p, 2 * BYTES);
  CHECK(p && p[0] == 7 && p[BYTES - 1] == 7 && malloc_usable_size(p) == 2 * BYTES, "%zu", malloc_usable_size(p));
  free(behind);
  free(p);
  return 0;
}
