/*
 * A small CUDA runtime for tests: finds the driver as the real one does, by dlopen and cuGetProcAddress,
 * so that what a program allocates through cudaMalloc reaches the driver on the same path.
 *
 * Build: cc -shared -fPIC -Wl,-soname,libcudart.so.12 -o libcudart.so.12 cudart.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef int cuda_error;
typedef uint64_t device_ptr;
typedef struct handle *handle;

enum { SUCCESS = 0, INVALID_VALUE = 1, MEMORY_ALLOCATION = 2, INITIALIZATION_ERROR = 3, NO_DRIVER = 35, UNKNOWN = 999 };
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS };

/* The driver's functions, by the names that cuGetProcAddress is asked for. */
#define DRIVER(X)                                                                                   \
	X(cuInit, (unsigned))                                                                       \
	X(cuDeviceGetCount, (int *))                                                                \
	X(cuDevicePrimaryCtxRetain, (handle *, int))                                                \
	X(cuCtxGetCurrent, (handle *))                                                              \
	X(cuCtxSetCurrent, (handle))                                                                \
	X(cuCtxGetDevice, (int *))                                                                  \
	X(cuCtxSynchronize, (void))                                                                 \
	X(cuMemAlloc, (device_ptr *, size_t))                                                       \
	X(cuMemFree, (device_ptr))                                                                  \
	X(cuMemAllocAsync, (device_ptr *, size_t, handle))                                          \
	X(cuMemFreeAsync, (device_ptr, handle))                                                     \
	X(cuMemAllocManaged, (device_ptr *, size_t, unsigned))                                      \
	X(cuMemHostAlloc, (void **, size_t, unsigned))                                              \
	X(cuMemFreeHost, (void *))                                                                  \
	X(cuMemHostRegister, (void *, size_t, unsigned))                                            \
	X(cuMemHostUnregister, (void *))                                                            \
	X(cuMemGetInfo, (size_t *, size_t *))                                                       \
	X(cuMemsetD8Async, (device_ptr, unsigned char, size_t, handle))                             \
	X(cuMemcpyHtoDAsync, (device_ptr, const void *, size_t, handle))                            \
	X(cuMemcpyDtoHAsync, (void *, device_ptr, size_t, handle))                                  \
	X(cuMemcpyDtoDAsync, (device_ptr, device_ptr, size_t, handle))                              \
	X(cuStreamCreate, (handle *, unsigned))                                                     \
	X(cuStreamDestroy, (handle))                                                                \
	X(cuStreamSynchronize, (handle))                                                            \
	X(cuStreamWaitEvent, (handle, handle, unsigned))                                            \
	X(cuEventCreate, (handle *, unsigned))                                                      \
	X(cuEventDestroy, (handle))                                                                 \
	X(cuEventRecord, (handle, handle))                                                          \
	X(cuEventQuery, (handle))                                                                   \
	X(cuEventSynchronize, (handle))

#define FIELD(name, arguments) int(*name) arguments;
static struct { DRIVER(FIELD) } driver;
static cuda_error loaded = INITIALIZATION_ERROR;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	int (*find)(const char *, void **, int, uint64_t, unsigned *);

	loaded = NO_DRIVER;
	if (library == NULL || (*(void **)&find = dlsym(library, "cuGetProcAddress_v2")) == NULL)
		return;
