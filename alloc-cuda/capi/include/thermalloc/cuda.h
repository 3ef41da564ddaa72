/* thermalloc's device pool: memory of a CUDA device that is reused in stream order.
 *
 * A stream is a CUstream or a cudaStream_t; NULL is the legacy default stream, and the special
 * handles 1 and 2 mean what they mean to the driver. A device's pool is made at its first use, with
 * the settings of THERMALLOC_CUDA_CONF (docs/cuda.md), and lives as long as the process. Functions
 * may be called from any thread. A failure is NULL or -1; thermalloc_cuda_last_error tells why.
 * Nothing here aborts where there is no driver.
 */
#ifndef THERMALLOC_CUDA_H
#define THERMALLOC_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the pool with further settings ("limit_percent:80,backing:plain"); NULL for none. An existing
 * pool stays as it is. */
int thermalloc_cuda_init(int device, const char *conf);

/* A block of at least `bytes`, aligned to 512, for work submitted to `stream`. */
void *thermalloc_cuda_alloc(size_t bytes, int device, void *stream);

/* Gives a block back. No work submitted later may use it; work submitted before to the stream that
 * it was allocated on, and to those recorded, may. */
int thermalloc_cuda_free(void *ptr, int device);

/* The same in the order of `stream`, which waits for what the block's own stream did with it. */
int thermalloc_cuda_free_on(void *ptr, int device, void *stream);

/* Another stream uses the block until it is freed. */
int thermalloc_cuda_record_use(void *ptr, int device, void *stream);

/* Another stream's last use of the block has been submitted: what it does later is not waited for. */
int thermalloc_cuda_end_use(void *ptr, int device, void *stream);

/* To be called before a stream is destroyed, since another may get its handle. */
int thermalloc_cuda_forget_stream(int device, void *stream);

int thermalloc_cuda_device_of(void *ptr);
size_t thermalloc_cuda_usable_size(void *ptr, int device);

/* Gives complete free memory back until keep_bytes are left; returns the bytes that went. */
size_t thermalloc_cuda_trim(int device, size_t keep_bytes);
void thermalloc_cuda_poll(int device);
int thermalloc_cuda_set_limit(int device, size_t bytes);        /* 0: none */
int thermalloc_cuda_set_fraction(int device, double fraction);  /* of the device, 0 to 1 */
int thermalloc_cuda_set_wait(int device, uint64_t ms);          /* 0: an allocation never waits */

/* Statistics: rows by number. thermalloc_cuda_stats writes the first `count` and returns how many. */
size_t thermalloc_cuda_stat_count(void);
const char *thermalloc_cuda_stat_name(size_t index);
size_t thermalloc_cuda_stats(int device, uint64_t *out, size_t count);

/* Both return the bytes that there are, of which at most `room` were written; no final NUL. The
 * snapshot is a pickle that PyTorch's memory viewer reads. */
size_t thermalloc_cuda_report(int device, void *out, size_t room);
size_t thermalloc_cuda_snapshot(int device, void *out, size_t room);

const char *thermalloc_cuda_last_error(void);

/* Private pools, for graph capture: from begin to end, allocations of the streams that the filter
 * takes come from the pool (first, second), and its memory serves nobody else until it was released
 * once for each begin. Any thread may call the filter; `drop` is called when nobody does any more. */
typedef int (*thermalloc_cuda_filter)(void *context, void *stream);
int thermalloc_cuda_begin_pool(int device, uint64_t first, uint64_t second,
                               thermalloc_cuda_filter filter, void *context, void (*drop)(void *));
int thermalloc_cuda_end_pool(int device, uint64_t first, uint64_t second);
int thermalloc_cuda_release_pool(int device, uint64_t first, uint64_t second);

/* Pinned host memory near the device. */
void *thermalloc_cuda_pinned_alloc(size_t bytes, int device);
void thermalloc_cuda_pinned_record_use(void *ptr, int device, void *stream);
int thermalloc_cuda_pinned_free(void *ptr, int device);

/* The device's default pool of the driver, which TensorFlow (TF_GPU_ALLOCATOR=cuda_malloc_async) and
 * JAX use. stats: reserved, its peak, used, its peak, threshold. */
int thermalloc_cuda_default_pool_keep(int device, size_t bytes);
int thermalloc_cuda_default_pool_stats(int device, uint64_t out[5]);

/* CuPy: cupy.cuda.CFunctionAllocator(0, malloc, free, owner). */
void *thermalloc_cuda_cupy_malloc(void *param, size_t bytes, int device);
void thermalloc_cuda_cupy_free(void *param, void *ptr, int device);

#ifdef __cplusplus
}
#endif
#endif
