/* Two mistakes and a leak, found through the functions that only the simulated driver has. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct stream *stream_t;
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuCtxSynchronize(void);
int cuStreamCreate(stream_t *, unsigned);
int cuStreamDestroy_v2(stream_t);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemsetD8Async(uint64_t, unsigned char, size_t, stream_t);
int cuGetProcAddress(const char *, void **, int, uint64_t);
uint64_t thermalloc_cuda_sim_mistakes(void);
uint64_t thermalloc_cuda_sim_leaks(void);
uint64_t thermalloc_cuda_sim_used_bytes(uint32_t);
uint64_t thermalloc_cuda_sim_calls(const char *);
void thermalloc_cuda_sim_other_process(uint32_t, uint64_t);
_Bool thermalloc_cuda_sim_fail(const char *, uint64_t, uint64_t, uint32_t);
_Bool thermalloc_cuda_sim_text(size_t, char *, int);

static void good(int code)
{
	if (code != 0) {
		fprintf(stderr, "code %d\n", code);
		exit(1);
	}
}

int main(void)
{
	void *context;
	stream_t one, two;
	uint64_t kept, freed;
	int (*release)(uint64_t);
	char text[256];

	good(cuInit(0));
	good(cuDevicePrimaryCtxRetain(&context, 0));
	good(cuCtxSetCurrent(context));
	good(cuStreamCreate(&one, 1));
	good(cuStreamCreate(&two, 1));
	good(cuMemAlloc_v2(&kept, 4096));
	good(cuMemAlloc_v2(&freed, 4096));
	good(cuMemsetD8Async(kept, 1, 4096, one));
	good(cuMemsetD8Async(kept, 2, 4096, two));
	good(cuGetProcAddress("cuMemFree", (void **)&release, 12000, 0));
	good(release(freed));
	if (release(freed) == 0)
		return 2;
	good(cuCtxSynchronize());
	good(cuStreamDestroy_v2(one));
	good(cuStreamDestroy_v2(two));
	if (!thermalloc_cuda_sim_fail("cuMemAlloc_v2", 0, 1, 999) || thermalloc_cuda_sim_fail("cuNothing", 0, 1, 999))
		return 3;
	if (cuMemAlloc_v2(&freed, 4096) != 999)
		return 4;
	thermalloc_cuda_sim_other_process(0, 1 << 30);
	if (cuMemAlloc_v2(&freed, 4096) != 2)
		return 5;
	printf("mistakes %d leaks %d used %d allocations %d\n", (int)thermalloc_cuda_sim_mistakes(),
	       (int)thermalloc_cuda_sim_leaks(), (int)thermalloc_cuda_sim_used_bytes(0),
	       (int)thermalloc_cuda_sim_calls("cuMemAlloc_v2"));
	for (size_t i = 0; thermalloc_cuda_sim_text(i, text, sizeof(text)); i++)
		puts(text);
	return 0;
}
