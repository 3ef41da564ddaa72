/* A fork handler that allocates and forks itself. In a program that has the allocator in it, this
 * handler runs between the allocator's own, as it is registered first. */
#include "check.h"
#include <pthread.h>
#include <sys/wait.h>

static int depth;
static int handled;

/* Blocks of many sizes, some of them large. */
static void work(void) {
  void *blocks[200];
  for (int i = 0; i < 200; i++) {
    blocks[i] = malloc(16 + i * 977);
    CHECK(blocks[i], "malloc");
    memset(blocks[i], 1, 16);
  }
  for (int i = 0; i < 200; i++) free(blocks[i]);
}

static void fork_and_wait(void) {
  pid_t child = fork();
  CHECK(child >= 0, "fork: %d", errno);
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child, "waitpid");
  CHECK(status == 0, "status %x", status);
}

static void before(void) {
  work();
  if (depth++ == 0) {
    fork_and_wait();
    handled++;
  }
}

static void after(void) {
  work();
  depth--;
}

__attribute__((constructor(101))) static void early(void) {
  CHECK(!pthread_atfork(before, after, after), "atfork");
}

static volatile int stop;

static void *worker(void *unused) {
  while (!stop) work();
  return unused;
}

int main(void) {
  alarm(60);
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, worker, NULL), "thread");
  for (int i = 0; i < 50; i++) fork_and_wait();
  CHECK(handled == 50 && depth == 0, "%d handled, depth %d", handled, depth);
  stop = 1;
  pthread_join(thread, NULL);
  work();
  return 0;
}
