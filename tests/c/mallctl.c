/* Every name of jemalloc 5.3's manual and its contract: types, errors, meaning. Compiled with
 * -DPREFIX=je_ it calls the prefixed functions; with -DREFERENCE it runs on jemalloc itself, without what
 * is ours alone: so the test is tested. */
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#ifndef PREFIX
#define PREFIX
#endif
#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)
#define ctl CAT(PREFIX, mallctl)
#define to_mib CAT(PREFIX, mallctlnametomib)
#define by_mib CAT(PREFIX, mallctlbymib)
#define print CAT(PREFIX, malloc_stats_print)
#define mallocx_ CAT(PREFIX, mallocx)
#define dallocx_ CAT(PREFIX, dallocx)

int ctl(const char *, void *, size_t *, void *, size_t);
int to_mib(const char *, size_t *, size_t *);
int by_mib(const size_t *, size_t, void *, size_t *, void *, size_t);
void print(void (*)(void *, const char *), void *, const char *);
void *mallocx_(size_t, int);
void *CAT(PREFIX, realloc)(void *, size_t);
void dallocx_(void *, int);

#define ALL 4096
#define ARENA(i) ((int)(((i) + 1) << 20))
#define TCACHE(i) ((int)(((i) + 2) << 8))
#define TCACHE_NONE ((int)(1 << 8))

struct name {
  const char *name;
  size_t size;
  /* r read, b both, w write, x run, c create, l lookup, - ENOENT where the build lacks it, else read;
   * m as b, but a write is refused with EPERM here */
  char access;
  bool is_text;
};

#define B sizeof(bool)
#define U sizeof(unsigned)
#define S sizeof(size_t)
#define Q sizeof(uint64_t)
#define P sizeof(char *)

