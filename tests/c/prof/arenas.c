/* Explicit arenas, explicit caches and resizing in place under the profiler. After each step it says what is
 * live and writes a dump to $DUMP.STEP: the ledger has to agree. */
#include "prof.h"
#include <pthread.h>
#include <thermalloc/jemalloc.h>

enum { EACH = 60, SETS = 6 };
static struct { void *p; size_t size; } kept[SETS][EACH];
static const size_t sizes[] = {1, 24, 100, 1000, 4096, 5000, 20000, 40000, 100000, 700000, 1 << 20, 1100000, 2 << 20, 5000000};
enum { SIZES = sizeof sizes / sizeof *sizes };

static size_t size_of(int i) { return sizes[i % SIZES] + i / SIZES; }

static void step(const char *name) {
  char line[200];
  for (int s = 0; s < SETS; s++)
    for (int i = 0; i < EACH; i++) {
      if (!kept[s][i].p) continue;
      int n = snprintf(line, sizeof line, "%s %zu %zu %zu\n", name, (size_t)kept[s][i].p, kept[s][i].size, sallocx(kept[s][i].p, 0));
      CHECK(write(1, line, n) == n, "%d", n);
    }
  snprintf(line, sizeof line, "%s.%s", getenv("DUMP"), name);
  int error = thermalloc_prof_dump(line);
  CHECK(error == 0, "%d", error);
}

static unsigned number(const char *name) {
  unsigned value;
  size_t len = sizeof value;
  CHECK(mallctl(name, &value, &len, NULL, 0) == 0, "%s", name);
  return value;
}

static void tell(const char *name, unsigned value) {
  CHECK(mallctl(name, NULL, NULL, &value, sizeof value) == 0, "%s", name);
}

static void end(const char *format, unsigned arena) {
  char name[50];
  snprintf(name, sizeof name, format, arena);
  CHECK(mallctl(name, NULL, NULL, NULL, 0) == 0, "%s", name);
}

static void keep(int s, int i, void *p, size_t size) {
  CHECK(p, "%zu", size);
  memset(p, i, size < 50 ? size : 50);
  kept[s][i].p = p, kept[s][i].size = size;
}

static void drop_half(int s, int flags) {
  for (int i = 0; i < EACH; i += 2) {
    dallocx(kept[s][i].p, flags);
    kept[s][i].p = NULL;
  }
}

/* Each block gets the size of another, with flags or without. */
static void resize(int s, int by, int flags) {
  for (int i = 0; i < EACH; i++) {
    if (!kept[s][i].p) continue;
    size_t size = size_of(i + by);
    keep(s, i, rallocx(kept[s][i].p, size, flags | (i % 3 == 0 ? MALLOCX_ZERO : 0)), size);
  }
}

static void resize_in_place(int s, int flags) {
  for (int i = 0; i < EACH; i++) {
    void *p = kept[s][i].p;
    if (!p) continue;
    size_t had = sallocx(p, flags), size = i % 2 ? had + 3 * 4096 : had / 2 + 1;
    size_t has = xallocx(p, size, i % 5 == 0 ? 100000 : 0, flags);
    CHECK(has == sallocx(p, flags), "%zu", has);
    kept[s][i].size = size < has ? size : has;
  }
}

static unsigned bound_to;

static void *bound(void *unused) {
  tell("thread.arena", bound_to);
  for (int i = 0; i < EACH; i++) {
    size_t size = size_of(i);
    void *p = i % 4 == 0 ? calloc(1, size) : i % 4 == 1 ? aligned_alloc(64, size) : malloc(size);
    if (i % 4 == 3) p = realloc(p, size * 2), size *= 2;
    keep(3, i, p, size);
    free(malloc(size_of(i + 1)));
  }
  for (int i = 0; i < EACH; i += 3) {
    free(kept[3][i].p);
    kept[3][i].p = NULL;
  }
  return unused;
}

