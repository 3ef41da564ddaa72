/* Where blocks of about 2 MiB lie, and which of them become huge pages.
 * "placed": exact multiples of 2 MiB lie on its borders, all others without a gap, nothing but what is
 *     touched is resident.
 * "dense": what was written whole becomes huge pages (95 % of it), within 20 s, and costs no more.
 * "sparse": blocks with one page touched in each 2 MiB stay that small.
 * "small": a program with 3 MiB does not grow. */
#include "check.h"

#define MIB (1UL << 20)
enum { BLOCKS = 60, MOST_SECONDS = 20 };

static const size_t sizes[] = {19 * MIB / 10, 2 * MIB, 21 * MIB / 10, 4 * MIB, 96 * MIB / 10};
static unsigned char *blocks[BLOCKS];

/* A figure of this process's memory, bytes. */
static size_t rollup(const char *name) {
  char line[256];
  size_t kib = 0, len = strlen(name);
  FILE *file = fopen("/proc/self/smaps_rollup", "r");
  CHECK(file, "errno %d", errno);
  while (fgets(line, sizeof line, file)) {
    if (strncmp(line, name, len) == 0 && line[len] == ':') {
      kib = strtoul(line + len + 1, NULL, 10);
    }
  }
  fclose(file);
  return kib << 10;
}

static size_t base;

/* Bytes resident beyond what was when the program began. */
static size_t grown(void) { return rollup("Anonymous") - base; }

static void take(size_t size, size_t step) {
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = malloc(size);
    CHECK(blocks[i], "%zu bytes", size);
    for (size_t at = 0; at < size; at += step) {
      blocks[i][at] = 1;
    }
  }
}

static void drop(void) {
  for (int i = 0; i < BLOCKS; i++) {
    free(blocks[i]);
  }
}

static int by_address(const void *a, const void *b) {
  uintptr_t x = *(uintptr_t const *)a, y = *(uintptr_t const *)b;
  return (x > y) - (x < y);
}

static void placed(void) {
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    size_t size = sizes[k], room = (size + 4095) & ~4095UL;
    take(size, 4096);
    CHECK(grown() <= BLOCKS * room + 8 * MIB, "%zu bytes for blocks of %zu", grown(), size);
    qsort(blocks, BLOCKS, sizeof *blocks, by_address);
    size_t apart = 0;
    for (int i = 0; i < BLOCKS; i++) {
      if (size % (2 * MIB) == 0) {
        CHECK(is_aligned(blocks[i], 2 * MIB), "%p of %zu bytes", (void *)blocks[i], size);
      }
      apart += i && (size_t)(blocks[i] - blocks[i - 1]) != room;
    }
    CHECK(apart <= 2, "%zu gaps among blocks of %zu bytes", apart, size);
    drop();
  }
}

static void dense(void) {
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    size_t size = sizes[k], touched = BLOCKS * size;
    take(size, 4096);
    size_t before = grown();
    int seconds = 0;
    while (rollup("AnonHugePages") < touched / 100 * 95) {
      CHECK(seconds++ < MOST_SECONDS, "%zu of %zu bytes", rollup("AnonHugePages"), touched);
      sleep(1);
    }
    CHECK(grown() <= before + 4 * MIB, "from %zu to %zu bytes", before, grown());
    drop();
  }
}

static void sparse(void) {
  take(8 * MIB, 2 * MIB);
  size_t touched = BLOCKS * 4 * 4096UL, meta = MIB;
  sleep(8);
  CHECK(grown() < 2 * touched + meta, "%zu bytes for %zu touched", grown(), touched);
}

static void small(void) {
  unsigned char *p = malloc(3 * MIB);
  CHECK(p, "errno %d", errno);
  memset(p, 1, 3 * MIB);
  size_t before = grown();
  sleep(6);
  CHECK(grown() <= before + 64 * 1024 && rollup("AnonHugePages") == 0, "from %zu to %zu", before, grown());
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "%d arguments", argc);
  base = rollup("Anonymous");
  switch (argv[1][0]) {
  case 'p':
    placed();
    break;
  case 'd':
    dense();
    break;
  case 's':
    strcmp(argv[1], "small") == 0 ? small() : sparse();
    break;
  }
  return 0;
}
