/* A library that is loaded late and calls back. */
#include <stddef.h>

__attribute__((noinline)) static int inner(void (*f)(size_t), size_t size, int n) {
  volatile int room[16];
  room[n % 16] = n;
  if (n) inner(f, size, n - 1);
  else f(size);
  return room[n % 16];
}

void call(void (*f)(size_t), size_t size) { inner(f, size, 6); }
