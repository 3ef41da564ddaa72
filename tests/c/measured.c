/* What is measured is what /proc/self/smaps says of the mappings that hold our blocks and tables, to 1 %;
 * the estimate is above it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <fcntl.h>

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      fprintf(stderr, "measured.c:%d: %s: ", __LINE__, #condition);        \
      fprintf(stderr, __VA_ARGS__);                                        \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

int mallctl(const char *, void *, size_t *, void *, size_t);

static uint64_t get(const char *name) {
  uint64_t value = 0, one = 1;
  size_t len = sizeof value;
  mallctl("epoch", NULL, NULL, &one, sizeof one);
  CHECK(mallctl(name, &value, &len, NULL, 0) == 0, "%s\n", name);
  return value;
}

/* Resident bytes of the anonymous mappings between the two addresses. */
static uint64_t kernel(uintptr_t low, uintptr_t high) {
  static char text[1 << 22];
  int fd = open("/proc/self/smaps", O_RDONLY);
  size_t have = 0;
  ssize_t more;
  while ((more = read(fd, text + have, sizeof text - 1 - have)) > 0) have += more;
  close(fd);
  uint64_t sum = 0;
  int ours = 0;
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
    uintptr_t start, end;
    unsigned long kb;
    if (sscanf(line, "%lx-%lx ", &start, &end) == 2) ours = start >= low && end <= high;
    else if (ours && sscanf(line, "Rss: %lu kB", &kb) == 1) sum += (uint64_t)kb << 10;
  }
  return sum;
}

static void compare(const char *when, void *block) {
  /* Tables lie below the blocks, all of it in a range of its own, with nothing else within terabytes. */
  uintptr_t at = (uintptr_t)block, far = (uintptr_t)3 << 40;
  uint64_t measured = get("thermalloc.stats.resident_measured_bytes");
  uint64_t told = kernel(at > far ? at - far : 0, at + far);
  uint64_t estimate = get("stats.resident");
  printf("%s: measured %lu, kernel %lu, estimate %lu\n", when, measured, told, estimate);
  int64_t apart = (int64_t)(measured - told);
  CHECK((apart < 0 ? -apart : apart) * 100 <= (int64_t)told, "%s: %lu and %lu\n", when, measured, told);
  CHECK(measured <= estimate, "%s: %lu above the estimate %lu\n", when, measured, estimate);
}

int main(void) {
  static char *blocks[2000];
  for (int i = 0; i < 2000; i++) {
    size_t size = 100 + (size_t)i * 101;
    blocks[i] = malloc(size);
    memset(blocks[i], 1, size);
  }
  char *large = malloc(64 << 20);
  memset(large, 1, 32 << 20); /* half of it is never touched */
  compare("full", large);
  for (int i = 0; i < 2000; i += 2) free(blocks[i]);
  compare("half freed", large);
  free(large);
  compare("dirty", blocks[1]);
  CHECK(mallctl("arena.4096.purge", NULL, NULL, NULL, 0) == 0, "purge\n");
  compare("purged", blocks[1]);
  unsigned arena;
  size_t len = sizeof arena;
  CHECK(mallctl("arenas.create", &arena, &len, NULL, 0) == 0, "create\n");
  return 0;
}
