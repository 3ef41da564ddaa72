/* Threads with libthermalloc_threads.so: each is in the scope of whoever created it, and else as it would be. */
#include "prof.h"
#include <pthread.h>

enum { INHERITED = 300001, NESTED = 300002, AFTER = 300003, CHURN = 200 };
static void *kept[3];
static uint32_t expected;

__attribute__((noinline)) static void keep(int i, size_t size) {
  kept[i] = malloc(size);
  tell_stack(kept[i], size);
}

static void *nested(void *argument) {
  CHECK(thermalloc_scope_capture() == expected, "a thread's thread");
  keep(1, NESTED);
  pthread_exit(argument);
}

static void *inherited(void *argument) {
  CHECK(thermalloc_scope_capture() == expected, "inherited");
  keep(0, INHERITED);
  pthread_t t;
  void *result;
  CHECK(!pthread_create(&t, 0, nested, kept) && !pthread_join(t, &result) && result == kept, "nested");
  return argument;
}

static void *outside(void *argument) {
  CHECK(thermalloc_scope_capture() == 0, "none");
  keep(2, AFTER);
  return argument;
}

static void *waits(void *unused) {
  CHECK(thermalloc_scope_capture() == expected, "inherited");
  for (;;) pause();
  return unused;
}

static void *nothing(void *argument) { return argument; }

static void run(void *(*routine)(void *)) {
  pthread_t t;
  void *result;
  CHECK(!pthread_create(&t, 0, routine, kept) && !pthread_join(t, &result) && result == kept, "result");
}

int main(void) {
  uint32_t before = thermalloc_scope_push("workspace:pool");
  expected = thermalloc_scope_capture();
  CHECK(expected != 0, "a scope");
  run(inherited);
  for (int i = 0; i < CHURN; i++) run(nothing);
  pthread_t t;
  void *result;
  CHECK(!pthread_create(&t, 0, waits, 0) && !pthread_cancel(t) && !pthread_join(t, &result), "cancelled");
  CHECK(result == PTHREAD_CANCELED, "cancelled");
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  CHECK(!pthread_attr_setstacksize(&attributes, 1ul << 46), "a stack that nobody has room for");
  CHECK(pthread_create(&t, &attributes, nothing, 0) == EAGAIN, "refused");
  thermalloc_scope_pop(before);
  run(outside);
  dump();
  exit(0);
}
