/* The header alone, in strict C. */
#include "thermalloc/thermalloc.h"

int main(void) {
  void *p = malloc(10);
  free_sized(p, 10);
  sdallocx(malloc(10), 10, 0);
  free_aligned_sized(aligned_alloc(64, 64), 64, 64);
  cfree(malloc(1));
  return thermalloc_host_v1.version >= 1 && malloc_usable_size(0) == 0 ? 0 : 1;
}
