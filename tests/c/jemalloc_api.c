/* What jemalloc(3) says of each function, for any library that has the API: compiled with <jemalloc/jemalloc.h>
 * (SYSTEM_HEADER) it runs on jemalloc itself, too. PREFIX is the names'. */
#include <pthread.h>

#include "check.h"
#ifdef SYSTEM_HEADER
#include <jemalloc/jemalloc.h>
#else
#include <thermalloc/jemalloc.h>
#endif

#ifndef PREFIX
#define PREFIX
#endif
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define J(name) PASTE(PREFIX, name)

static const size_t sizes[] = {1,     8,      16,     17,      100,     128,     1000,    4096,   5000,
                               14337, 32768,  32769,  100000,  262144,  1 << 20, 1100000, 2 << 20, 5000000};
#define N_SIZES (sizeof sizes / sizeof *sizes)

static uint64_t read_u64(const char *name) {
  uint64_t value = 0;
  size_t len = sizeof value;
  int result = J(mallctl)(name, &value, &len, NULL, 0);
  CHECK(result == 0, "%s: %d", name, result);
  return value;
}

static size_t read_size(const char *name) {
  size_t value = 0, len = sizeof value;
  int result = J(mallctl)(name, &value, &len, NULL, 0);
  CHECK(result == 0, "%s: %d", name, result);
  return value;
}

static unsigned read_unsigned(const char *name) {
  unsigned value = 0;
  size_t len = sizeof value;
  int result = J(mallctl)(name, &value, &len, NULL, 0);
  CHECK(result == 0, "%s: %d", name, result);
  return value;
}

static int is_ours(void) {
  const char *version = "";
  size_t len = sizeof version;
  CHECK(J(mallctl)("version", &version, &len, NULL, 0) == 0, "version");
  return strstr(version, "thermalloc") != NULL;
}

static void advance(void) {
  uint64_t epoch = 1;
  CHECK(J(mallctl)("epoch", NULL, NULL, &epoch, sizeof epoch) == 0, "epoch");
}

static const char *arena_name(const char *format, unsigned arena) {
  static char name[100];
  snprintf(name, sizeof name, format, arena);
  return name;
}

static int arena_do(const char *format, unsigned arena) {
  return J(mallctl)(arena_name(format, arena), NULL, NULL, NULL, 0);
}

static unsigned owner(void *p) {
  unsigned arena = UINT_MAX;
  size_t len = sizeof arena;
  CHECK(J(mallctl)("arenas.lookup", &arena, &len, &p, sizeof p) == 0, "lookup");
  return arena;
}

static int all_are(const unsigned char *p, int value, size_t from, size_t to) {
  for (size_t i = from; i < to; i++)
    if (p[i] != value) return 0;
  return 1;
}

static void flags_and_sizes(void) {
  for (size_t i = 0; i < N_SIZES; i++)
    for (int lg = 0; lg <= 22; lg++)
      for (int round = 0; round < 4; round++) {
        size_t size = sizes[i];
        int flags = MALLOCX_LG_ALIGN(lg) | (round & 1 ? MALLOCX_ZERO : 0) | (round & 2 ? MALLOCX_TCACHE_NONE : 0);
        unsigned char *p = J(mallocx)(size, flags);
        CHECK(p, "%zu %#x", size, flags);
        CHECK(is_aligned(p, (size_t)1 << lg), "%zu %#x %p", size, flags, (void *)p);
        size_t usable = J(sallocx)(p, 0);
        CHECK(usable >= size && usable == J(nallocx)(size, flags) && usable == J(malloc_usable_size)(p),
              "%zu %#x: %zu, %zu", size, flags, usable, J(nallocx)(size, flags));
        if (flags & MALLOCX_ZERO) CHECK(all_are(p, 0, 0, size), "%zu %#x", size, flags);
        memset(p, 0xff, usable);
        if (round & 2)
          J(sdallocx)(p, size, flags & ~MALLOCX_ZERO);
        else
          J(dallocx)(p, 0);
      }
  CHECK(MALLOCX_ALIGN(4096) == 12 && MALLOCX_ALIGN((size_t)1 << 40) == 40, "MALLOCX_ALIGN");
}

