/* Allocates, and ends. */
#include <stdlib.h>

int main(void) {
  void *volatile block = malloc(100);
  return block == NULL;
}
