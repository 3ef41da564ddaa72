/* Has the RUNPATH to the plugin. */
#include "check.h"
#include <dlfcn.h>

int load(void) {
  void *plugin = dlopen("libplugin.so", RTLD_NOW | RTLD_DEEPBIND | RTLD_LOCAL);
  CHECK(plugin, "%s", dlerror());
  int (*use)(void) = (int (*)(void))dlsym(plugin, "use");
  CHECK(use, "%s", dlerror());
  return use();
}
