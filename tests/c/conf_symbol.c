/* A program that sets jemalloc's variables itself. With -DNAME=je_malloc_conf and so on the prefixed ones;
 * prints what came of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#ifndef NAME
#define NAME malloc_conf
#define MESSAGE malloc_message
#endif

int mallctl(const char *, void *, size_t *, void *, size_t);
void malloc_stats_print(void (*)(void *, const char *), void *, const char *);
extern void (*MESSAGE)(void *, const char *);

const char *NAME = "dirty_decay_ms:1234,muzzy_decay_ms:77,narenas:3,stats_print_opts:Jmdablxeh";

static size_t pieces;
static void count(void *opaque, const char *text) {
  if (opaque == NULL && strlen(text) > 0) pieces++;
}

int main(void) {
  ssize_t dirty = 0, muzzy = 0;
  unsigned narenas = 0;
  const char *letters = "";
  size_t len = sizeof dirty;
  mallctl("opt.dirty_decay_ms", &dirty, &len, NULL, 0);
  mallctl("opt.muzzy_decay_ms", &muzzy, &len, NULL, 0);
  len = sizeof narenas;
  mallctl("arenas.narenas", &narenas, &len, NULL, 0);
  len = sizeof letters;
  mallctl("opt.stats_print_opts", &letters, &len, NULL, 0);
  MESSAGE = count;
  malloc_stats_print(NULL, NULL, "J");
  MESSAGE = NULL;
  printf("%zd %zd %u %s %d\n", dirty, muzzy, narenas, letters, pieces > 100);
  return 0;
}
