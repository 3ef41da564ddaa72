/* Forks while threads work in explicit arenas: the child's arenas and caches are whole. */
#include <pthread.h>
#include <sys/wait.h>
#include <thermalloc/jemalloc.h>

#include "check.h"

static unsigned arenas[3], caches[3];
static volatile int stop;

static void *work(void *given) {
  int i = *(int *)given, flags = MALLOCX_ARENA(arenas[i]) | (i ? MALLOCX_TCACHE(caches[i]) : MALLOCX_TCACHE_NONE);
  void *blocks[64] = {0};
  for (unsigned n = 0; !stop; n++) {
    void **block = &blocks[n % 64];
    if (*block) dallocx(*block, flags);
    *block = mallocx(16 + n * 37 % 60000, flags);
    CHECK(*block, "%u", n);
  }
  return NULL;
}

static unsigned owner(void *p) {
  unsigned arena = 0;
  size_t len = sizeof arena;
  CHECK(mallctl("arenas.lookup", &arena, &len, &p, sizeof p) == 0, "lookup");
  return arena;
}

/* The thread that forks is bound in every other round. */
static void bound(unsigned arena) {
  char name[50];
  snprintf(name, sizeof name, "arena.%u.destroy", arena);
  for (int n = 1; n < 1000; n++) {
    void *p = malloc(n * 50);
    CHECK(p && owner(p) == arena, "%u", owner(p));
    free(p);
  }
  CHECK(mallctl(name, NULL, NULL, NULL, 0) == EFAULT, "a thread is bound");
}

static void child(void) {
  for (int i = 0; i < 3; i++)
    for (int n = 1; n < 3000; n++) {
      int flags = MALLOCX_ARENA(arenas[i]) | (n % 2 ? MALLOCX_TCACHE(caches[i]) : MALLOCX_TCACHE_NONE);
      char *p = mallocx(n * 7, flags), *q = malloc(n);
      CHECK(p && q, "%d", n);
      memset(p, 1, n * 7);
      free(q);
      if (n % 3)
        free(p);
      else
        dallocx(p, flags);
    }
  unsigned arena;
  size_t len = sizeof arena;
  CHECK(mallctl("arenas.create", &arena, &len, NULL, 0) == 0, "create");
  CHECK(mallocx(100, MALLOCX_ARENA(arena)), "a new one");
}

int main(void) {
  size_t len = sizeof *arenas;
  pthread_t threads[3];
  static int ids[] = {0, 1, 2};
  for (int i = 0; i < 3; i++) {
    CHECK(mallctl("arenas.create", &arenas[i], &len, NULL, 0) == 0, "arena");
    CHECK(mallctl("tcache.create", &caches[i], &len, NULL, 0) == 0, "cache");
  }
  unsigned automatic, own;
  CHECK(mallctl("arenas.create", &own, &len, NULL, 0) == 0, "arena");
  CHECK(mallctl("thread.arena", &automatic, &len, NULL, 0) == 0, "automatic");
  for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, work, &ids[i]);
  for (int round = 0; round < 60; round++) {
    int is_bound = round % 2;
    CHECK(mallctl("thread.arena", NULL, NULL, is_bound ? &own : &automatic, len) == 0, "bind");
    pid_t pid = fork();
    if (pid == 0) {
      alarm(30);
      if (is_bound) bound(own);
      child();
      _exit(0);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "round %d: %#x", round, status);
  }
  stop = 1;
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  return 0;
}
