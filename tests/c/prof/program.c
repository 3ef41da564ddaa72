/* A program whose live memory is known: it allocates far more than it keeps, in several sizes and
 * places and on several threads. */
#include "prof.h"
#include <pthread.h>

enum { THREADS = 4, ROUNDS = 60000 };
static const size_t sizes[] = {24, 100, 300, 2000, 9000, 70000};
enum { SIZES = sizeof sizes / sizeof *sizes };
static uint64_t live_bytes, live_blocks, all_bytes, all_blocks;

static __attribute__((noinline)) void *keep(size_t size) { return malloc(size); }
static __attribute__((noinline)) void *drop(size_t size) { return malloc(size); }

static void *thread(void *unused) {
  uint64_t lb = 0, ln = 0, ab = 0, an = 0;
  for (int i = 0; i < ROUNDS; i++) {
    size_t size = sizes[i * 7 % 13 % SIZES];
    int keeps = i % 10 == 0 && size < 5000;
    void *p = keeps ? keep(size) : drop(size);
    CHECK(p, "%zu", size);
    ab += size, an++;
    if (keeps) lb += size, ln++;
    else free(p);
  }
  __sync_fetch_and_add(&live_bytes, lb);
  __sync_fetch_and_add(&live_blocks, ln);
  __sync_fetch_and_add(&all_bytes, ab);
  __sync_fetch_and_add(&all_blocks, an);
  return unused;
}

int main(void) {
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(pthread_create(threads + i, 0, thread, 0) == 0, "%d", i);
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], 0);
  dump();
  printf("%lu %lu %lu %lu\n", live_bytes, live_blocks, all_bytes, all_blocks);
  fflush(stdout);
  _exit(0);
}
