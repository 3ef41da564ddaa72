/* Everything at once: many threads, signals that allocate, forks, a library that comes and goes. */
#include "prof.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

enum { THREADS = 64 };
static volatile int over;
static pthread_t threads[THREADS];

static void on_signal(int signal) {
  /* Not where another allocation was interrupted: the signal comes from raise. */
  void *p = malloc(500 + signal);
  memset(p, 1, 500);
  free(p);
}

static void call_back(size_t size) { free(malloc(size)); }

static void *thread(void *arg) {
  int n = (int)(size_t)arg;
  void *kept[16] = {0};
  uint32_t before = thermalloc_scope_push(n % 2 ? "weights:odd" : "activations");
  for (int i = 0; !over || i < 2000; i++) {
    size_t size = (size_t)((i * 7919 + n * 104729) % 3000) + (i % 97 == 0 ? 2 << 20 : 0);
    free(kept[i % 16]);
    kept[i % 16] = malloc(size);
    if (i % 5 == 0) kept[i % 16] = realloc(kept[i % 16], size + 100);
    if (i % 100 == 0) raise(SIGUSR1);
    if (i % 50 == 0) thermalloc_scope_mark(kept[i % 16], before);
    if (n == 0) thermalloc_scope_step(i);
  }
  for (int i = 0; i < 16; i++) free(kept[i]);
  thermalloc_scope_pop(before);
  return 0;
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "%d", argc);
  signal(SIGUSR1, on_signal);
  for (int i = 0; i < THREADS; i++)
    CHECK(pthread_create(threads + i, 0, thread, (void *)(size_t)i) == 0, "%d", i);
  for (int round = 0; round < 15; round++) {
    void *library = dlopen(argv[1], RTLD_NOW);
    CHECK(library, "%s", dlerror());
    void (*call)(void (*)(size_t), size_t) = dlsym(library, "call");
    for (int i = 0; i < 100; i++) call(call_back, 10000 + i);
    dlclose(library);
    int child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0) {
      alarm(60);
      for (int i = 0; i < 1000; i++) call_back(i * 100);
      int error = thermalloc_prof_dump(getenv("DUMP_CHILD"));
      _exit(error);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "child: %x", status);
    dump();
  }
  over = 1;
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
  dump();
  exit(0);
}
