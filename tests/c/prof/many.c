/* More call stacks and blocks than tables begin with: STACKS stacks, EACH blocks of each that stay, and as
   many that don't. With a second argument the work is shared among threads, and nothing is dumped. */
#include "prof.h"
#include <pthread.h>

static int each, depth;
static void *volatile last;

/* A stack is a way down: to the left or to the right at each level. */
static __attribute__((noinline)) void left(unsigned way, int level);
static __attribute__((noinline)) void right(unsigned way, int level);

static __attribute__((noinline)) void down(unsigned way, int level) {
  if (level == depth) {
    for (int i = 0; i < each; i++) {
      /* Never touched: a million such blocks have no memory behind them. */
      last = malloc(16 + (way + i) % 90);
      free(malloc(40));
    }
    return;
  }
  if (way >> level & 1) right(way, level);
  else left(way, level);
}

static void left(unsigned way, int level) { down(way, level + 1); __asm__ volatile("" ::: "memory"); }
static void right(unsigned way, int level) { down(way, level + 1); __asm__ volatile("" ::: "memory"); }

static unsigned stacks;
enum { THREADS = 4 };

static void *thread(void *arg) {
  for (unsigned way = (unsigned)(size_t)arg; way < stacks; way += THREADS) down(way, 0);
  return 0;
}

int main(int argc, char **argv) {
  CHECK(argc > 2, "%d", argc);
  stacks = (unsigned)atoi(argv[1]);
  each = atoi(argv[2]);
  while (1u << depth < stacks) depth++;
  if (argc > 3) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) pthread_create(&threads[i], 0, thread, (void *)i);
    for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
    return 0;
  }
  for (unsigned way = 0; way < stacks; way++) down(way, 0);
  dump();
  _exit(0);
}