static const struct name names[] = {
    {"version", P, 'r', true},
    {"background_thread", B, 'b', false},
    {"max_background_threads", S, 'b', false},
    {"config.cache_oblivious", B, 'r', false},
    {"config.debug", B, 'r', false},
    {"config.fill", B, 'r', false},
    {"config.lazy_lock", B, 'r', false},
    {"config.malloc_conf", P, 'r', true},
    {"config.prof", B, 'r', false},
    {"config.prof_libgcc", B, 'r', false},
    {"config.prof_libunwind", B, 'r', false},
    {"config.stats", B, 'r', false},
    {"config.utrace", B, 'r', false},
    {"config.xmalloc", B, 'r', false},
    {"opt.abort", B, 'r', false},
    {"opt.confirm_conf", B, 'r', false},
    {"opt.abort_conf", B, 'r', false},
    {"opt.cache_oblivious", B, 'r', false},
    {"opt.metadata_thp", P, 'r', true},
    {"opt.trust_madvise", B, 'r', false},
    {"opt.retain", B, 'r', false},
    {"opt.dss", P, 'r', true},
    {"opt.narenas", U, 'r', false},
    {"opt.oversize_threshold", S, 'r', false},
    {"opt.percpu_arena", P, 'r', true},
    {"opt.background_thread", B, 'r', false},
    {"opt.max_background_threads", S, 'r', false},
    {"opt.dirty_decay_ms", S, 'r', false},
    {"opt.muzzy_decay_ms", S, 'r', false},
    {"opt.lg_extent_max_active_fit", S, 'r', false},
    {"opt.stats_print", B, 'r', false},
    {"opt.stats_print_opts", P, 'r', true},
    {"opt.stats_interval", Q, 'r', false},
    {"opt.stats_interval_opts", P, 'r', true},
    {"opt.junk", P, '-', false},
    {"opt.zero", B, '-', false},
    {"opt.utrace", B, '-', false},
    {"opt.xmalloc", B, '-', false},
    {"opt.tcache", B, 'r', false},
    {"opt.tcache_max", S, 'r', false},
    {"opt.thp", P, 'r', true},
    {"opt.prof", B, '-', false},
    {"opt.prof_prefix", P, '-', false},
    {"opt.prof_active", B, '-', false},
    {"opt.prof_thread_active_init", B, '-', false},
    {"opt.lg_prof_sample", S, '-', false},
    {"opt.prof_accum", B, '-', false},
    {"opt.lg_prof_interval", S, '-', false},
    {"opt.prof_gdump", B, '-', false},
    {"opt.prof_final", B, '-', false},
    {"opt.prof_leak", B, '-', false},
    {"opt.prof_leak_error", B, '-', false},
    {"opt.zero_realloc", P, 'r', true},
    {"thread.arena", U, 'b', false},
    {"thread.allocated", Q, 'r', false},
    {"thread.allocatedp", P, 'r', false},
    {"thread.deallocated", Q, 'r', false},
    {"thread.deallocatedp", P, 'r', false},
    {"thread.peak.read", Q, 'r', false},
    {"thread.peak.reset", 0, 'x', false},
    {"thread.tcache.enabled", B, 'b', false},
    {"thread.tcache.flush", 0, 'x', false},
    {"thread.idle", 0, 'x', false},
    {"tcache.create", U, 'c', false},
    {"tcache.flush", U, 'w', false},
    {"tcache.destroy", U, 'w', false},
    {"arena.0.initialized", B, 'r', false},
    {"arena.0.decay", 0, 'x', false},
    {"arena.0.purge", 0, 'x', false},
    {"arena.4096.decay", 0, 'x', false},
    {"arena.4096.purge", 0, 'x', false},
    {"arena.0.dss", P, 'b', true},
    {"arena.0.dirty_decay_ms", S, 'b', false},
    {"arena.0.muzzy_decay_ms", S, 'b', false},
    {"arena.0.retain_grow_limit", S, 'b', false},
#ifndef REFERENCE
    {"arena.0.extent_hooks", P, 'm', false},
#endif
    {"arenas.narenas", U, 'r', false},
    {"arenas.dirty_decay_ms", S, 'b', false},
    {"arenas.muzzy_decay_ms", S, 'b', false},
    {"arenas.quantum", S, 'r', false},
    {"arenas.page", S, 'r', false},
    {"arenas.tcache_max", S, 'r', false},
    {"arenas.nbins", U, 'r', false},
    {"arenas.nhbins", U, 'r', false},
    {"arenas.bin.0.size", S, 'r', false},
    {"arenas.bin.0.nregs", 4, 'r', false},
    {"arenas.bin.0.slab_size", S, 'r', false},
    {"arenas.bin.0.nshards", 4, 'r', false},
    {"arenas.nlextents", U, 'r', false},
    {"arenas.lextent.0.size", S, 'r', false},
    {"arenas.create", U, 'c', false},
    {"arenas.lookup", U, 'l', false},
    {"prof.thread_active_init", B, '-', false},
    {"prof.active", B, '-', false},
    {"prof.gdump", B, '-', false},
    {"prof.lg_sample", S, '-', false},
    {"prof.interval", Q, '-', false},
    {"thread.prof.active", B, '-', false},
    {"thread.prof.name", P, '-', false},
    {"stats.allocated", S, 'r', false},
    {"stats.active", S, 'r', false},
    {"stats.metadata", S, 'r', false},
    {"stats.metadata_thp", S, 'r', false},
    {"stats.resident", S, 'r', false},
    {"stats.mapped", S, 'r', false},
    {"stats.retained", S, 'r', false},
    {"stats.zero_reallocs", S, 'r', false},
    {"stats.background_thread.num_threads", S, 'r', false},
    {"stats.background_thread.num_runs", Q, 'r', false},
    {"stats.background_thread.run_interval", Q, 'r', false},
    {"stats.mutexes.ctl.num_ops", Q, 'r', false},
    {"stats.mutexes.background_thread.num_spin_acq", Q, 'r', false},
    {"stats.mutexes.prof.num_wait", Q, 'r', false},
    {"stats.mutexes.ctl.max_wait_time", Q, 'r', false},
    {"stats.mutexes.ctl.total_wait_time", Q, 'r', false},
    {"stats.mutexes.ctl.max_num_thds", 4, 'r', false},
    {"stats.mutexes.ctl.num_owner_switch", Q, 'r', false},
    {"stats.arenas.0.dss", P, 'r', true},
    {"stats.arenas.0.dirty_decay_ms", S, 'r', false},
    {"stats.arenas.0.muzzy_decay_ms", S, 'r', false},
    {"stats.arenas.0.nthreads", U, 'r', false},
    {"stats.arenas.0.uptime", Q, 'r', false},
    {"stats.arenas.0.pactive", S, 'r', false},
    {"stats.arenas.0.pdirty", S, 'r', false},
    {"stats.arenas.0.pmuzzy", S, 'r', false},
    {"stats.arenas.0.mapped", S, 'r', false},
    {"stats.arenas.0.retained", S, 'r', false},
    {"stats.arenas.0.extent_avail", S, 'r', false},
    {"stats.arenas.0.base", S, 'r', false},
    {"stats.arenas.0.internal", S, 'r', false},
    {"stats.arenas.0.metadata_thp", S, 'r', false},
    {"stats.arenas.0.resident", S, 'r', false},
    {"stats.arenas.0.dirty_npurge", Q, 'r', false},
    {"stats.arenas.0.dirty_nmadvise", Q, 'r', false},
    {"stats.arenas.0.dirty_purged", Q, 'r', false},
    {"stats.arenas.0.muzzy_npurge", Q, 'r', false},
    {"stats.arenas.0.muzzy_nmadvise", Q, 'r', false},
    {"stats.arenas.0.muzzy_purged", Q, 'r', false},
    {"stats.arenas.0.tcache_bytes", S, 'r', false},
    {"stats.arenas.0.abandoned_vm", S, 'r', false},
    {"stats.arenas.0.hpa_sec_bytes", S, 'r', false},
    {"stats.arenas.0.small.allocated", S, 'r', false},
    {"stats.arenas.0.small.nmalloc", Q, 'r', false},
    {"stats.arenas.0.small.ndalloc", Q, 'r', false},
    {"stats.arenas.0.small.nrequests", Q, 'r', false},
    {"stats.arenas.0.small.nfills", Q, 'r', false},
    {"stats.arenas.0.small.nflushes", Q, 'r', false},
    {"stats.arenas.0.large.allocated", S, 'r', false},
    {"stats.arenas.0.large.nmalloc", Q, 'r', false},
    {"stats.arenas.0.large.ndalloc", Q, 'r', false},
    {"stats.arenas.0.large.nrequests", Q, 'r', false},
    {"stats.arenas.0.large.nfills", Q, 'r', false},
    {"stats.arenas.0.large.nflushes", Q, 'r', false},
    {"stats.arenas.0.bins.0.nmalloc", Q, 'r', false},
    {"stats.arenas.0.bins.0.ndalloc", Q, 'r', false},
    {"stats.arenas.0.bins.0.nrequests", Q, 'r', false},
    {"stats.arenas.0.bins.0.curregs", S, 'r', false},
    {"stats.arenas.0.bins.0.nfills", Q, 'r', false},
    {"stats.arenas.0.bins.0.nflushes", Q, 'r', false},
    {"stats.arenas.0.bins.0.nslabs", Q, 'r', false},
    {"stats.arenas.0.bins.0.nreslabs", Q, 'r', false},
    {"stats.arenas.0.bins.0.curslabs", S, 'r', false},
    {"stats.arenas.0.bins.0.nonfull_slabs", S, 'r', false},
    {"stats.arenas.0.bins.0.mutex.num_ops", Q, 'r', false},
    {"stats.arenas.0.bins.0.mutex.max_num_thds", 4, 'r', false},
    {"stats.arenas.0.extents.0.ndirty", S, 'r', false},
    {"stats.arenas.0.extents.0.nmuzzy", S, 'r', false},
    {"stats.arenas.0.extents.0.nretained", S, 'r', false},
    {"stats.arenas.0.extents.0.dirty_bytes", S, 'r', false},
    {"stats.arenas.0.extents.0.muzzy_bytes", S, 'r', false},
    {"stats.arenas.0.extents.0.retained_bytes", S, 'r', false},
    {"stats.arenas.0.lextents.0.nmalloc", Q, 'r', false},
    {"stats.arenas.0.lextents.0.ndalloc", Q, 'r', false},
    {"stats.arenas.0.lextents.0.nrequests", Q, 'r', false},
    {"stats.arenas.0.lextents.0.curlextents", S, 'r', false},
    {"stats.arenas.0.mutexes.large.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.extent_avail.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.extents_dirty.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.extents_muzzy.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.extents_retained.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.decay_dirty.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.decay_muzzy.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.base.num_ops", Q, 'r', false},
    {"stats.arenas.0.mutexes.tcache_list.num_ops", Q, 'r', false},
    {"stats.arenas.0.hpa_shard.npurge_passes", Q, 'r', false},
    {"stats.arenas.0.hpa_shard.full_slabs.npageslabs_huge", S, 'r', false},
    {"stats.arenas.0.hpa_shard.empty_slabs.ndirty_nonhuge", S, 'r', false},
    {"stats.arenas.0.hpa_shard.nonfull_slabs.63.nactive_huge", S, 'r', false},
#ifndef REFERENCE
    {"arenas.hugepage", S, 'r', false},
    {"thermalloc.version", P, 'r', true},
    {"thermalloc.options.hot_window_ms", S, 'b', false},
    {"thermalloc.options.dirty_decay_ms", S, 'b', false},
    {"thermalloc.options.cpu_cache_bytes", S, 'b', false},
    {"thermalloc.options.limit_percent", U, 'b', false},
    {"thermalloc.options.strip_deepbind", B, 'b', false},
    {"thermalloc.options.thp", P, 'r', true},
    {"thermalloc.options.trace_file", P, 'r', true},
    {"thermalloc.options.narenas", U, 'r', false},
    {"thermalloc.stats.allocated_bytes", Q, 'r', false},
    {"thermalloc.stats.resident_measured_bytes", Q, 'r', false},
#endif
};

