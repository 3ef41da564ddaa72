/* Every function of malloc's family: results, alignment, error codes, errno. */
#include "check.h"
#include <malloc.h>
#include <stddef.h>
#include "thermalloc/thermalloc.h"

/* The C library has none of these, and this program is also linked without libthermalloc and run with it preloaded. */
#pragma weak free_sized
#pragma weak free_aligned_sized
#pragma weak sdallocx
#pragma weak cfree
#pragma weak thermalloc_host_v1
#pragma weak __libc_valloc
#pragma weak __libc_pvalloc
#pragma weak __posix_memalign

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t), *__libc_valloc(size_t), *__libc_pvalloc(size_t);
extern void __libc_free(void *);
extern int __posix_memalign(void **, size_t, size_t);

static void fails_with(void *p, int error, const char *what) {
  CHECK(!p, "%s gave %p", what, p);
  CHECK(errno == error, "%s: errno %d, not %d", what, errno, error);
  errno = 0;
}

static void *block(void *p, size_t size, size_t align, const char *what) {
  CHECK(p, "%s(%zu): errno %d", what, size, errno);
  CHECK(is_aligned(p, align), "%s(%zu) at %p, align %zu", what, size, p, align);
  CHECK(malloc_usable_size(p) >= size, "%s(%zu): usable %zu", what, size, malloc_usable_size(p));
  memset(p, 0xa5, size);
  return p;
}

static void plain(void) {
  for (size_t n = 0; n < 300000; n = n * 5 / 4 + 1) {
    void *p = block(malloc(n), n, 16, "malloc");
    void *q = block(malloc(n), n, 16, "malloc");
    CHECK(p != q, "two blocks at %p", p);
    free(p);
    free(q);
    unsigned char *z = calloc(n, 3);
    CHECK(z, "calloc");
    for (size_t i = 0; i < 3 * n; i++) CHECK(!z[i], "calloc(%zu, 3) byte %zu is %d", n, i, z[i]);
    free(block(z, 3 * n, 16, "calloc"));
  }
  errno = 0;
  fails_with(malloc(huge), ENOMEM, "malloc(huge)");
  fails_with(malloc(beyond), ENOMEM, "malloc(> PTRDIFF_MAX)");
  // The caches have blocks that a size which wraps around might get.
  for (size_t size = 1; size <= 4096; size += 64) free(malloc(size));
  for (size_t less = 0; less < 4096; less += 15) fails_with(malloc(most - less), ENOMEM, "malloc(SIZE_MAX - less)");
  fails_with(calloc(1, huge), ENOMEM, "calloc(1, huge)");
  fails_with(calloc(beyond, 2), ENOMEM, "calloc: product 0 mod 2^64");
  fails_with(calloc(most, most), ENOMEM, "calloc: product 1 mod 2^64");
  void *zero = calloc(none, most);
  CHECK(zero, "calloc(0, max)");
  free(zero);
  free(NULL);
  cfree(malloc(10));
  cfree(NULL);
}

static void resizing(void) {
  unsigned char *p = realloc(NULL, 100);
  block(p, 100, 16, "realloc(NULL)");
  for (int i = 0; i < 100; i++) p[i] = (unsigned char)i;
  for (size_t n = 100; n < 5000000; n = n * 3 / 2) {
    p = realloc(p, n);
    CHECK(p && is_aligned(p, 16) && malloc_usable_size(p) >= n, "realloc to %zu", n);
    for (int i = 0; i < 100; i++) CHECK(p[i] == i, "realloc to %zu lost byte %d", n, i);
  }
  p = realloc(p, 50);
  for (int i = 0; i < 50; i++) CHECK(p[i] == i, "shrinking lost byte %d", i);
  /* gcc takes the pointer for freed, whatever realloc returned. */
  _Pragma("GCC diagnostic ignored \"-Wuse-after-free\"")
  errno = 0;
  fails_with(realloc(p, huge), ENOMEM, "realloc(p, huge)");
  fails_with(realloc(p, beyond), ENOMEM, "realloc(p, > PTRDIFF_MAX)");
  fails_with(reallocarray(p, beyond, 2), ENOMEM, "reallocarray(p, overflow)");
  fails_with(reallocarray(NULL, beyond, 2), ENOMEM, "reallocarray(NULL, overflow)");
  for (int i = 0; i < 50; i++) CHECK(p[i] == i, "a failed realloc changed byte %d", i);
  errno = 77;
  CHECK(!realloc(p, 0), "realloc(p, 0) frees");
  CHECK(errno == 77, "realloc(p, 0): errno %d", errno);
  void *zero = realloc(NULL, 0);
  CHECK(zero, "realloc(NULL, 0)");
  free(zero);
  p = reallocarray(NULL, 30, 7);
  block(p, 210, 16, "reallocarray");
  CHECK(!reallocarray(p, 0, 7), "reallocarray(p, 0, n) frees");
}

