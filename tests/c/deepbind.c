/* Loads liba.so (argv[1]), which loads libplugin.so with RTLD_DEEPBIND by a bare name that only liba's own RUNPATH finds. */
#include "check.h"
#include <dlfcn.h>

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage");
  void *a = dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND);
  CHECK(a, "%s", dlerror());
  int (*load)(void) = (int (*)(void))dlsym(a, "load");
  CHECK(load && load() == 7, "load");
  CHECK(!dlopen("libthermalloc_no_such.so", RTLD_NOW), "a missing library was found");
  CHECK(strstr(dlerror(), "no_such"), "dlerror");
  CHECK(dlopen(NULL, RTLD_NOW), "the program itself: %s", dlerror());
  CHECK(!dlopen(argv[1], 0), "mode 0 is invalid");
  return 0;
}