static char what[256];
#define CHECK_OF(n, condition)                                          \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "mallctl.c:%d: %s: %s\n", __LINE__, n, #condition); \
      exit(1);                                                          \
    }                                                                   \
  } while (0)
#define CHECK(condition) CHECK_OF("false", condition)

static void refuses_writes(const struct name *n) {
  char value[16] = {0};
  size_t len = n->size;
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, value, n->size) == EPERM);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, NULL, 1) == EPERM);
  CHECK_OF(n->name, ctl(n->name, value, &len, value, n->size) == EPERM);
}

static void reads(const struct name *n) {
  char value[32], again[32];
  memset(value, 0xa5, sizeof value);
  size_t len = n->size;
  CHECK_OF(n->name, ctl(n->name, value, &len, NULL, 0) == 0);
  CHECK_OF(n->name, len == n->size);
  for (size_t i = len; i < sizeof value; i++) CHECK_OF(n->name, value[i] == (char)0xa5);

  size_t mib[8], depth = 8;
  CHECK_OF(n->name, to_mib(n->name, mib, &depth) == 0);
  CHECK_OF(n->name, by_mib(mib, depth, again, &len, NULL, 0) == 0);

  /* Another size: as much as fits, and EINVAL. */
  len = n->size - 1;
  memset(again, 0xa5, sizeof again);
  CHECK_OF(n->name, ctl(n->name, again, &len, NULL, 0) == EINVAL);
  CHECK_OF(n->name, len == n->size - 1 && again[len] == (char)0xa5);
  len = n->size + 1;
  CHECK_OF(n->name, ctl(n->name, again, &len, NULL, 0) == EINVAL);
  CHECK_OF(n->name, len == n->size && again[len] == (char)0xa5);
  /* Nothing to read to. */
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, NULL, 0) == 0);
  if (n->is_text) {
    const char *text;
    memcpy(&text, value, sizeof text);
    for (const char *p = text; *p; p++) CHECK_OF(n->name, isprint((unsigned char)*p));
  }
}

static void writes(const struct name *n) {
  char value[16], after[16];
  size_t len = n->size;
  CHECK_OF(n->name, ctl(n->name, value, &len, NULL, 0) == 0);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, value, n->size + 1) == EINVAL);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, value, n->size - 1) == EINVAL);
  int refused = n->access == 'm' ? EPERM : 0;
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, value, n->size) == refused);
  CHECK_OF(n->name, ctl(n->name, after, &len, NULL, 0) == 0);
  CHECK_OF(n->name, memcmp(value, after, len) == 0);
}

static void runs(const struct name *n) {
  char value[8];
  size_t len = sizeof value;
  CHECK_OF(n->name, ctl(n->name, value, &len, NULL, 0) == EPERM);
  CHECK_OF(n->name, ctl(n->name, NULL, &len, NULL, 0) == EPERM);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, value, 1) == EPERM);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, NULL, 0) == 0);
}

static void only_writes(const struct name *n) {
  unsigned value = 0;
  size_t len = sizeof value;
  CHECK_OF(n->name, ctl(n->name, &value, &len, NULL, 0) == EPERM);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, NULL, 0) == EINVAL);
  CHECK_OF(n->name, ctl(n->name, NULL, NULL, &value, 2) == EINVAL);
}

static void creates(const struct name *n) {
  unsigned value = 0;
  size_t len = 2;
  CHECK_OF(n->name, ctl(n->name, &value, &len, NULL, 0) == EINVAL && len == 0);
  len = sizeof value;
  CHECK_OF(n->name, ctl(n->name, NULL, &len, NULL, 0) == EINVAL && len == 0);
}

static void every_name(void) {
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const struct name *n = &names[i];
    char value[16];
    size_t len = n->size;
    size_t mib[8], depth = 8;
    CHECK_OF(n->name, to_mib(n->name, mib, &depth) == 0);
    switch (n->access) {
      case '-':
        if (ctl(n->name, value, &len, NULL, 0) == ENOENT) {
          CHECK_OF(n->name, by_mib(mib, depth, value, &len, NULL, 0) == ENOENT);
          break;
        }
        reads(n);
        break;
      case 'r': reads(n); refuses_writes(n); break;
      case 'b': case 'm': reads(n); writes(n); break;
      case 'x': runs(n); break;
      case 'w': only_writes(n); break;
      case 'c': creates(n); break;
#ifndef REFERENCE
      case 'l': CHECK_OF(n->name, ctl(n->name, value, &len, NULL, 0) == EINVAL); break;
#endif
    }
  }
}