#define FIND(name, arguments)                                                   \
	if (find(#name, (void **)&driver.name, 12000, 0, NULL) != SUCCESS)      \
		return;
	DRIVER(FIND)
	loaded = driver.cuInit(0);
}

/* The driver's codes of what programs look at are the runtime's. */
static cuda_error code(int result)
{
	return result;
}

/* Makes sure of a driver and of a current context: that of the thread's device. */
static cuda_error ready(void)
{
	handle context = NULL;
	int result;

	pthread_once(&once, load);
	if (loaded != SUCCESS)
		return loaded;
	if ((result = driver.cuCtxGetCurrent(&context)) != SUCCESS || context != NULL)
		return code(result);
	if ((result = driver.cuDevicePrimaryCtxRetain(&context, 0)) != SUCCESS)
		return code(result);
	return code(driver.cuCtxSetCurrent(context));
}

#define CALL(call)                                                \
	do {                                                      \
		cuda_error failed = ready();                        \
		return failed != SUCCESS ? failed : code(call);   \
	} while (0)

cuda_error cudaGetDeviceCount(int *count) { CALL(driver.cuDeviceGetCount(count)); }
cuda_error cudaGetDevice(int *device) { CALL(driver.cuCtxGetDevice(device)); }
cuda_error cudaDeviceSynchronize(void) { CALL(driver.cuCtxSynchronize()); }

cuda_error cudaSetDevice(int device)
{
	handle context = NULL;
	cuda_error failed = ready();

	if (failed != SUCCESS || (failed = driver.cuDevicePrimaryCtxRetain(&context, device)) != SUCCESS)
		return failed;
	return code(driver.cuCtxSetCurrent(context));
}

cuda_error cudaMalloc(void **ptr, size_t bytes) { CALL(driver.cuMemAlloc((device_ptr *)ptr, bytes)); }
cuda_error cudaFree(void *ptr) { CALL(driver.cuMemFree((device_ptr)ptr)); }
cuda_error cudaMallocAsync(void **ptr, size_t bytes, handle stream)
{
	CALL(driver.cuMemAllocAsync((device_ptr *)ptr, bytes, stream));
}
cuda_error cudaFreeAsync(void *ptr, handle stream) { CALL(driver.cuMemFreeAsync((device_ptr)ptr, stream)); }
cuda_error cudaMallocManaged(void **ptr, size_t bytes, unsigned flags)
{
	CALL(driver.cuMemAllocManaged((device_ptr *)ptr, bytes, flags));
}
cuda_error cudaMallocHost(void **ptr, size_t bytes) { CALL(driver.cuMemHostAlloc(ptr, bytes, 0)); }
cuda_error cudaHostAlloc(void **ptr, size_t bytes, unsigned flags) { CALL(driver.cuMemHostAlloc(ptr, bytes, flags)); }
cuda_error cudaFreeHost(void *ptr) { CALL(driver.cuMemFreeHost(ptr)); }
cuda_error cudaHostRegister(void *ptr, size_t bytes, unsigned flags) { CALL(driver.cuMemHostRegister(ptr, bytes, flags)); }
cuda_error cudaHostUnregister(void *ptr) { CALL(driver.cuMemHostUnregister(ptr)); }
cuda_error cudaMemGetInfo(size_t *free_bytes, size_t *total) { CALL(driver.cuMemGetInfo(free_bytes, total)); }

cuda_error cudaMemsetAsync(void *ptr, int value, size_t bytes, handle stream)
{
	CALL(driver.cuMemsetD8Async((device_ptr)ptr, (unsigned char)value, bytes, stream));
}

cuda_error cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, handle stream)
{
	switch (kind) {
	case HOST_TO_DEVICE:
		CALL(driver.cuMemcpyHtoDAsync((device_ptr)to, from, bytes, stream));
	case DEVICE_TO_HOST:
		CALL(driver.cuMemcpyDtoHAsync(to, (device_ptr)from, bytes, stream));
	case DEVICE_TO_DEVICE:
		CALL(driver.cuMemcpyDtoDAsync((device_ptr)to, (device_ptr)from, bytes, stream));
	default:
		return INVALID_VALUE;
	}
}

cuda_error cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
	cuda_error failed = cudaMemcpyAsync(to, from, bytes, kind, NULL);
	return failed != SUCCESS ? failed : code(driver.cuStreamSynchronize(NULL));
}

cuda_error cudaStreamCreate(handle *stream) { CALL(driver.cuStreamCreate(stream, 0)); }
cuda_error cudaStreamCreateWithFlags(handle *stream, unsigned flags) { CALL(driver.cuStreamCreate(stream, flags)); }
cuda_error cudaStreamDestroy(handle stream) { CALL(driver.cuStreamDestroy(stream)); }
cuda_error cudaStreamSynchronize(handle stream) { CALL(driver.cuStreamSynchronize(stream)); }
cuda_error cudaStreamWaitEvent(handle stream, handle event, unsigned flags)
{
	CALL(driver.cuStreamWaitEvent(stream, event, flags));
}
cuda_error cudaEventCreateWithFlags(handle *event, unsigned flags) { CALL(driver.cuEventCreate(event, flags)); }
cuda_error cudaEventDestroy(handle event) { CALL(driver.cuEventDestroy(event)); }
cuda_error cudaEventRecord(handle event, handle stream) { CALL(driver.cuEventRecord(event, stream)); }
cuda_error cudaEventQuery(handle event) { CALL(driver.cuEventQuery(event)); }
cuda_error cudaEventSynchronize(handle event) { CALL(driver.cuEventSynchronize(event)); }

const char *cudaGetErrorString(cuda_error error)
{
	static _Thread_local char text[32];

	snprintf(text, sizeof(text), "CUDA error %d", error);
	return text;
}
