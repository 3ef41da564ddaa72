/* Threads read, print, make arenas and destroy them while the process forks: a child finds every lock free. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int mallctl(const char *, void *, size_t *, void *, size_t);
void malloc_stats_print(void (*)(void *, const char *), void *, const char *);

static volatile int stop;

static void count(void *sum, const char *piece) { *(size_t *)sum += strlen(piece); }

static int use(void) {
  uint64_t one = 1;
  size_t sum = 0, figure, len = sizeof figure;
  unsigned arena;
  if (mallctl("epoch", NULL, NULL, &one, sizeof one)) return 1;
  if (mallctl("stats.arenas.4096.bins.3.curregs", &figure, &len, NULL, 0)) return 2;
  if (mallctl("stats.arenas.0.lextents.0.curlextents", &figure, &len, NULL, 0)) return 3;
  malloc_stats_print(count, &sum, "Jax");
  if (sum < 1000) return 4;
  len = sizeof arena;
  if (mallctl("arenas.create", &arena, &len, NULL, 0)) return 5;
  char name[40];
  snprintf(name, sizeof name, "arena.%u.destroy", arena);
  return mallctl(name, NULL, NULL, NULL, 0) ? 6 : 0;
}

static void *work(void *unused) {
  while (!stop) {
    int failed = use();
    if (failed) {
      fprintf(stderr, "mallctl_fork.c: step %d failed\n", failed);
      exit(1);
    }
    free(malloc(3 << 20));
  }
  return unused;
}

int main(void) {
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, work, NULL);
  for (int i = 0; i < 150; i++) {
    pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(use());
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      fprintf(stderr, "mallctl_fork.c: child %d ended with %x\n", i, status);
      exit(1);
    }
  }
  stop = 1;
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  return 0;
}
