/* <jemalloc/jemalloc.h> for programs that were written for jemalloc; see ../../jemalloc.h.
 *
 * Plain names, je_ and jemalloc_ are all there, so source for a build of jemalloc with or without a
 * prefix compiles alike. JEMALLOC_MANGLE makes the plain names those with je_, as in a build with that
 * prefix; the functions are the same. */
#ifndef JEMALLOC_H_
#define JEMALLOC_H_

#include "../../jemalloc.h"

#define JEMALLOC_VERSION "5.3.0-0-g0"
#define JEMALLOC_VERSION_MAJOR 5
#define JEMALLOC_VERSION_MINOR 3
#define JEMALLOC_VERSION_BUGFIX 0
#define JEMALLOC_VERSION_NREV 0
#define JEMALLOC_VERSION_GID "0"
#define JEMALLOC_VERSION_GID_IDENT 0

#define JEMALLOC_USABLE_SIZE_CONST
#define JEMALLOC_OVERRIDE_MEMALIGN
#define JEMALLOC_OVERRIDE_VALLOC
#define LG_SIZEOF_PTR 3

#ifdef JEMALLOC_MANGLE
#define aligned_alloc je_aligned_alloc
#define calloc je_calloc
#define dallocx je_dallocx
#define free je_free
#define mallctl je_mallctl
#define mallctlbymib je_mallctlbymib
#define mallctlnametomib je_mallctlnametomib
#define malloc je_malloc
#define malloc_conf je_malloc_conf
#define malloc_message je_malloc_message
#define malloc_stats_print je_malloc_stats_print
#define malloc_usable_size je_malloc_usable_size
#define mallocx je_mallocx
#define memalign je_memalign
#define nallocx je_nallocx
#define posix_memalign je_posix_memalign
#define rallocx je_rallocx
#define realloc je_realloc
#define sallocx je_sallocx
#define sdallocx je_sdallocx
#define valloc je_valloc
#define xallocx je_xallocx
#endif

#endif
