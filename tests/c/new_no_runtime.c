/* operator new fails in a process without any C++ runtime: one line, then an abort. */
#include "check.h"
#include <dlfcn.h>

int main(void) {
  void *(*nothrow)(size_t, const char *) = (void *(*)(size_t, const char *))dlsym(RTLD_DEFAULT, "_ZnwmRKSt9nothrow_t");
  void *(*new)(size_t) = (void *(*)(size_t))dlsym(RTLD_DEFAULT, "_Znwm");
  CHECK(new && nothrow, "symbols");
  CHECK(!nothrow(huge, ""), "nothrow");
  new(huge);
  return 0;
}