static void alignments(void) {
  for (size_t a = 1; a <= (size_t)1 << 22; a *= 2) {
    for (size_t n = 0; n < 3 * a && n < 100000; n = n * 3 + 1) {
      free(block(aligned_alloc(a, n), n, a, "aligned_alloc"));
      free(block(memalign(a, n), n, a, "memalign"));
      void *p = (void *)1;
      int e = posix_memalign(&p, a, n);
      if (a < sizeof(void *)) {
        CHECK(e == EINVAL && p == (void *)1, "posix_memalign(%zu): %d", a, e);
      } else {
        CHECK(!e, "posix_memalign(%zu, %zu): %d", a, n, e);
        free(block(p, n, a, "posix_memalign"));
      }
    }
  }
  void *p = (void *)1;
  errno = 77;
  CHECK(posix_memalign(&p, 0, 10) == EINVAL, "align 0");
  CHECK(posix_memalign(&p, 24, 10) == EINVAL, "align 24");
  CHECK(posix_memalign(&p, 4, 10) == EINVAL, "align 4");
  CHECK(posix_memalign(&p, 64, huge) == ENOMEM, "huge");
  CHECK(posix_memalign(&p, 64, beyond) == ENOMEM, "> PTRDIFF_MAX");
  CHECK(posix_memalign(&p, beyond, 10) == ENOMEM, "align 2^63");
  CHECK(p == (void *)1 && errno == 77, "a failed posix_memalign left %p, errno %d", p, errno);
  CHECK(__posix_memalign(&p, 24, 10) == EINVAL, "__posix_memalign");
  CHECK(!__posix_memalign(&p, 256, 10), "__posix_memalign");
  free(block(p, 10, 256, "__posix_memalign"));

  errno = 0;
  fails_with(aligned_alloc(none, 10), EINVAL, "aligned_alloc(0)");
  fails_with(aligned_alloc(none + 24, 48), EINVAL, "aligned_alloc(24)");
  fails_with(aligned_alloc(64, huge), ENOMEM, "aligned_alloc(huge)");
  fails_with(aligned_alloc(4096, most), ENOMEM, "aligned_alloc(SIZE_MAX)");
  fails_with(memalign(64, huge), ENOMEM, "memalign(huge)");
  fails_with(memalign(beyond + 1, 10), EINVAL, "memalign(2^63 + 1)");
  free(block(memalign(none + 100, 10), 10, 128, "memalign rounds 100 up"));
  free(block(memalign(none, 10), 10, 1, "memalign(0)"));

  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  for (size_t n = 0; n < 20000; n += 777) {
    free(block(valloc(n), n, page, "valloc"));
    size_t whole = n ? (n + page - 1) / page * page : page;
    free(block(pvalloc(n), whole, page, "pvalloc"));
  }
  errno = 0;
  fails_with(valloc(huge), ENOMEM, "valloc(huge)");
  fails_with(pvalloc(huge), ENOMEM, "pvalloc(huge)");
  fails_with(pvalloc(most), ENOMEM, "pvalloc(SIZE_MAX)");
}

