// A nothrow operator new whose handler frees memory returns a block.
#define main new_failure_main
#include "new_failure.cpp"
#undef main

int main() {
  retry_succeeds(nothrow[0]);
  return 0;
}
