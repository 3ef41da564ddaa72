/* Stacks of many shapes, each told as the C library sees it. */
#include "prof.h"
#include <alloca.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

static void *kept[4096];
static volatile int kept_count;

static __attribute__((noinline)) void here(size_t size) {
  void *p = malloc(size);
  kept[__sync_fetch_and_add(&kept_count, 1)] = p;
  tell_stack(p, size);
}

static __attribute__((noinline)) int deep(int n, int a, int b) {
  volatile char room[64];
  room[n % 64] = (char)n;
  if (n == 0) here(1000);
  else deep(n - 1, b, a + 1);
  return room[n % 64] + a;
}

/* A frame of a size that is known only now. */
static __attribute__((noinline)) void with_alloca(int n) {
  volatile char *room = alloca(n);
  room[n - 1] = 1;
  here(2000);
  room[0] = 2;
}

/* A frame that is aligned anew. */
static __attribute__((noinline)) void aligned(void) {
  volatile __attribute__((aligned(64))) char room[128];
  room[1] = 1;
  here(3000);
  CHECK(((uintptr_t)room & 63) == 0, "aligned");
}

static int compare(const void *a, const void *b) {
  if (kept_count < 40) here(400);
  return *(const int *)a - *(const int *)b;
}

static void on_signal(int signal) { deep(3, signal, 1); }

static void with_handler(int flags) {
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = flags};
  CHECK(sigaction(SIGUSR1, &action, 0) == 0, "sigaction");
  CHECK(raise(SIGUSR1) == 0, "raise");
}

static ucontext_t main_context, fiber_context;

static void fiber(void) { deep(4, 1, 2); }

static void in_fiber(void) {
  size_t page = 4096, size = 64 << 10;
  char *stack = mmap(0, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(stack != MAP_FAILED, "mmap");
  CHECK(mprotect(stack + page, size, PROT_READ | PROT_WRITE) == 0, "mprotect");
  CHECK(getcontext(&fiber_context) == 0, "getcontext");
  fiber_context.uc_stack.ss_sp = stack + page;
  fiber_context.uc_stack.ss_size = size;
  fiber_context.uc_link = &main_context;
  makecontext(&fiber_context, fiber, 0);
  CHECK(swapcontext(&main_context, &fiber_context) == 0, "swapcontext");
  munmap(stack, size + 2 * page);
}

static void *thread(void *unused) {
  deep(7, 0, 0);
  in_fiber();
  return unused;
}

int main(int argc, char **argv) {
  here(10);
  for (int n = 0; n < 60; n += 13) deep(n, 1, 2);
  with_alloca(argc * 300);
  aligned();
  int numbers[] = {3, 1, 2};
  qsort(numbers, 3, sizeof *numbers, compare);
  with_handler(0);
  static char alternative[64 << 10];
  stack_t stack = {.ss_sp = alternative, .ss_size = sizeof alternative};
  CHECK(sigaltstack(&stack, 0) == 0, "sigaltstack");
  with_handler(SA_ONSTACK);
  in_fiber();
  in_fiber();
  pthread_t t;
  CHECK(pthread_create(&t, 0, thread, 0) == 0, "pthread_create");
  pthread_join(t, 0);
  if (argc > 1) {
    void *library = dlopen(argv[1], RTLD_NOW);
    CHECK(library, "%s", dlerror());
    void (*call)(void (*)(size_t), size_t) = dlsym(library, "call");
    CHECK(call, "call");
    call(here, 5000);
  }
  dump();
  _exit(0);
}
