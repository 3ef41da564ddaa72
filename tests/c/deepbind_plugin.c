/* Frees what libc allocated: with RTLD_DEEPBIND in force, by libc's free. */
#include "check.h"

int use(void) {
  for (int i = 0; i < 100; i++) {
    char *s = strdup("hello");
    free(s);
    CHECK(asprintf(&s, "%d", i) > 0, "asprintf");
    free(realpath("/tmp", NULL));
    free(s);
    char *line = NULL;
    size_t n = 0;
    FILE *f = fmemopen((void *)"one\ntwo\n", 8, "r");
    while (getline(&line, &n, f) > 0) {
    }
    fclose(f);
    free(line);
  }
  return 7;
}

/* Whose free this library is bound to. */
void *bound_free(void) { return (void *)free; }
