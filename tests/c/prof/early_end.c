/* A program that loads a library late, allocates from it, and ends without the C library's knowing: argv[1] is
 * the library, argv[2] how it ends. */
#include "../check.h"
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

enum { BLOCKS = 3, LATE = 4 };
static void *kept[BLOCKS + 1];

__attribute__((noinline)) static void keep(size_t size) {
  static int n;
  kept[n] = malloc(size);
  CHECK(kept[n++], "%zu", size);
}

int main(int argc, char **argv) {
  CHECK(argc == 3, "%d", argc);
  void *library = dlopen(argv[1], RTLD_NOW);
  CHECK(library, "%s", dlerror());
  void (*call)(void (*)(size_t), size_t) = (void (*)(void (*)(size_t), size_t))dlsym(library, "call");
  for (int i = 0; i < BLOCKS; i++) call(keep, 2 << 20);
  usleep(1000000);
  /* What is asked for now may be lost. */
  call(keep, LATE << 20);
  switch (argv[2][0]) {
  case 'v': {
    /* Its child ends the same way, in this process's memory. */
    pid_t child = vfork();
    if (child == 0) _exit(7);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7, "%x", status);
    _exit(0);
  }
  case 'q': quick_exit(0);
  case 'k': raise(SIGKILL);
  }
  _exit(0);
}