static void unknown_names(void) {
  static const char *const unknown[] = {
      "", ".", "..", "x", "version.", "version.x", ".version", "stat", "stats", "stats.", "stats.arenas",
      "stats.arenas.0", "stats.arenas.x.pactive", "stats.arenas.99999.pactive", "stats.arenas..pactive",
      "arena", "arena.0", "arena.-1.purge", "arena.999999.purge", "arena.18446744073709551616.purge",
      "arena.99999999999999999999999999.purge", "arenas.bin.9999.size", "arenas.bin.x.size", "arenas.bin..size",
      "arenas.lextent.9999.size", "opt", "opt.colour", "thread.tcache", "prof.stats.x", "experimental",
      "experimental.nothing", "config", "config.nothing.at.all.of.this.many.parts.in.a.name",
      "stats.arenas.0.bins.9999.nmalloc", "stats.arenas.0.lextents.9999.nmalloc", "a.b.c.d.e.f.g.h.i.j.k",
      "stats.arenas.0.hpa_shard.nonfull_slabs.64.nactive_huge", "EPOCH", "epoch ", " epoch", "epoch\n",
#ifndef REFERENCE
      "thermalloc", "thermalloc.stats", "thermalloc.stats.colour", "thermalloc.options.0",
      "experimental.utilization.query", "experimental.hooks.install", "experimental.batch_alloc", "arenas.bin.72.size",
#endif
  };
  char value[64];
  for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
    size_t len = 8;
    CHECK_OF(unknown[i], ctl(unknown[i], value, &len, NULL, 0) == ENOENT);
    CHECK_OF(unknown[i], ctl(unknown[i], NULL, NULL, value, 8) == ENOENT);
  }
  size_t mib[8], depth = 8;
  CHECK(to_mib("stats.arenas.0.nothing", mib, &depth) == ENOENT);
  /* A beginning of a name has indices, and is none. */
  depth = 8;
  CHECK(to_mib("stats.arenas", mib, &depth) == 0 && depth == 2);
  CHECK(by_mib(mib, depth, NULL, NULL, NULL, 0) == ENOENT);
  depth = 2;
  CHECK(to_mib("stats.allocated", mib, &depth) == 0 && depth == 2);
  depth = 1;
  CHECK(to_mib("stats.allocated", mib, &depth) == 0 && depth == 1);
  size_t wild[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (size_t i = 0; i < 64; i++) {
    for (size_t j = 0; j < 64; j++) {
      wild[0] = i;
      wild[1] = j;
      if (i > 15) CHECK(by_mib(wild, 2, NULL, NULL, NULL, 0) == ENOENT);
    }
  }
  wild[0] = SIZE_MAX;
  CHECK(by_mib(wild, 1, NULL, NULL, NULL, 0) == ENOENT);
}

static uint64_t get_u64(const char *name) {
  uint64_t v = 0;
  size_t len = sizeof v;
  CHECK_OF(name, ctl(name, &v, &len, NULL, 0) == 0);
  return v;
}
static size_t get_size(const char *name) {
  size_t v = 0, len = sizeof v;
  CHECK_OF(name, ctl(name, &v, &len, NULL, 0) == 0);
  return v;
}
static unsigned get_unsigned(const char *name) {
  unsigned v = 0;
  size_t len = sizeof v;
  CHECK_OF(name, ctl(name, &v, &len, NULL, 0) == 0);
  return v;
}
static bool get_bool(const char *name) {
  bool v;
  size_t len = sizeof v;
  CHECK_OF(name, ctl(name, &v, &len, NULL, 0) == 0);
  return v;
}
static const char *get_text(const char *name) {
  const char *v = NULL;
  size_t len = sizeof v;
  CHECK_OF(name, ctl(name, &v, &len, NULL, 0) == 0);
  return v;
}
static void advance(void) {
  uint64_t e = 1;
  CHECK(ctl("epoch", NULL, NULL, &e, sizeof e) == 0);
}
static const char *of(unsigned arena, const char *rest) {
  static char name[128];
  snprintf(name, sizeof name, "%s%u.%s", rest[0] == '!' ? "arena." : "stats.arenas.", arena,
           rest + (rest[0] == '!'));
  return name;
}

static char *kept_by_profiler;

static void epochs(void) {
  advance();
  uint64_t before = get_u64("epoch"), set = 77, seen = 0;
  size_t len = sizeof seen;
  size_t allocated = get_size("stats.allocated");
  char *p = malloc(32 << 20);
  memset(p, 1, 32 << 20);
  CHECK(get_size("stats.allocated") == allocated); /* of the same moment still */
  CHECK(ctl("epoch", &seen, &len, &set, sizeof set) == 0);
  CHECK(seen == before + 1 && get_u64("epoch") == seen);
  CHECK(get_size("stats.allocated") >= allocated + (32 << 20));
  CHECK(ctl("epoch", NULL, NULL, &set, 4) == EINVAL);
  len = 4;
  CHECK(ctl("epoch", &seen, &len, NULL, 0) == EINVAL && len == 4);
  free(p);
}