static void frees(void) {
  for (size_t n = 0; n < 3000000; n = n * 2 + 3) {
    errno = 4321;
    free(malloc(n));
    free_sized(malloc(n), n);
    free_sized(calloc(1, n), n);
    sdallocx(malloc(n), n, 0);
    for (int lg = 0; lg <= 21; lg++) {
      free_aligned_sized(aligned_alloc((size_t)1 << lg, n), (size_t)1 << lg, n);
      sdallocx(memalign((size_t)1 << lg, n), n, lg | 3 << 8);
    }
    CHECK(errno == 4321, "a free of %zu bytes set errno to %d", n, errno);
  }
  free_sized(NULL, 0);
  free_aligned_sized(NULL, 64, 100);
  sdallocx(NULL, 100, 0);
}

static void old_names(void) {
  __libc_free(block(malloc(100), 100, 16, "malloc"));
  void *p = block(__libc_malloc(100), 100, 16, "__libc_malloc");
  p = block(realloc(p, 3000), 3000, 16, "realloc");
  free(block(__libc_realloc(p, 100000), 100000, 16, "__libc_realloc"));
  free(block(__libc_calloc(10, 10), 100, 16, "__libc_calloc"));
  free(block(__libc_memalign(512, 100), 100, 512, "__libc_memalign"));
  free(block(__libc_valloc(100), 100, 4096, "__libc_valloc"));
  free(block(__libc_pvalloc(100), 4096, 4096, "__libc_pvalloc"));
}

static void reports(void) {
  CHECK(malloc_usable_size(NULL) == 0, "usable size of NULL");
  CHECK(mallopt(M_ARENA_MAX, 1) == 1 && mallopt(M_MMAP_THRESHOLD, 1 << 20) == 1 && mallopt(M_MXFAST, 0) == 1, "mallopt");
  CHECK(mallopt(-1000, 1) == 0, "mallopt: unknown parameter");
  int trimmed = malloc_trim(0);
  CHECK(trimmed == 0 || trimmed == 1, "malloc_trim: %d", trimmed);
  struct mallinfo2 m = mallinfo2();
  CHECK(m.arena >= m.uordblks, "mallinfo2: %zu of %zu bytes allocated", m.uordblks, m.arena);
  _Pragma("GCC diagnostic ignored \"-Wdeprecated-declarations\"")
  struct mallinfo small = mallinfo();
  CHECK(small.arena >= 0 && small.uordblks >= 0, "mallinfo: negative");
  CHECK(malloc_info(1, stdout) == EINVAL, "malloc_info(1)");
  char *text = NULL;
  size_t len = 0;
  FILE *f = open_memstream(&text, &len);
  CHECK(f && malloc_info(0, f) == 0 && fclose(f) == 0, "malloc_info");
  CHECK(strstr(text, "<malloc version=") && strstr(text, "</malloc>"), "malloc_info: %s", text);
  free(text);
  malloc_stats();
}

static void host_table(void) {
  const struct thermalloc_host_v1 *host = &thermalloc_host_v1;
  CHECK(host->size >= sizeof *host && host->version >= 1, "size %u version %u", host->size, host->version);
  char value[32];
  ptrdiff_t n = host->option_read("strip_deepbind", 14, value, sizeof value);
  CHECK(n == 4 && !memcmp(value, "true", 4), "strip_deepbind: %td", n);
  CHECK(host->option_read("colour", 6, value, sizeof value) == -1, "unknown option");
  CHECK(host->option_write("colour", 6, "red", 3) == ENOENT, "unknown option");
  size_t count = host->stat_count();
  uint64_t figures[2];
  CHECK(count > 2 && host->stat_name(0) && !host->stat_name(count), "%zu statistics", count);
  CHECK(host->stat_read(count - 1, 2, figures) == 1, "the last statistic");
}

int main(void) {
  plain();
  resizing();
  alignments();
  frees();
  old_names();
  reports();
  host_table();
  return 0;
}
