/* Source with plain names for a build with a prefix. */
#define JEMALLOC_MANGLE
#include <jemalloc/jemalloc.h>

#include "check.h"

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

int main(void) {
  CHECK(strcmp(TEXT(malloc), "je_malloc") == 0 && strcmp(TEXT(mallctl), "je_mallctl") == 0, TEXT(malloc));
  void *p = malloc(100);
  CHECK(p && malloc_usable_size(p) == nallocx(100, 0), "%zu", malloc_usable_size(p));
  free(p);
  p = mallocx(100, MALLOCX_ZERO);
  CHECK(p, "zeroed");
  dallocx(p, 0);
  return 0;
}