static void values(void) {
  CHECK(strncmp(get_text("version"), "5.3.0-", 6) == 0);
  CHECK(get_bool("config.stats"));
  CHECK(get_bool("config.prof") == (ctl("opt.prof", NULL, NULL, NULL, 0) == 0));
  CHECK(get_size("arenas.page") == 4096 || get_size("arenas.page") % 4096 == 0);
  CHECK(get_size("arenas.quantum") == 16);
  CHECK(get_unsigned("opt.narenas") >= 1 && get_unsigned("arenas.narenas") >= 1);
  CHECK(get_unsigned("arenas.nhbins") >= get_unsigned("arenas.nbins"));
  CHECK(get_bool("arena.0.initialized"));
  CHECK(get_bool("arena.4096.initialized"));
  CHECK(strcmp(get_text("opt.dss"), "disabled") == 0 || strcmp(get_text("opt.dss"), "secondary") == 0);
  CHECK(get_unsigned("arenas.nlextents") > 0);

  /* Sizes rise, and are those of blocks. */
  size_t last = 0, mib[4], depth = 4, page = get_size("arenas.page");
  unsigned nbins = get_unsigned("arenas.nbins"), nlextents = get_unsigned("arenas.nlextents");
  CHECK(to_mib("arenas.bin.0.size", mib, &depth) == 0 && depth == 4);
  for (unsigned i = 0; i < nbins; i++) {
    size_t size, len = sizeof size;
    mib[2] = i;
    CHECK(by_mib(mib, depth, &size, &len, NULL, 0) == 0);
    CHECK(size > last);
    last = size;
    void *p = malloc(size);
    CHECK(((uintptr_t)p & 7) == 0);
    free(p);
    snprintf(what, sizeof what, "arenas.bin.%u.nregs", i);
    unsigned nregs = get_unsigned(what);
    snprintf(what, sizeof what, "arenas.bin.%u.slab_size", i);
    size_t slab = get_size(what);
    CHECK(nregs >= 1 && slab % page == 0 && nregs * size <= slab);
  }
  CHECK(to_mib("arenas.lextent.0.size", mib, &depth) == 0 && depth == 4);
  for (unsigned i = 0; i < nlextents; i++) {
    size_t size, len = sizeof size;
    mib[2] = i;
    CHECK(by_mib(mib, depth, &size, &len, NULL, 0) == 0);
    CHECK(size > last && size % page == 0);
    last = size;
  }
}

/* Run with the option prof:true as well. */
static void profiler(void) {
  if (!get_bool("config.prof")) return;
  static const char *const switches[] = {"prof.active", "prof.gdump", "thread.prof.active"};
  bool on = get_bool("opt.prof"), yes = true, no = false, old = false;
  size_t len = sizeof old, lg_sample = 3;
  const char *path = getenv("HEAP_FILE");
  if (!on) {
    for (int i = 0; i < 3; i++) {
      CHECK_OF(switches[i], !get_bool(switches[i]));
      CHECK_OF(switches[i], ctl(switches[i], NULL, NULL, &yes, sizeof yes) == ENOENT);
    }
    CHECK(ctl("prof.active", NULL, NULL, &no, sizeof no) == 0);
    CHECK(ctl("prof.dump", NULL, NULL, NULL, 0) == ENOENT);
    CHECK(ctl("prof.reset", NULL, NULL, NULL, 0) == ENOENT);
    CHECK(get_u64("prof.interval") == 0);
    return;
  }
  CHECK(get_bool("prof.active") && get_bool("thread.prof.active") && !get_bool("prof.gdump"));
  for (int i = 0; i < 3; i++) {
    bool was = get_bool(switches[i]), other = !was;
    CHECK_OF(switches[i], ctl(switches[i], &old, &len, &other, sizeof other) == 0 && old == was);
    CHECK_OF(switches[i], get_bool(switches[i]) == other);
    CHECK_OF(switches[i], ctl(switches[i], NULL, NULL, &was, sizeof was) == 0);
  }
  CHECK(get_size("prof.lg_sample") == get_size("opt.lg_prof_sample"));
  CHECK(strcmp(get_text("opt.prof_prefix"), "heaps") == 0);
  CHECK(ctl("prof.reset", &lg_sample, &len, NULL, 0) == EPERM);
  CHECK(ctl("prof.reset", NULL, NULL, &lg_sample, 4) == EINVAL);
  CHECK(ctl("prof.reset", NULL, NULL, &lg_sample, sizeof lg_sample) == 0);
  CHECK(get_size("prof.lg_sample") == 3);
  memset(kept_by_profiler = malloc(64 << 20), 1, 64 << 20);
  len = sizeof path;
  CHECK(ctl("prof.dump", &path, &len, NULL, 0) == EPERM);
  const char *nowhere = "/nonexistent/heap";
  CHECK(ctl("prof.dump", NULL, NULL, &nowhere, sizeof nowhere) == EFAULT);
  CHECK(path && ctl("prof.dump", NULL, NULL, &path, sizeof path) == 0);
  FILE *heap = fopen(path, "r");
  CHECK(heap != NULL);
  int version = 0;
  double bytes = 0;
  CHECK(fscanf(heap, "heap_v2/%d t*: %*f: %lf", &version, &bytes) == 2 && bytes >= 64 << 20);
  fclose(heap);
}

static void sums(void) {
  static void *kept[3000];
  for (int i = 0; i < 3000; i++) memset(kept[i] = malloc(i * 97 + 1), 1, i * 97 + 1);
  for (int i = 0; i < 3000; i += 3) free(kept[i]);
  advance();
  size_t allocated = get_size("stats.allocated"), active = get_size("stats.active"),
         mapped = get_size("stats.mapped"), resident = get_size("stats.resident"),
         page = get_size("arenas.page");
  CHECK(allocated > 100 << 20 && allocated <= active && active <= mapped && active <= resident);
  CHECK(active % page == 0);
  /* All arenas together are what they are one by one. */
  size_t pactive = 0, small = 0, large = 0, regs = 0, slabs = 0, large_by_size = 0;
  unsigned narenas = get_unsigned("arenas.narenas"), nbins = get_unsigned("arenas.nbins");
  for (unsigned i = 0; i < narenas; i++) {
    if (!get_bool(of(i, "!initialized"))) {
      size_t v, len = sizeof v;
      CHECK(ctl(of(i, "pactive"), &v, &len, NULL, 0) == ENOENT);
      continue;
    }
    pactive += get_size(of(i, "pactive"));
    small += get_size(of(i, "small.allocated"));
    large += get_size(of(i, "large.allocated"));
    for (unsigned j = 0; j < nbins; j++) {
      snprintf(what, sizeof what, "stats.arenas.%u.bins.%u.curregs", i, j);
      regs += get_size(what);
      snprintf(what, sizeof what, "stats.arenas.%u.bins.%u.curslabs", i, j);
      slabs += get_size(what);
    }
  }
  CHECK(pactive == get_size("stats.arenas.4096.pactive"));
  CHECK(pactive * page == active);
  CHECK(small == get_size("stats.arenas.4096.small.allocated"));
  CHECK(large == get_size("stats.arenas.4096.large.allocated"));
  CHECK(small + large >= allocated && small + large <= active);
  size_t all_regs = 0, all_slabs = 0, by_size = 0;
  for (unsigned j = 0; j < nbins; j++) {
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.curregs", j);
    size_t curregs = get_size(what);
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.curslabs", j);
    size_t curslabs = get_size(what);
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.nmalloc", j);
    uint64_t nmalloc = get_u64(what);
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.ndalloc", j);
    CHECK(nmalloc - get_u64(what) == curregs);
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.nslabs", j);
    CHECK(get_u64(what) >= curslabs);
    snprintf(what, sizeof what, "stats.arenas.4096.bins.%u.nonfull_slabs", j);
    CHECK(get_size(what) <= curslabs);
    snprintf(what, sizeof what, "arenas.bin.%u.nregs", j);
    CHECK(curregs <= curslabs * get_unsigned(what));
    snprintf(what, sizeof what, "arenas.bin.%u.size", j);
    by_size += curregs * get_size(what);
    all_regs += curregs;
    all_slabs += curslabs;
  }
  CHECK(all_regs == regs && all_slabs == slabs && by_size == small);
  for (unsigned j = 0; j < get_unsigned("arenas.nlextents"); j++) {
    snprintf(what, sizeof what, "stats.arenas.4096.lextents.%u.curlextents", j);
    large_by_size += get_size(what);
  }
  CHECK(large_by_size >= 1000);
  for (int i = 0; i < 3000; i++)
    if (i % 3) free(kept[i]);
}

