/* Threads that allocate from arenas of their own and of others, free what others allocated, with and without
 * caches, while arenas come and go. Nothing overlaps, and in the end every arena is empty. */
#include <pthread.h>
#include <stdatomic.h>
#include <thermalloc/jemalloc.h>

#include "check.h"

enum { THREADS = 4, SHARED = 3, SLOTS = 512, ROUNDS = 150, STEPS = 3000 };

struct block {
  size_t size;
  unsigned char tag;
};
static unsigned shared[SHARED];
static _Atomic(struct block *) slots[SLOTS];

static unsigned create(void) {
  unsigned arena;
  size_t len = sizeof arena;
  CHECK(mallctl("arenas.create", &arena, &len, NULL, 0) == 0, "create");
  return arena;
}

static int arena_do(const char *what, unsigned arena) {
  char name[60];
  snprintf(name, sizeof name, "arena.%u.%s", arena, what);
  return mallctl(name, NULL, NULL, NULL, 0);
}

static size_t allocated(unsigned arena) {
  uint64_t epoch = 1;
  CHECK(mallctl("epoch", NULL, NULL, &epoch, sizeof epoch) == 0, "epoch");
  const char *kinds[] = {"small", "large"};
  size_t sum = 0, bytes, len = sizeof bytes;
  for (int i = 0; i < 2; i++) {
    char name[60];
    snprintf(name, sizeof name, "stats.arenas.%u.%s.allocated", arena, kinds[i]);
    CHECK(mallctl(name, &bytes, &len, NULL, 0) == 0, "%s", name);
    sum += bytes;
  }
  return sum;
}

static void check(struct block *block) {
  unsigned char *bytes = (unsigned char *)(block + 1);
  size_t n = block->size - sizeof *block;
  CHECK(n == 0 || (bytes[0] == block->tag && bytes[n / 2] == block->tag && bytes[n - 1] == block->tag), "%zu", block->size);
}

static void fill(struct block *block, size_t size, unsigned char tag) {
  *block = (struct block){size, tag};
  memset(block + 1, tag, size - sizeof *block);
}

static void *work(void *given) {
  unsigned random = (unsigned)(uintptr_t)given * 7919 + 1, cache, own = create();
  size_t len = sizeof cache;
  CHECK(mallctl("tcache.create", &cache, &len, NULL, 0) == 0, "cache");
  for (int round = 0; round < ROUNDS; round++) {
    for (int step = 0; step < STEPS; step++) {
      random = random * 1664525u + 1013904223u;
      unsigned pick = random >> 16;
      int flags = MALLOCX_ARENA(shared[pick % SHARED]) | (pick & 64 ? MALLOCX_TCACHE(cache) : MALLOCX_TCACHE_NONE);
      size_t size = sizeof(struct block) + (pick % 97 ? random % 3000 : random % 300000);
      struct block *block = pick % 5 ? mallocx(size, flags) : malloc(size);
      CHECK(block, "%zu", size);
      fill(block, size, (unsigned char)random);
      block = atomic_exchange(&slots[pick % SLOTS], block);
      if (!block) continue;
      check(block);
      if (pick % 7 == 0) {
        block = rallocx(block, size, pick & 8 ? MALLOCX_ARENA(shared[step % SHARED]) : 0);
        CHECK(block, "%zu", size);
        fill(block, size, 1);
      }
      if (pick % 3)
        free(block);
      else
        dallocx(block, pick & 128 ? MALLOCX_TCACHE(cache) : MALLOCX_TCACHE_NONE);
    }
    for (int n = 0; n < 200; n++) CHECK(mallocx(1 + n * 50, MALLOCX_ARENA(own) | MALLOCX_TCACHE_NONE), "%d", n);
    if (round % 2) {
      CHECK(arena_do("reset", own) == 0 && allocated(own) == 0, "reset");
    } else {
      CHECK(arena_do("destroy", own) == 0, "destroy");
      own = create();
    }
    if (round % 8 == 0) CHECK(arena_do("purge", shared[round % SHARED]) == 0, "purge");
  }
  CHECK(mallctl("tcache.destroy", NULL, NULL, &cache, sizeof cache) == 0, "cache");
  CHECK(arena_do("destroy", own) == 0, "destroy");
  return NULL;
}

int main(void) {
  for (int i = 0; i < SHARED; i++) shared[i] = create();
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  for (int i = 0; i < SLOTS; i++)
    if (slots[i]) {
      check(slots[i]);
      free(slots[i]);
    }
  for (int i = 0; i < SHARED; i++) {
    CHECK(allocated(shared[i]) == 0, "%zu", allocated(shared[i]));
    CHECK(arena_do("destroy", shared[i]) == 0, "destroy");
  }
  return 0;
}