int main(void) {
  unsigned one = number("arenas.create"), two = number("arenas.create"), three = number("arenas.create");
  int in_one = MALLOCX_ARENA(one) | MALLOCX_TCACHE_NONE, in_two = MALLOCX_ARENA(two) | MALLOCX_TCACHE_NONE;
  for (int i = 0; i < EACH; i++) {
    keep(0, i, mallocx(size_of(i), MALLOCX_TCACHE_NONE), size_of(i));
    keep(1, i, mallocx(size_of(i), in_one), size_of(i));
    keep(2, i, mallocx(size_of(i), in_two | MALLOCX_ALIGN(256) | MALLOCX_ZERO), size_of(i));
  }
  step("allocated");
  drop_half(0, 0), drop_half(1, in_one), drop_half(2, MALLOCX_TCACHE_NONE);
  step("freed");
  resize(0, 3, 0), resize(1, 5, in_one), resize(2, 1, 0);
  step("resized");
  resize(0, 4, MALLOCX_TCACHE_NONE), resize(1, 6, 0), resize(2, 7, in_two);
  step("resized_again");
  resize(1, 2, in_two), resize(2, 3, in_one);
  step("moved_between_arenas");
  for (int s = 0; s < 3; s++) resize_in_place(s, 0);
  step("in_place");
  for (int s = 0; s < 3; s++) resize_in_place(s, 0);
  step("in_place_again");

  unsigned cache = number("tcache.create");
  for (int i = 0; i < EACH; i++) keep(4, i, mallocx(size_of(i), MALLOCX_TCACHE(cache)), size_of(i));
  drop_half(4, MALLOCX_TCACHE(cache));
  for (int i = 0; i < EACH; i += 2) keep(4, i, mallocx(size_of(i) / 2 + 1, MALLOCX_TCACHE(cache)), size_of(i) / 2 + 1);
  step("cached");
  tell("tcache.flush", cache);
  drop_half(4, MALLOCX_TCACHE(cache));
  step("flushed");
  tell("tcache.destroy", cache);
  step("cache_destroyed");

  bound_to = three;
  pthread_t t;
  CHECK(!pthread_create(&t, 0, bound, 0) && !pthread_join(t, 0), "thread");
  step("bound");
  resize(3, 2, 0);
  step("bound_resized");

  /* Large blocks where they are, by realloc. */
  for (int i = 0; i < EACH; i++) keep(5, i, malloc((i + 1) * 100000), (i + 1) * 100000);
  for (int i = 0; i < EACH; i++) keep(5, i, realloc(kept[5][i].p, (i + 1) * 90000), (i + 1) * 90000);
  step("shrunk");
  for (int i = 0; i < EACH; i++) keep(5, i, realloc(kept[5][i].p, (i + 1) * 95000), (i + 1) * 95000);
  step("grown");

  /* Both arenas have blocks of sets 1 and 2 by now. */
  for (int i = 0; i < EACH; i++) kept[1][i].p = kept[2][i].p = NULL;
  end("arena.%u.reset", one), end("arena.%u.reset", two);
  step("reset");
  for (int i = 0; i < EACH; i++) keep(1, i, mallocx(size_of(i), in_one), size_of(i));
  step("after_reset");
  for (int i = 0; i < EACH; i++) kept[1][i].p = kept[3][i].p = NULL;
  end("arena.%u.destroy", one), end("arena.%u.destroy", three);
  step("destroyed");
  CHECK(number("arenas.create") == one, "its index is used again");
  for (int i = 0; i < EACH; i++) keep(1, i, mallocx(size_of(i), in_one), size_of(i));
  step("created_again");
  for (int s = 0; s < SETS; s++)
    for (int i = 0; i < EACH; i++) {
      if (kept[s][i].p) dallocx(kept[s][i].p, 0);
      kept[s][i].p = NULL;
    }
  step("nothing");
  exit(0);
}