static void all_arenas(void) {
  size_t mib[3], depth = 3;
  unsigned narenas = get_unsigned("arenas.narenas");
  CHECK(to_mib("arena.0.purge", mib, &depth) == 0 && depth == 3);
  char *p = malloc(64 << 20);
  memset(p, 1, 64 << 20);
  free(p);
  mib[1] = narenas; /* one past the last means all */
  CHECK(by_mib(mib, depth, NULL, NULL, NULL, 0) == 0);
  advance();
  CHECK(get_size("stats.arenas.4096.pdirty") == 0);
  mib[1] = ALL;
  CHECK(by_mib(mib, depth, NULL, NULL, NULL, 0) == 0);
  mib[1] = narenas + 1;
  CHECK(by_mib(mib, depth, NULL, NULL, NULL, 0) == ENOENT);
  mib[1] = SIZE_MAX;
  CHECK(by_mib(mib, depth, NULL, NULL, NULL, 0) == ENOENT);
  snprintf(what, sizeof what, "stats.arenas.%u.pactive", narenas);
  CHECK(get_size(what) == get_size("stats.arenas.4096.pactive"));
  /* The automatic ones stay. */
  CHECK(ctl("arena.0.reset", NULL, NULL, NULL, 0) == EFAULT);
  CHECK(ctl("arena.0.destroy", NULL, NULL, NULL, 0) == EFAULT);
}

static void explicit_arenas(void) {
  unsigned before = get_unsigned("arenas.narenas"), a = 0, found = 0;
  size_t len = sizeof a;
  CHECK(ctl("arenas.create", &a, &len, NULL, 0) == 0);
  CHECK(a >= before && get_unsigned("arenas.narenas") == a + 1);
  advance();
  CHECK(get_bool(of(a, "!initialized")));
  void *hooks = NULL;
#ifndef REFERENCE
  hooks = &len;
  CHECK(ctl("arenas.create", &found, &len, &hooks, sizeof hooks) == EPERM);
  len = sizeof hooks;
  CHECK(ctl(of(a, "!extent_hooks"), &hooks, &len, NULL, 0) == 0 && hooks != NULL);
  CHECK(ctl(of(a, "!extent_hooks"), NULL, NULL, &hooks, sizeof hooks) == EPERM);
  char name[32], *to = name;
  len = sizeof to;
  CHECK(ctl(of(a, "!name"), &to, &len, NULL, 0) == 0);
  snprintf(what, sizeof what, "manual_%u", a);
  CHECK(strcmp(name, what) == 0);
  const char *new_name = "a name of more than thirty-two characters";
  CHECK(ctl(of(a, "!name"), NULL, NULL, &new_name, sizeof new_name) == 0);
  CHECK(ctl(of(a, "!name"), &to, &len, NULL, 0) == 0);
  CHECK(strlen(name) == 31 && strncmp(name, new_name, 31) == 0);
  len = 4;
  CHECK(ctl(of(a, "!name"), &to, &len, NULL, 0) == EINVAL);
#endif
  (void)hooks;

  char *p = mallocx_(3 << 20, ARENA(a) | TCACHE_NONE), *q = mallocx_(100, ARENA(a) | TCACHE_NONE),
       *other = malloc(100);
  memset(p, 1, 3 << 20);
  len = sizeof found;
  CHECK(ctl("arenas.lookup", &found, &len, &p, sizeof p) == 0 && found == a);
  CHECK(ctl("arenas.lookup", &found, &len, &q, sizeof q) == 0 && found == a);
  CHECK(ctl("arenas.lookup", &found, &len, &other, sizeof other) == 0 && found != a);
#ifndef REFERENCE
  void *none = &found;
  CHECK(ctl("arenas.lookup", &found, &len, &none, sizeof none) == EINVAL);
  CHECK(ctl("arenas.lookup", &found, &len, &none, 4) == EINVAL);
#endif
  advance();
  CHECK(get_size(of(a, "large.allocated")) >= 3 << 20);
  CHECK(get_size(of(a, "small.allocated")) >= 100);
  CHECK(get_size(of(a, "pactive")) * 4096 >= 3 << 20);
  sums();

  /* Its own decay times; those of the others stay. */
  ssize_t ms = 123, old = 0, all = (ssize_t)get_size("arenas.dirty_decay_ms");
  len = sizeof old;
  CHECK(ctl(of(a, "!dirty_decay_ms"), &old, &len, &ms, sizeof ms) == 0);
  CHECK(old == all);
  CHECK((ssize_t)get_size(of(a, "!dirty_decay_ms")) == 123);
  CHECK((ssize_t)get_size("arenas.dirty_decay_ms") == all);
  ms = -2;
  CHECK(ctl(of(a, "!dirty_decay_ms"), NULL, NULL, &ms, sizeof ms) == EFAULT);
  CHECK(ctl("arenas.dirty_decay_ms", NULL, NULL, &ms, sizeof ms) == EFAULT);
  CHECK((ssize_t)get_size(of(a, "!dirty_decay_ms")) == 123);
  ms = -1;
  CHECK(ctl(of(a, "!muzzy_decay_ms"), NULL, NULL, &ms, sizeof ms) == 0);
  CHECK((ssize_t)get_size(of(a, "!muzzy_decay_ms")) == -1);
  CHECK(ctl("arena.4096.dirty_decay_ms", NULL, NULL, &ms, sizeof ms) == EFAULT);

  CHECK(ctl(of(a, "!reset"), NULL, NULL, NULL, 0) == 0);
  advance();
  CHECK(get_size(of(a, "large.allocated")) == 0 && get_size(of(a, "small.allocated")) == 0);
  CHECK(ctl(of(a, "!destroy"), NULL, NULL, NULL, 0) == 0);
  CHECK(!get_bool(of(a, "!initialized")));
  CHECK(ctl(of(a, "!destroy"), NULL, NULL, NULL, 0) == EFAULT);
  CHECK(get_bool("arena.4097.initialized"));
  advance();
  CHECK(get_u64("stats.arenas.4097.large.nmalloc") >= 1);
  len = sizeof found;
  CHECK(ctl(of(a, "nthreads"), &found, &len, NULL, 0) == ENOENT);
  CHECK(ctl("arenas.create", &found, &len, NULL, 0) == 0 && found == a); /* the index is used again */
  free(other);
}

