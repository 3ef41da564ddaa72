/* A C program: no C++ runtime is there when libthermalloc starts. argv[1] is the plugin. */
#include "check.h"
#include <dlfcn.h>

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage");
  CHECK(!dlsym(RTLD_DEFAULT, "__cxa_throw"), "the C++ runtime is already here");
  void *handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(handle, "%s", dlerror());
  CHECK(!dlsym(RTLD_DEFAULT, "__cxa_throw"), "the C++ runtime is in the global scope");
  int (*plugin)(void) = (int (*)(void))dlsym(handle, "plugin");
  CHECK(plugin && plugin() == 42, "plugin");
  return 0;
}