static void what_cant_be(void) {
  size_t too_large[] = {beyond, most, most - 4096};
  for (int i = 0; i < 3; i++) {
    CHECK(J(nallocx)(too_large[i], 0) == 0, "%zx", too_large[i]);
    CHECK(J(nallocx)(too_large[i], MALLOCX_ALIGN(64)) == 0, "%zx", too_large[i]);
    CHECK(!J(mallocx)(too_large[i], 0), "%zx", too_large[i]);
    CHECK(!J(mallocx)(too_large[i], MALLOCX_ALIGN(64) | MALLOCX_ZERO), "%zx", too_large[i]);
    CHECK(!J(malloc)(too_large[i]), "%zx", too_large[i]);
    CHECK(!J(calloc)(2, too_large[i]) && errno == ENOMEM, "%zx", too_large[i]);
    unsigned char *p = J(mallocx)(100, 0);
    memset(p, 5, 100);
    CHECK(!J(rallocx)(p, too_large[i], 0), "%zx", too_large[i]);
    CHECK(!J(realloc)(p, too_large[i]), "%zx", too_large[i]);
    CHECK(J(xallocx)(p, too_large[i], 0, 0) == J(sallocx)(p, 0), "%zx", too_large[i]);
    CHECK(all_are(p, 5, 0, 100), "the block stays");
    J(dallocx)(p, 0);
  }
}

static void alignments_that_cant_be(void) {
  for (int lg = 62; lg < 64; lg++) {
    CHECK(!J(mallocx)(1, MALLOCX_LG_ALIGN(lg)), "%d", lg);
    CHECK(!J(mallocx)(1, MALLOCX_LG_ALIGN(lg) | MALLOCX_ZERO | MALLOCX_TCACHE_NONE), "%d", lg);
    CHECK(J(nallocx)(1, MALLOCX_LG_ALIGN(lg)) == 0 || !is_ours(), "%d", lg);
    void *p = NULL;
    CHECK(J(posix_memalign)(&p, (size_t)1 << lg, 1) == ENOMEM, "%d", lg);
  }
}

static void standard(void) {
  for (size_t i = 0; i < N_SIZES; i++) {
    unsigned char *p = J(malloc)(sizes[i]);
    CHECK(p && is_aligned(p, sizes[i] >= 16 ? 16 : 8), "%zu", sizes[i]);
    memset(p, 0xff, J(malloc_usable_size)(p));
    J(free)(p);
    p = J(calloc)(sizes[i], 3);
    CHECK(p && all_are(p, 0, 0, 3 * sizes[i]), "%zu", sizes[i]);
    memset(p, 3, 3 * sizes[i]);
    p = J(realloc)(p, 7 * sizes[i]);
    CHECK(p && all_are(p, 3, 0, 3 * sizes[i]), "%zu", sizes[i]);
    J(free)(p);
    for (size_t align = 8; align <= 1 << 21; align *= 2) {
      void *q = NULL;
      CHECK(J(posix_memalign)(&q, align, sizes[i]) == 0 && is_aligned(q, align), "%zu %zu", sizes[i], align);
      J(free)(q);
      q = J(aligned_alloc)(align, sizes[i]);
      CHECK(q && is_aligned(q, align), "%zu %zu", sizes[i], align);
      J(free)(q);
      q = J(memalign)(align, sizes[i]);
      CHECK(q && is_aligned(q, align), "%zu %zu", sizes[i], align);
      J(free)(q);
    }
    void *q = J(valloc)(sizes[i]);
    CHECK(q && is_aligned(q, 4096), "%zu", sizes[i]);
    J(free)(q);
  }
  void *p = NULL;
  CHECK(J(posix_memalign)(&p, 3, 8) == EINVAL && J(posix_memalign)(&p, none, 8) == EINVAL && !p, "alignment");
  CHECK(J(posix_memalign)(&p, 64, most - 70) == ENOMEM, "size");
  errno = 0;
  CHECK(!J(aligned_alloc)(24, 8) && errno == EINVAL, "%d", errno);
  J(free)(NULL);
  CHECK(J(malloc_usable_size)(NULL) == 0, "null");
  p = J(malloc)(none);
  CHECK(p, "a block of no size has an address");
  J(free)(p);
  p = J(realloc)(NULL, 10);
  CHECK(p, "from null");
  J(free)(p);
}