static void *bound_thread(void *arena) {
  unsigned a = *(unsigned *)arena, old = 0, found = 0;
  size_t len = sizeof old;
  CHECK(ctl("thread.arena", &old, &len, &a, sizeof a) == 0);
  CHECK(old != a && get_unsigned("thread.arena") == a);
  char *p = malloc(1 << 20);
  memset(p, 1, 1 << 20);
  CHECK(ctl("arenas.lookup", &found, &len, &p, sizeof p) == 0 && found == a);
  advance();
  CHECK(get_unsigned(of(a, "nthreads")) == 1);
  CHECK(ctl(of(a, "!destroy"), NULL, NULL, NULL, 0) == EFAULT);
  free(p);
  unsigned none = get_unsigned("arenas.narenas");
  CHECK(ctl("thread.arena", NULL, NULL, &none, sizeof none) == EFAULT);
  CHECK(get_unsigned("thread.arena") == a);
  return NULL;
}

static void *counting_thread(void *unused) {
  uint64_t *allocated, *deallocated;
  size_t len = sizeof allocated;
  CHECK(ctl("thread.allocatedp", &allocated, &len, NULL, 0) == 0);
  CHECK(ctl("thread.deallocatedp", &deallocated, &len, NULL, 0) == 0);
  CHECK(*allocated == get_u64("thread.allocated") && *deallocated == get_u64("thread.deallocated"));
  uint64_t a = *allocated, d = *deallocated;
  CHECK(ctl("thread.peak.reset", NULL, NULL, NULL, 0) == 0);
  char *p = malloc(5 << 20), *q = malloc(1000);
  memset(p, 1, 5 << 20);
  memset(q, 1, 1000);
  CHECK(*allocated - a >= (5 << 20) + 1000 && *allocated - a < 6 << 20);
  CHECK(*allocated == get_u64("thread.allocated"));
  free(p);
  CHECK(*deallocated - d >= 5 << 20 && *deallocated - d < 6 << 20);
  CHECK(*deallocated == get_u64("thread.deallocated"));
  CHECK(get_u64("thread.peak.read") >= 5 << 20);
  CHECK(ctl("thread.peak.reset", NULL, NULL, NULL, 0) == 0);
  CHECK(get_u64("thread.peak.read") < 5 << 20);
  free(q);
  return unused;
}

static void *cacheless_thread(void *unused) {
  bool off = false, old = false;
  size_t len = sizeof old;
  CHECK(ctl("thread.tcache.enabled", &old, &len, &off, sizeof off) == 0 && old);
  CHECK(!get_bool("thread.tcache.enabled"));
  char *blocks[100];
  for (int i = 0; i < 100; i++) memset(blocks[i] = malloc(200), i, 200);
  for (int i = 0; i < 100; i++) free(blocks[i]);
  CHECK(ctl("thread.tcache.flush", NULL, NULL, NULL, 0) == EFAULT || 1);
  bool on = true;
  CHECK(ctl("thread.tcache.enabled", NULL, NULL, &on, sizeof on) == 0);
  CHECK(get_bool("thread.tcache.enabled"));
  CHECK(ctl("thread.idle", NULL, NULL, NULL, 0) == 0);
  return unused;
}

static void in_thread(void *(*f)(void *), void *arg) {
  pthread_t t;
  CHECK(pthread_create(&t, NULL, f, arg) == 0);
  CHECK(pthread_join(t, NULL) == 0);
}

static void threads(void) {
  unsigned a;
  size_t len = sizeof a;
  CHECK(ctl("arenas.create", &a, &len, NULL, 0) == 0);
  in_thread(bound_thread, &a);
  CHECK(ctl(of(a, "!destroy"), NULL, NULL, NULL, 0) == 0);
  in_thread(counting_thread, NULL);
  in_thread(cacheless_thread, NULL);
}

static void caches(void) {
  unsigned t[3];
  for (int i = 0; i < 3; i++) {
    size_t len = sizeof *t;
    CHECK(ctl("tcache.create", &t[i], &len, NULL, 0) == 0);
    for (int j = 0; j < i; j++) CHECK(t[i] != t[j]);
  }
  size_t len = sizeof *t;
  CHECK(ctl("tcache.create", &t[0], &len, &t[0], sizeof *t) == EPERM);
  void *p = mallocx_(64, TCACHE(t[1]));
  memset(p, 1, 64);
  dallocx_(p, TCACHE(t[1]));
  CHECK(ctl("tcache.flush", NULL, NULL, &t[1], sizeof *t) == 0);
  for (int i = 0; i < 3; i++) CHECK(ctl("tcache.destroy", NULL, NULL, &t[i], sizeof *t) == 0);
  unsigned again;
  CHECK(ctl("tcache.create", &again, &len, NULL, 0) == 0);
  CHECK(again == t[0] || again == t[1] || again == t[2]);
  CHECK(ctl("tcache.destroy", NULL, NULL, &again, sizeof again) == 0);
}

