/* Blocks of all kinds, of which some stay. Says what stays: the profile has to agree. */
#include "prof.h"
#include <malloc.h>

enum { KEPT = 400 };
static struct { void *p; size_t size; } kept[KEPT];

static size_t next(void) {
  static uint64_t state = 42;
  state = state * 6364136223846793005u + 1442695040888963407u;
  uint64_t r = state >> 33;
  return r % 100 < 70 ? r % 700 : r % 100 < 90 ? r % 40000 : r % 100 < 97 ? r % 900000 : r % 5000000;
}

static void *allocate(int i, size_t size) {
  void *p;
  switch (i % 5) {
  case 0: return calloc(1, size);
  case 1: CHECK(posix_memalign(&p, 64 << i % 9, size) == 0, "%zu", size); return p;
  case 2: p = malloc(size / 3); return realloc(p, size ? size : 1);
  default: return malloc(size);
  }
}

int main(void) {
  for (int i = 0; i < 20000; i++) {
    int at = i % KEPT;
    size_t size = next();
    if (i % 7 == 0 && kept[at].p) {
      size = size ? size : 1;
      kept[at].p = realloc(kept[at].p, size);
    } else {
      free(kept[at].p);
      kept[at].p = allocate(i, size);
      if (i % 5 == 2 && !size) size = 1;
    }
    CHECK(kept[at].p, "%zu", size);
    memset(kept[at].p, i, size < 100 ? size : 100);
    kept[at].size = size;
  }
  for (int i = 0; i < KEPT; i++) {
    char line[100];
    int n = snprintf(line, sizeof line, "live %zu %zu %zu\n", (size_t)kept[i].p, kept[i].size,
                     malloc_usable_size(kept[i].p));
    CHECK(write(1, line, n) == n, "%d", n);
  }
  dump();
  for (int i = 0; i < KEPT; i++) free(kept[i].p);
  _exit(0);
}