static void rallocx_keeps(int base) {
  for (size_t i = 0; i < N_SIZES; i++)
    for (size_t j = 0; j < N_SIZES; j++)
      for (int zero = 0; zero < 2; zero++) {
        int flags = base | (zero ? MALLOCX_ZERO : 0) | MALLOCX_ALIGN(i & 1 ? 64 : 8);
        unsigned char *p = J(mallocx)(sizes[i], base);
        size_t old = J(sallocx)(p, 0), same = sizes[i] < sizes[j] ? sizes[i] : sizes[j];
        memset(p, 0x5a, old);
        p = J(rallocx)(p, sizes[j], flags);
        CHECK(p && is_aligned(p, i & 1 ? 64 : 8), "%zu %zu", sizes[i], sizes[j]);
        CHECK(J(sallocx)(p, 0) >= sizes[j], "%zu %zu", sizes[i], sizes[j]);
        CHECK(all_are(p, 0x5a, 0, same), "%zu %zu", sizes[i], sizes[j]);
        if (zero && J(sallocx)(p, 0) > old) CHECK(all_are(p, 0, old, J(sallocx)(p, 0)), "%zu %zu", sizes[i], sizes[j]);
        J(dallocx)(p, base);
      }
}

/* Where it is: bytes in, bytes kept, and what it says is true. */
static void xallocx_tells_the_truth(int base) {
  for (size_t i = 0; i < N_SIZES; i++)
    for (size_t j = 0; j < N_SIZES; j++)
      for (int extra = 0; extra < 2; extra++) {
        unsigned char *p = J(mallocx)(sizes[i], base);
        size_t old = J(sallocx)(p, 0), more = extra ? 3 * sizes[j] : 0;
        memset(p, 0x5a, old);
        size_t now = J(xallocx)(p, sizes[j], more, base | MALLOCX_ZERO);
        /* jemalloc 5.3.0 sometimes says the old size of a block that it has grown. */
        if (!is_ours() && now == old) now = J(sallocx)(p, 0);
        CHECK(now == J(sallocx)(p, 0), "%zu %zu: %zu, not %zu", sizes[i], sizes[j], now, J(sallocx)(p, 0));
        size_t least = J(nallocx)(sizes[j], 0) < old ? J(nallocx)(sizes[j], 0) : old;
        size_t largest = J(nallocx)(sizes[j] + more, 0) > old ? J(nallocx)(sizes[j] + more, 0) : old;
        CHECK(now >= least && now <= largest, "%zu %zu %zu: %zu", sizes[i], sizes[j], more, now);
        CHECK(all_are(p, 0x5a, 0, now < old ? now : old), "%zu %zu", sizes[i], sizes[j]);
        if (now > old) CHECK(all_are(p, 0, old, now), "%zu %zu", sizes[i], sizes[j]);
        memset(p, 1, now);
        CHECK(J(xallocx)(p, now, most - now, 0) >= now, "size and extra up to SIZE_MAX");
        J(dallocx)(p, base);
      }
}

