/* jemalloc 5.3's API on thermalloc: each function by its own name, and with the prefixes je_ and
 * jemalloc_. What each does is in jemalloc(3); what differs is in docs/compare.md.
 *
 * Of the plain names those of C and POSIX are the system headers' to declare.
 *
 * A program that includes <jemalloc/jemalloc.h> finds one in thermalloc/compat. */
#ifndef THERMALLOC_JEMALLOC_H
#define THERMALLOC_JEMALLOC_H

#include <limits.h>
#include <malloc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <strings.h>

#ifdef __cplusplus
#define THERMALLOC_J_NOEXCEPT noexcept
extern "C" {
#else
#define THERMALLOC_J_NOEXCEPT
#endif

/* Flags of the ...x functions: the alignment's logarithm in the low six bits, then zeroing, the explicit
 * cache and the arena, the last two with 0 for the usual one. */
#define MALLOCX_LG_ALIGN(la) ((int)(la))
#define MALLOCX_ALIGN(a)                                        \
  ((int)((size_t)(a) < (size_t)INT_MAX ? ffs((int)(a)) - 1      \
                                       : ffs((int)((size_t)(a) >> 32)) + 31))
#define MALLOCX_ZERO ((int)0x40)
#define MALLOCX_TCACHE(tc) ((int)(((unsigned)(tc) + 2u) << 8))
#define MALLOCX_TCACHE_NONE MALLOCX_TCACHE(-1)
#define MALLOCX_ARENA(a) ((int)(((unsigned)(a) + 1u) << 20))

/* Indices for arena.<i>. and stats.arenas.<i>.: all arenas, and those that were destroyed. Plain
 * numbers, so that they can be pasted into names. */
#define MALLCTL_ARENAS_ALL 4096
#define MALLCTL_ARENAS_DESTROYED 4097

#define THERMALLOC_J_ALLOCATES(...) __attribute__((malloc, alloc_size(__VA_ARGS__), warn_unused_result))

/* The non-standard functions and the variables, with a prefix. Sizes that can't be had give NULL, and 0
 * from nallocx. xallocx returns what it could do, and moves nothing. */
#define THERMALLOC_J_EXTENDED(p)                                                                    \
  void *p##mallocx(size_t size, int flags) THERMALLOC_J_NOEXCEPT THERMALLOC_J_ALLOCATES(1);        \
  void *p##rallocx(void *ptr, size_t size, int flags) THERMALLOC_J_NOEXCEPT                        \
      __attribute__((alloc_size(2), warn_unused_result));                                          \
  size_t p##xallocx(void *ptr, size_t size, size_t extra, int flags) THERMALLOC_J_NOEXCEPT;        \
  size_t p##sallocx(const void *ptr, int flags) THERMALLOC_J_NOEXCEPT __attribute__((pure));       \
  void p##dallocx(void *ptr, int flags) THERMALLOC_J_NOEXCEPT;                                     \
  void p##sdallocx(void *ptr, size_t size, int flags) THERMALLOC_J_NOEXCEPT;                       \
  size_t p##nallocx(size_t size, int flags) THERMALLOC_J_NOEXCEPT __attribute__((pure));           \
  int p##mallctl(const char *name, void *oldp, size_t *oldlenp, void *newp, size_t newlen)         \
      THERMALLOC_J_NOEXCEPT;                                                                       \
  int p##mallctlnametomib(const char *name, size_t *mibp, size_t *miblenp) THERMALLOC_J_NOEXCEPT;  \
  int p##mallctlbymib(const size_t *mib, size_t miblen, void *oldp, size_t *oldlenp, void *newp,   \
                      size_t newlen) THERMALLOC_J_NOEXCEPT;                                        \
  void p##malloc_stats_print(void (*write_cb)(void *, const char *), void *cbopaque,               \
                             const char *opts) THERMALLOC_J_NOEXCEPT;                              \
  extern const char *p##malloc_conf;                                                               \
  extern void (*p##malloc_message)(void *cbopaque, const char *s)

/* The standard functions, with a prefix. */
#define THERMALLOC_J_STANDARD(p)                                                                    \
  void *p##malloc(size_t size) THERMALLOC_J_NOEXCEPT THERMALLOC_J_ALLOCATES(1);                    \
  void *p##calloc(size_t num, size_t size) THERMALLOC_J_NOEXCEPT THERMALLOC_J_ALLOCATES(1, 2);     \
  int p##posix_memalign(void **memptr, size_t alignment, size_t size) THERMALLOC_J_NOEXCEPT        \
      __attribute__((nonnull(1), warn_unused_result));                                             \
  void *p##aligned_alloc(size_t alignment, size_t size) THERMALLOC_J_NOEXCEPT                      \
      THERMALLOC_J_ALLOCATES(2);                                                                   \
  void *p##realloc(void *ptr, size_t size) THERMALLOC_J_NOEXCEPT                                   \
      __attribute__((alloc_size(2), warn_unused_result));                                          \
  void p##free(void *ptr) THERMALLOC_J_NOEXCEPT;                                                   \
  void p##free_sized(void *ptr, size_t size) THERMALLOC_J_NOEXCEPT;                                \
  void p##free_aligned_sized(void *ptr, size_t alignment, size_t size) THERMALLOC_J_NOEXCEPT;      \
  void *p##memalign(size_t alignment, size_t size) THERMALLOC_J_NOEXCEPT                           \
      THERMALLOC_J_ALLOCATES(2);                                                                   \
  void *p##valloc(size_t size) THERMALLOC_J_NOEXCEPT THERMALLOC_J_ALLOCATES(1);                    \
  void *p##pvalloc(size_t size) THERMALLOC_J_NOEXCEPT __attribute__((malloc, warn_unused_result)); \
  size_t p##malloc_usable_size(void *ptr) THERMALLOC_J_NOEXCEPT

THERMALLOC_J_EXTENDED();
THERMALLOC_J_EXTENDED(je_);
THERMALLOC_J_EXTENDED(jemalloc_);
THERMALLOC_J_STANDARD(je_);
THERMALLOC_J_STANDARD(jemalloc_);

/* What a program may hand to arenas.create and arena.<i>.extent_hooks. Only the types: thermalloc manages
 * its pages itself and refuses hooks with EPERM. */
typedef struct extent_hooks_s extent_hooks_t;
typedef void *(extent_alloc_t)(extent_hooks_t *, void *, size_t, size_t, bool *, bool *, unsigned);
typedef bool(extent_dalloc_t)(extent_hooks_t *, void *, size_t, bool, unsigned);
typedef void(extent_destroy_t)(extent_hooks_t *, void *, size_t, bool, unsigned);
typedef bool(extent_commit_t)(extent_hooks_t *, void *, size_t, size_t, size_t, unsigned);
typedef bool(extent_decommit_t)(extent_hooks_t *, void *, size_t, size_t, size_t, unsigned);
typedef bool(extent_purge_t)(extent_hooks_t *, void *, size_t, size_t, size_t, unsigned);
typedef bool(extent_split_t)(extent_hooks_t *, void *, size_t, size_t, size_t, bool, unsigned);
typedef bool(extent_merge_t)(extent_hooks_t *, void *, size_t, void *, size_t, bool, unsigned);
struct extent_hooks_s {
  extent_alloc_t *alloc;
  extent_dalloc_t *dalloc;
  extent_destroy_t *destroy;
  extent_commit_t *commit;
  extent_decommit_t *decommit;
  extent_purge_t *purge_lazy;
  extent_purge_t *purge_forced;
  extent_split_t *split;
  extent_merge_t *merge;
};

#ifdef __cplusplus
}
#endif
#endif
