// A C++ library that a C program loads with RTLD_LOCAL: the C++ runtime comes late and is in no global scope.
#include "new_failure.h"

extern "C" int plugin() {
  new_failure();
  return 42;
}