static void explicit_caches(void) {
  unsigned ids[3];
  size_t len = sizeof *ids;
  for (int i = 0; i < 3; i++) CHECK(J(mallctl)("tcache.create", &ids[i], &len, NULL, 0) == 0, "create");
  CHECK(ids[0] != ids[1] && ids[1] != ids[2], "%u %u %u", ids[0], ids[1], ids[2]);
  for (int i = 0; i < 3; i++) {
    int flags = MALLOCX_TCACHE(ids[i]);
    void *blocks[200];
    for (int round = 0; round < 3; round++) {
      for (int n = 0; n < 200; n++) {
        blocks[n] = J(mallocx)(sizes[n % N_SIZES], flags);
        CHECK(blocks[n], "%d", n);
        memset(blocks[n], n, sizes[n % N_SIZES]);
      }
      for (int n = 0; n < 200; n++) {
        CHECK(all_are(blocks[n], n, 0, sizes[n % N_SIZES]), "%d", n);
        if (n % 2)
          J(dallocx)(blocks[n], flags);
        else
          J(sdallocx)(blocks[n], sizes[n % N_SIZES], flags);
      }
    }
    void *p = J(mallocx)(100, flags);
    J(dallocx)(p, flags);
    CHECK(J(mallocx)(100, flags) == p, "last in, first out");
    p = J(rallocx)(p, 200, flags);
    J(dallocx)(p, MALLOCX_TCACHE_NONE);
  }
  CHECK(J(mallctl)("tcache.flush", NULL, NULL, &ids[0], sizeof *ids) == 0, "flush");
  for (int i = 0; i < 3; i++) CHECK(J(mallctl)("tcache.destroy", NULL, NULL, &ids[i], sizeof *ids) == 0, "destroy");
  unsigned again;
  CHECK(J(mallctl)("tcache.create", &again, &len, NULL, 0) == 0, "create");
  CHECK(again == ids[0] || again == ids[1] || again == ids[2], "%u: an id is used again", again);
  CHECK(J(mallctl)("tcache.destroy", NULL, NULL, &again, sizeof again) == 0, "destroy");
  CHECK(J(mallctl)("thread.tcache.flush", NULL, NULL, NULL, 0) == 0, "thread's own");
}

static unsigned create_arena(void) {
  unsigned arena, before = read_unsigned("arenas.narenas");
  size_t len = sizeof arena;
  CHECK(J(mallctl)("arenas.create", &arena, &len, NULL, 0) == 0, "create");
  CHECK(arena <= before && read_unsigned("arenas.narenas") >= before, "%u of %u", arena, before);
  return arena;
}

static size_t arena_allocated(unsigned arena) {
  advance();
  size_t bytes = read_size(arena_name("stats.arenas.%u.small.allocated", arena));
  return bytes + read_size(arena_name("stats.arenas.%u.large.allocated", arena));
}

static int compare(const void *a, const void *b) {
  uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
  return x < y ? -1 : x > y;
}

/* The pages of blocks of three owners, by address: no page has two. */
static void arenas_are_apart(void) {
  unsigned one = create_arena(), other = create_arena();
  CHECK(one != other, "%u", one);
  int flags[] = {MALLOCX_TCACHE_NONE, MALLOCX_ARENA(one) | MALLOCX_TCACHE_NONE, MALLOCX_ARENA(other) | MALLOCX_TCACHE_NONE};
  enum { N = 1200 };
  static uintptr_t spots[N][2];
  void *blocks[N];
  for (int i = 0; i < N; i++) {
    size_t size = sizes[i / 3 % 12];
    blocks[i] = J(mallocx)(size, flags[i % 3]);
    CHECK(blocks[i], "%d", i);
    memset(blocks[i], i, size);
    spots[i][0] = (uintptr_t)blocks[i];
    spots[i][1] = i % 3;
    if (i % 3) CHECK(owner(blocks[i]) == (i % 3 == 1 ? one : other), "%d", i);
  }
  qsort(spots, N, sizeof *spots, compare);
  for (int i = 1; i < N; i++) {
    void *before = (void *)spots[i - 1][0];
    uintptr_t end = spots[i - 1][0] + J(sallocx)(before, 0) - 1;
    CHECK(spots[i][0] > end, "overlap");
    CHECK(spots[i][0] >> 12 != end >> 12 || spots[i][1] == spots[i - 1][1], "a page of two arenas: %p", before);
  }
  size_t live = arena_allocated(one);
  CHECK(live >= N / 3 / 12 * 90000, "%zu", live);
  for (int i = 0; i < N; i++)
    if (i % 3 != 1) J(free)(blocks[i]);
  CHECK(J(mallctl)("thread.tcache.flush", NULL, NULL, NULL, 0) == 0, "flush");
  CHECK(arena_allocated(other) == 0 && arena_allocated(one) == live, "%zu, %zu", arena_allocated(other), arena_allocated(one));
  CHECK(arena_do("arena.%u.reset", one) == 0 && arena_allocated(one) == 0, "reset");
  void *p = J(mallocx)(1000, flags[1]);
  CHECK(p && owner(p) == one && arena_allocated(one) == 1024, "%zu after a reset", arena_allocated(one));
  CHECK(arena_do("arena.%u.purge", one) == 0 && arena_do("arena.%u.decay", one) == 0, "purge");
  CHECK(arena_do("arena.%u.destroy", one) == 0 && arena_do("arena.%u.destroy", other) == 0, "destroy");
  CHECK(arena_do("arena.%u.reset", 0) == EFAULT && arena_do("arena.%u.destroy", 0) == EFAULT, "an automatic one");
  unsigned again = create_arena();
  CHECK(again == one || again == other, "%u: an index is used again", again);
  CHECK(arena_do("arena.%u.destroy", again) == 0, "destroy");
}

