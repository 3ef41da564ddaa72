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

/* Memory of a device, for the profiler's ledger. */
struct thermalloc_device_block {
  size_t struct_bytes; /* bytes of this struct */
  uint64_t address;
  uint64_t size;   /* bytes asked for */
  uint64_t usable; /* bytes given */
  uint64_t stream; /* the stream in whose order it is used */
  uint32_t device; /* the device's ordinal */
  uint32_t space;  /* 1 device, 2 pinned host, 3 managed memory */
  const char *user; /* who uses it, where that is known better than by scopes, or null */
  size_t user_bytes;
};

/* A library that goes with the allocator and has a thread of its own, which the background thread wakes
 * each time it looks: a private futex. Zeros but for struct_bytes; it stays as long as the process. */
struct thermalloc_companion {
  size_t struct_bytes; /* sizeof(struct thermalloc_companion) */
  void *next;          /* the allocator's own */
  uint32_t looks;      /* one more at each look */
  uint32_t reserved;
};

/* A pool of device memory, for whoever looks at the process from outside. */
struct thermalloc_device_pool {
  size_t struct_bytes; /* bytes of this struct */
  uint64_t id;     /* what tells it from all others of the process; not 0 */
  uint32_t device; /* the device's ordinal */
  uint32_t space;  /* 1 device, 2 pinned host, 3 managed memory */
  uint64_t live_bytes;    /* blocks in use, with their rounding */
  uint64_t pending_bytes; /* blocks given back that a stream still uses */
  uint64_t free_bytes;    /* free memory */
  uint64_t held_bytes;    /* the memory that it has */
  uint64_t peak_bytes;    /* the most that it had; 0: the pool is no more */
  const char *name;       /* or null */
  size_t name_bytes;
};

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
  /* Enters memory of a device into the profiler's ledger: what to give to device_free, or 0 where it is
   * not recorded. */
  uint64_t (*device_alloc)(const struct thermalloc_device_block *block);
  /* Takes it off again; pending not 0: a stream still uses it, and a second call will follow. */
  void (*device_free)(uint64_t handle, uint64_t stream, uint32_t pending);
  /* Lets the background thread set a companion's pace: 0, or EINVAL. */
  int32_t (*companion_add)(struct thermalloc_companion *companion);
  /* Says what a pool of device memory holds, as often as it likes: 0, EINVAL, or ENOSPC where there are too
   * many. */
  int32_t (*device_pool)(const struct thermalloc_device_pool *pool);
};
extern const struct thermalloc_host_v1 thermalloc_host_v1;

/* The profiler (option prof). Scopes say what the calling thread allocates memory for; all of these
 * do nothing while the profiler is off.
 *
 * A name that is a component's (weights, activations, gradients, optimizer, kv_cache, workspace,
 * framework, python, loader, other), or begins with one before a colon or a slash, says what its
 * memory is used for. A token may be given to any thread at any time. */

/* Opens a scope within the present one; the token of the one before, for thermalloc_scope_pop. */
uint32_t thermalloc_scope_push(const char *name) THERMALLOC_NOEXCEPT;
/* Ends a scope: back to the one that push or attach returned. */
void thermalloc_scope_pop(uint32_t token) THERMALLOC_NOEXCEPT;
/* The scope that the thread is in, to be attached by another thread. */
uint32_t thermalloc_scope_capture(void) THERMALLOC_NOEXCEPT;
/* Enters a captured scope; the token of the one before, for thermalloc_scope_pop. */
uint32_t thermalloc_scope_attach(uint32_t token) THERMALLOC_NOEXCEPT;
/* A step of the program's work begins: a batch, a request. */
void thermalloc_scope_step(uint64_t number) THERMALLOC_NOEXCEPT;
/* Gives a live block another scope, if it was recorded: 1, else 0. */
int thermalloc_scope_mark(void *ptr, uint32_t token) THERMALLOC_NOEXCEPT;
/* Writes a profile to a new file, or by the option prof_prefix where path is null. 0, ENOTSUP (the
 * profiler is off), EBUSY (another is being written), or why the file can't be written. */
int thermalloc_prof_dump(const char *path) THERMALLOC_NOEXCEPT;

#ifdef __cplusplus
}
#endif
#endif
