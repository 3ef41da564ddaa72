/* A program that knows the runtime only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *);
int cudaMallocHost(void **, size_t);
int cudaFreeHost(void *);
int cudaMallocManaged(void **, size_t, unsigned);
int cudaMemGetInfo(size_t *, size_t *);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaMemcpy(void *, const void *, size_t, int);
int cudaStreamCreate(void **);
int cudaStreamDestroy(void *);
int cudaDeviceSynchronize(void);
const char *cudaGetErrorString(int);

static void good(int error)
{
	if (error != 0) {
		fprintf(stderr, "%s\n", cudaGetErrorString(error));
		exit(1);
	}
}

int main(void)
{
	void *stream, *device, *block, *host, *managed;
	unsigned char back[4096];
	size_t before, after, total;

	good(cudaMemGetInfo(&before, &total));
	good(cudaStreamCreate(&stream));
	good(cudaMalloc(&device, 4 << 20));
	good(cudaMallocAsync(&block, 4096, stream));
	good(cudaMallocHost(&host, 4096));
	good(cudaMallocManaged(&managed, 4096, 1));
	good(cudaMemsetAsync(device, 7, 4096, stream));
	good(cudaMemsetAsync(managed, 9, 4096, stream));
	good(cudaMemcpy(back, device, 4096, 2));
	if (back[0] != 7 || back[4095] != 7 || ((unsigned char *)managed)[4095] != 9)
		return 2;
	memset(host, 1, 4096);
	good(cudaFreeAsync(block, stream));
	good(cudaFree(managed));
	good(cudaFree(device));
	good(cudaFreeHost(host));
	good(cudaStreamDestroy(stream));
	good(cudaDeviceSynchronize());
	good(cudaMemGetInfo(&after, &total));
	if (cudaMalloc(&device, 2 * total) != 2)
		return 3;
	return before == after ? 0 : 4;
}
