/* The option strip_deepbind: off, a library (argv[1]) loaded with RTLD_DEEPBIND is bound to the C library's free; on, to
 * the program's. */
#include "check.h"
#include <dlfcn.h>
#include "thermalloc/thermalloc.h"

#pragma weak thermalloc_host_v1

static void set(const char *value) {
  CHECK(!thermalloc_host_v1.option_write("strip_deepbind", 14, value, strlen(value)), "strip_deepbind:%s", value);
}

static void *free_of(const char *path) {
  void *plugin = dlopen(path, RTLD_NOW | RTLD_DEEPBIND);
  CHECK(plugin, "%s", dlerror());
  void *(*bound)(void) = (void *(*)(void))dlsym(plugin, "bound_free");
  CHECK(bound, "%s", dlerror());
  void *address = bound();
  CHECK(!dlclose(plugin), "dlclose");
  return address;
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage");
  void *ours = dlsym(RTLD_DEFAULT, "free");
  CHECK(free_of(argv[1]) == ours, "stripped by default");
  set("false");
  CHECK(free_of(argv[1]) != ours, "deep binding is asked for");
  set("true");
  CHECK(free_of(argv[1]) == ours, "stripped again");
  return 0;
}
