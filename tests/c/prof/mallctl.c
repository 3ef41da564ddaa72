/* The profiler by jemalloc's names: what each does, seen by what is recorded. */
#include "prof.h"
#include <pthread.h>
#include <thermalloc/jemalloc.h>

static uint64_t recorded(void) {
  uint64_t epoch = 1, value;
  size_t len = sizeof value;
  CHECK(!mallctl("epoch", NULL, NULL, &epoch, sizeof epoch), "epoch");
  CHECK(!mallctl("thermalloc.stats.prof_blocks", &value, &len, NULL, 0), "stats");
  return value;
}

/* Blocks of so many that are recorded. */
static uint64_t of(int n, size_t size) {
  uint64_t before = recorded();
  for (int i = 0; i < n; i++) free(malloc(size));
  return recorded() - before;
}

static bool set(const char *name, bool on) {
  bool was;
  size_t len = sizeof was;
  CHECK(!mallctl(name, &was, &len, &on, sizeof on), "%s", name);
  return was;
}

static size_t size(const char *name) {
  size_t value;
  size_t len = sizeof value;
  CHECK(!mallctl(name, &value, &len, NULL, 0), "%s", name);
  return value;
}

static void *thread(void *unused) {
  CHECK(of(10, 3 << 20) == 10, "another thread");
  return unused;
}

int main(int argc, char **argv) {
  bool built = false;
  size_t len = sizeof built, lg;
  CHECK(!mallctl("config.prof", &built, &len, NULL, 0) && built, "built");
  CHECK(argc == 2 && size("prof.lg_sample") == 19 && size("opt.lg_prof_sample") == 19, "%zu", size("prof.lg_sample"));
  CHECK(of(10, 3 << 20) == 10, "large ones are all recorded");
  CHECK(set("prof.active", false) && of(10, 3 << 20) == 0, "not active");
  CHECK(!set("prof.active", true) && of(10, 3 << 20) == 10, "active again");
  CHECK(set("thread.prof.active", false) && of(10, 3 << 20) == 0, "not this thread");
  pthread_t t;
  CHECK(!pthread_create(&t, 0, thread, 0) && !pthread_join(t, 0), "thread");
  CHECK(!set("thread.prof.active", true) && of(10, 3 << 20) == 10, "this thread again");
  lg = 0;
  CHECK(!mallctl("prof.reset", NULL, NULL, &lg, sizeof lg) && size("prof.lg_sample") == 0, "reset");
  /* A thread looks at the period once in 2 MiB. */
  free(malloc(3 << 20));
  CHECK(of(1000, 100) == 1000, "all of them");
  lg = 62;
  CHECK(!mallctl("prof.reset", NULL, NULL, &lg, sizeof lg) && size("prof.lg_sample") == 62, "reset");
  CHECK(of(1000, 100) <= 1, "none of them");
  CHECK(!set("prof.gdump", false) && size("prof.interval") == 0, "no dumps by themselves");
  void *kept = malloc(7654321);
  const char *path = argv[1];
  CHECK(!mallctl("prof.dump", NULL, NULL, &path, sizeof path), "dump");
  path = "/nonexistent/x";
  CHECK(mallctl("prof.dump", NULL, NULL, &path, sizeof path) == EFAULT, "no such folder");
  CHECK(!mallctl("prof.dump", NULL, NULL, NULL, 0), "by the prefix");
  free(kept);
  exit(0);
}