static void decay_of_an_arena(void) {
  unsigned arena = create_arena();
  ssize_t was, now = 0, set = 1234;
  size_t len = sizeof was;
  const char *name = arena_name("arena.%u.dirty_decay_ms", arena);
  CHECK(J(mallctl)(name, &was, &len, &set, sizeof set) == 0, "set");
  CHECK(J(mallctl)(name, &now, &len, NULL, 0) == 0 && now == 1234, "%zd", now);
  set = -2;
  CHECK(J(mallctl)(name, NULL, NULL, &set, sizeof set) == EFAULT, "below -1");
  set = 0;
  CHECK(J(mallctl)(name, NULL, NULL, &set, sizeof set) == 0, "at once");
  name = arena_name("arena.%u.muzzy_decay_ms", arena);
  CHECK(J(mallctl)(name, NULL, NULL, &set, sizeof set) == 0, "at once");
  int flags = MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE;
  J(dallocx)(J(mallocx)(4 << 20, flags), flags);
  advance();
  CHECK(read_size(arena_name("stats.arenas.%u.pdirty", arena)) == 0, "purged when freed");
  set = -1;
  name = arena_name("arena.%u.dirty_decay_ms", arena);
  CHECK(J(mallctl)(name, NULL, NULL, &set, sizeof set) == 0, "never");
  J(dallocx)(J(mallocx)(4 << 20, flags), flags);
  CHECK(arena_do("arena.%u.decay", arena) == 0, "decay");
  advance();
  CHECK(read_size(arena_name("stats.arenas.%u.pdirty", arena)) >= 1024, "kept");
  CHECK(arena_do("arena.%u.purge", arena) == 0, "purge");
  advance();
  CHECK(read_size(arena_name("stats.arenas.%u.pdirty", arena)) == 0, "purged");
  CHECK(arena_do("arena.%u.destroy", arena) == 0, "destroy");
}

static void *bound(void *given) {
  unsigned arena = *(unsigned *)given, was, now;
  size_t len = sizeof was;
  CHECK(J(mallctl)("thread.arena", &was, &len, &arena, sizeof arena) == 0 && was != arena, "bind");
  CHECK(J(mallctl)("thread.arena", &now, &len, NULL, 0) == 0 && now == arena, "%u", now);
  for (size_t i = 0; i < N_SIZES; i++) {
    void *p = J(malloc)(sizes[i]);
    CHECK(owner(p) == arena, "%zu", sizes[i]);
    p = J(realloc)(p, 2 * sizes[i]);
    CHECK(owner(p) == arena, "%zu", sizes[i]);
    J(free)(p);
  }
  unsigned none_such = 4000;
  CHECK(J(mallctl)("thread.arena", NULL, NULL, &none_such, sizeof none_such) == EFAULT, "no such arena");
  CHECK(arena_do("arena.%u.destroy", arena) == EFAULT, "a thread is bound");
  CHECK(J(mallctl)("thread.tcache.flush", NULL, NULL, NULL, 0) == 0, "flush");
  return NULL;
}

