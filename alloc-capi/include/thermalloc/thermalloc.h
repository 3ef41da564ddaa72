/* thermalloc's C interface.
 *
 * libthermalloc replaces the C library's allocator and C++'s operators new and delete, by preload or
 * by linking. Of what it exports, the functions below are declared by the C library's headers (or by
 * <new>) and only listed here; the rest is declared below.
 *
 *   <stdlib.h>  malloc calloc realloc reallocarray free posix_memalign aligned_alloc
 *   <malloc.h>  memalign valloc pvalloc malloc_usable_size malloc_trim mallopt mallinfo mallinfo2
 *               malloc_stats malloc_info
 *   <new>       every operator new, new[], delete, delete[]: plain, nothrow, sized, aligned
 *   <dlfcn.h>   dlopen: as the system's, without RTLD_DEEPBIND (option strip_deepbind)
 *   <unistd.h>  vfork: as the system's; its child may allocate before it execs
 *   no header   __libc_malloc __libc_calloc __libc_realloc __libc_free __libc_memalign
 *               __libc_valloc __libc_pvalloc __posix_memalign __vfork
 */
#ifndef THERMALLOC_H
#define THERMALLOC_H

#include <malloc.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#ifdef __cplusplus
#define THERMALLOC_NOEXCEPT noexcept
extern "C" {
#else
#define THERMALLOC_NOEXCEPT
#endif

/* C23. `size` (and `align`) are those of the request; ptr may be null. errno is kept. */
void free_sized(void *ptr, size_t size) THERMALLOC_NOEXCEPT;
void free_aligned_sized(void *ptr, size_t align, size_t size) THERMALLOC_NOEXCEPT;

/* jemalloc's sized free; `flags` as for its kin in <thermalloc/jemalloc.h>. */
void sdallocx(void *ptr, size_t size, int flags) THERMALLOC_NOEXCEPT;

/* SVID's free(). */
void cfree(void *ptr) THERMALLOC_NOEXCEPT;

/* Takes a piece of a report. */
typedef void (*thermalloc_sink)(void *ctx, const unsigned char *bytes, size_t len);

/* The table through which other libraries of the process reach the allocator. Refer to it weakly, or
 * find it with dlsym(RTLD_DEFAULT, "thermalloc_host_v1"), and look at `size` before you use a field
 * beyond `report`: fields are only ever added at the end. The functions may be called from any
 * thread at any time and do not allocate. */
struct thermalloc_host_v1 {
  uint32_t size;    /* bytes of this table */
  uint32_t version; /* 1; greater where fields were added */
  /* The option's value in force as text, without a NUL: its length, of which at most out_len bytes
   * were written; -1 where no option has the name. */
  ptrdiff_t (*option_read)(const char *name, size_t name_len, char *out, size_t out_len);
  /* 0, ENOENT (no such option), EPERM (it can only be set at start) or EINVAL (not a value of it). */
  int32_t (*option_write)(const char *name, size_t name_len, const char *value, size_t value_len);
  /* The number of statistics. */
  size_t (*stat_count)(void);
  /* A statistic's name; null beyond the last. */
  const char *(*stat_name)(size_t index);
  /* Writes up to `count` figures of one snapshot, from statistic `first` on; how many. */
  size_t (*stat_read)(size_t first, size_t count, uint64_t *out);
  /* Gives free pages back to the kernel at once; 0 where there were none. */
  size_t (*purge)(void);
  /* Writes a report, whole lines: format 0 text, 1 JSON, 2 malloc_info's XML, 3 Prometheus. 0, or EINVAL. */
  int32_t (*report)(thermalloc_sink sink, void *ctx, uint32_t format);
};
extern const struct thermalloc_host_v1 thermalloc_host_v1;

#ifdef __cplusplus
}
#endif
#endif
