/* What realloc(p, 0) gives. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  void *volatile p = malloc(1000);
  p = realloc(p, 0);
  if (p) printf("a block of %zu\n", malloc_usable_size(p));
  else puts("null");
  return 0;
}