static void threads_and_arenas(void) {
  unsigned arena = create_arena();
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, bound, &arena) == 0, "thread");
  pthread_join(thread, NULL);
  CHECK(arena_do("arena.%u.destroy", arena) == 0, "nobody is bound any more");
}

static void *counted(void *unused) {
  uint64_t *allocated, *deallocated;
  size_t len = sizeof allocated;
  CHECK(J(mallctl)("thread.allocatedp", &allocated, &len, NULL, 0) == 0, "allocatedp");
  CHECK(J(mallctl)("thread.deallocatedp", &deallocated, &len, NULL, 0) == 0, "deallocatedp");
  CHECK(*allocated == read_u64("thread.allocated") && *deallocated == read_u64("thread.deallocated"), "same");
  CHECK(J(mallctl)("thread.peak.reset", NULL, NULL, NULL, 0) == 0, "reset");
  for (size_t i = 0; i < N_SIZES; i++) {
    uint64_t before = *allocated, freed = *deallocated;
    void *p = J(malloc)(sizes[i]);
    size_t size = J(sallocx)(p, 0);
    CHECK(*allocated - before == size && *deallocated == freed, "%zu: %ju", size, (uintmax_t)(*allocated - before));
    J(free)(p);
    CHECK(*allocated - before == size && *deallocated - freed == size, "%zu: %ju", size, (uintmax_t)(*deallocated - freed));
    p = J(mallocx)(sizes[i], MALLOCX_ALIGN(4096) | MALLOCX_TCACHE_NONE);
    size += J(sallocx)(p, 0);
    p = J(rallocx)(p, 3 * sizes[i], MALLOCX_TCACHE_NONE);
    J(sdallocx)(p, 3 * sizes[i], MALLOCX_TCACHE_NONE);
    CHECK(*allocated - before == *deallocated - freed && *allocated - before >= size, "%zu", sizes[i]);
  }
  CHECK(read_u64("thread.peak.read") >= sizes[N_SIZES - 1], "%ju", (uintmax_t)read_u64("thread.peak.read"));
  return unused;
}

static void counters_of_a_thread(void) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, counted, NULL) == 0, "thread");
  pthread_join(thread, NULL);
}

static void a_thread_without_a_cache(void) {
  bool was = false, off = false, now = true;
  size_t len = sizeof was;
  CHECK(J(mallctl)("thread.tcache.enabled", &was, &len, &off, sizeof off) == 0 && was, "off");
  CHECK(J(mallctl)("thread.tcache.enabled", &now, &len, NULL, 0) == 0 && !now, "is off");
  for (size_t i = 0; i < N_SIZES; i++) J(free)(J(malloc)(sizes[i]));
  CHECK(J(mallctl)("thread.tcache.enabled", NULL, NULL, &was, sizeof was) == 0, "on");
  CHECK(J(mallctl)("thread.idle", NULL, NULL, NULL, 0) == 0, "idle");
}

int main(void) {
  flags_and_sizes();
  what_cant_be();
  alignments_that_cant_be();
  standard();
  xallocx_tells_the_truth(0);
  rallocx_keeps(0);
  rallocx_keeps(MALLOCX_TCACHE_NONE);
  unsigned arena = create_arena();
  xallocx_tells_the_truth(MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE);
  rallocx_keeps(MALLOCX_ARENA(arena) | MALLOCX_TCACHE_NONE);
  CHECK(arena_allocated(arena) == 0, "%zu", arena_allocated(arena));
  /* jemalloc makes something of it. */
  if (is_ours()) CHECK(!J(mallocx)(100, MALLOCX_ARENA(4000)), "no such arena");
  CHECK(arena_do("arena.%u.destroy", arena) == 0, "destroy");
  explicit_caches();
  arenas_are_apart();
  decay_of_an_arena();
  threads_and_arenas();
  counters_of_a_thread();
  a_thread_without_a_cache();
  return 0;
}