static void options(void) {
  ssize_t old = 0, ms = 4321, back;
  size_t len = sizeof old;
  CHECK(ctl("arenas.dirty_decay_ms", &old, &len, &ms, sizeof ms) == 0);
  CHECK((ssize_t)get_size("arenas.dirty_decay_ms") == 4321);
  CHECK((ssize_t)get_size("opt.dirty_decay_ms") == old); /* as at the start */
  back = old;
  CHECK(ctl("arenas.dirty_decay_ms", NULL, NULL, &back, sizeof back) == 0);
  const char *dss = "nonsense";
  CHECK(ctl("arena.0.dss", NULL, NULL, &dss, sizeof dss) == EINVAL);
  dss = "disabled";
  CHECK(ctl("arena.0.dss", NULL, NULL, &dss, sizeof dss) == 0);
  CHECK(strcmp(get_text("arena.0.dss"), "disabled") == 0);
#ifndef REFERENCE
  size_t window = 3000;
  CHECK(ctl("thermalloc.options.hot_window_ms", NULL, NULL, &window, sizeof window) == 0);
  CHECK(get_size("thermalloc.options.hot_window_ms") == 3000);
  window = 60001;
  CHECK(ctl("thermalloc.options.hot_window_ms", NULL, NULL, &window, sizeof window) == EINVAL);
  CHECK(get_size("thermalloc.options.hot_window_ms") == 3000);
  CHECK(ctl("thermalloc.options.narenas", NULL, NULL, &len, 4) == EPERM);
  CHECK(strcmp(get_text("thermalloc.options.thp"), "default") == 0);
#endif
  bool off = false, on = true, was;
  len = sizeof was;
  CHECK(ctl("background_thread", &was, &len, &on, sizeof on) == 0);
  CHECK(ctl("background_thread", &was, &len, &off, sizeof off) == 0 && was);
  CHECK(!get_bool("background_thread"));
  CHECK(ctl("background_thread", NULL, NULL, &on, sizeof on) == 0 && get_bool("background_thread"));
}

#ifndef REFERENCE
/* NULLs are errors, and end nothing. */
static void nothing_given(void) {
  size_t mib[8], depth = 8;
  CHECK(ctl(NULL, NULL, NULL, NULL, 0) == EINVAL);
  CHECK(to_mib(NULL, mib, &depth) == EINVAL);
  CHECK(to_mib("epoch", NULL, &depth) == EINVAL);
  CHECK(to_mib("epoch", mib, NULL) == EINVAL);
  CHECK(by_mib(NULL, 1, NULL, NULL, NULL, 0) == EINVAL);
  CHECK(by_mib(mib, 0, NULL, NULL, NULL, 0) == ENOENT);
  CHECK(ctl("tcache.create", NULL, NULL, NULL, 0) == EINVAL);
  CHECK(ctl("arenas.create", NULL, NULL, NULL, 0) == EINVAL);
  CHECK(ctl("arenas.lookup", NULL, NULL, NULL, 0) == EINVAL);
  const char *none = NULL;
  CHECK(ctl("arena.0.dss", NULL, NULL, &none, sizeof none) == EINVAL);
}
#endif

/* Not of one moment: a count. */
static void zero_reallocs(void) {
  advance();
  size_t before = get_size("stats.zero_reallocs");
  CHECK(strcmp(get_text("opt.zero_realloc"), "free") == 0);
  void *p = malloc(10);
  CHECK(CAT(PREFIX, realloc)(p, 0) == NULL);
  advance();
  CHECK(get_size("stats.zero_reallocs") == before + 1);
}

static size_t written;
static char report[16 << 20];
static void collect(void *opaque, const char *piece) {
  CHECK(opaque == &written);
  size_t len = strlen(piece);
  CHECK(written + len < sizeof report);
  memcpy(report + written, piece, len + 1);
  written += len;
}

static void reports(void) {
  static const char *const letters[] = {NULL, "", "J", "Jg", "g", "Jgmdablxeh", "gmdablxeh", "a", "Ja", "b", "x", "?!"};
  for (size_t i = 0; i < sizeof letters / sizeof *letters; i++) {
    const char *l = letters[i] ? letters[i] : "";
    written = 0;
    print(collect, &written, letters[i]);
    CHECK(written > 100 || strlen(l) > 8);
    if (strchr(l, 'J')) {
      CHECK(strncmp(report, "{\"jemalloc\":{", 13) == 0 && report[written - 1] == '}');
      CHECK(strstr(report, "\"stats\":{\"allocated\":") != NULL);
    } else {
      CHECK(strncmp(report, "___ Begin jemalloc statistics ___\n", 34) == 0);
      CHECK(strstr(report, "--- End jemalloc statistics ---\n") == report + written - 32);
      CHECK(strstr(report, "Allocated: ") != NULL);
    }
    CHECK(!strchr(l, 'g') == (strstr(report, strchr(l, 'J') ? "\"opt\":{" : "Run-time option settings") != NULL));
    CHECK(!strchr(l, 'b') == (strstr(report, strchr(l, 'J') ? "\"bins\":[" : "bins:") != NULL) || strlen(l) > 8);
  }
  /* For a JSON reader. */
  written = 0;
  print(collect, &written, "J");
  puts(report);
}

int main(int argc, char **argv) {
  (void)argv;
  profiler();
  if (argc > 1) return 0;
  every_name();
  unknown_names();
  epochs();
  values();
  options();
  sums();
  all_arenas();
  explicit_arenas();
  threads();
  caches();
  zero_reallocs();
#ifndef REFERENCE
  nothing_given();
#endif
  reports();
  return 0;
}
