/* A program with a library that annotates its threads as TensorFlow does. */
#include "prof.h"
#include <dlfcn.h>
#include <pthread.h>

static void (*annotate)(const char *op, int64_t step, const char *region, int32_t dtype);
static void *kept[8];

static void *thread(void *unused) {
  annotate("gradient_tape/dense/MatMul", 31, "temp", 1);
  kept[3] = malloc(4 << 20);
  annotate("", 0, "", 0);
  return unused;
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "%d", argc);
  void *library = dlopen(argv[1], RTLD_NOW);
  CHECK(library, "%s", dlerror());
  annotate = (void (*)(const char *, int64_t, const char *, int32_t))dlsym(library, "annotate");
  CHECK(annotate, "annotate");
  /* The library is looked for in the background. */
  for (int i = 0; i < 40; i++) {
    free(malloc(1 << 20));
    usleep(100000);
  }
  kept[0] = malloc(1 << 21);
  annotate("functional_1/conv_b_1/Relu", 30, "output", 1);
  kept[1] = malloc(3 << 20);
  pthread_t t;
  CHECK(pthread_create(&t, 0, thread, 0) == 0, "thread");
  pthread_join(t, 0);
  uint32_t before = thermalloc_scope_push("kv_cache");
  kept[2] = malloc(5 << 20);
  thermalloc_scope_pop(before);
  dump();
  _exit(0);
}
