/* libthermalloc (argv[1]) loaded by dlopen with RTLD_LOCAL: it must not disturb the C library's own allocator, and
 * must stay after dlclose. */
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>

static void *(*their_malloc)(size_t);
static void (*their_free)(void *);

static void *thread(void *arg) {
  for (int i = 0; i < 3000; i++) {
    char *p = their_malloc((size_t)i * 9 + 1);
    p[0] = 1;
    their_free(p);
  }
  return arg;
}

static void in_threads(void) {
  pthread_t t[3];
  for (int i = 0; i < 3; i++) CHECK(!pthread_create(&t[i], NULL, thread, NULL), "thread");
  for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage");
  void *handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(handle, "%s", dlerror());
  their_malloc = (void *(*)(size_t))dlsym(handle, "malloc");
  their_free = (void (*)(void *))dlsym(handle, "free");
  CHECK(their_malloc && their_free && their_malloc != malloc, "symbols");
  in_threads();
  char *late = their_malloc(100000);
  CHECK(late, "malloc");
  memset(late, 1, 100000);
  free(strdup("libc's own"));
  void *(*their_dlopen)(const char *, int) = (void *(*)(const char *, int))dlsym(handle, "dlopen");
  CHECK(their_dlopen && their_dlopen != dlopen && their_dlopen(NULL, RTLD_NOW), "its dlopen");
  CHECK(!dlclose(handle), "dlclose");
  in_threads();
  their_free(late);
  return 0;
}
