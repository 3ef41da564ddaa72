/* A C program on the device pool. Says what failed and returns 1. */
#include "thermalloc/cuda.h"

#include "must.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t stat(int device, const char *name)
{
	uint64_t values[128];
	size_t n = thermalloc_cuda_stats(device, values, 128);
	for (size_t i = 0; i < n; i++)
		if (strcmp(thermalloc_cuda_stat_name(i), name) == 0)
			return values[i];
	return UINT64_MAX;
}

static int no_driver(void)
{
	MUST(thermalloc_cuda_alloc(4096, 0, NULL) == NULL);
	MUST(strstr(thermalloc_cuda_last_error(), "libcuda.so") != NULL);
	MUST(thermalloc_cuda_init(0, NULL) == -1);
	MUST(thermalloc_cuda_pinned_alloc(4096, 0) == NULL);
	MUST(thermalloc_cuda_stats(0, NULL, 0) == 0);
	MUST(thermalloc_cuda_trim(0, 0) == 0);
	MUST(thermalloc_cuda_device_of(&stat) == -1);
	MUST(thermalloc_cuda_default_pool_keep(0, 1) == -1);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "no-driver") == 0)
		return no_driver();
	MUST(thermalloc_cuda_init(0, "nonsense:1") == -1);
	MUST(thermalloc_cuda_init(0, "limit_bytes:256M,wait_ms:50,history:100") == 0);
	void *a = thermalloc_cuda_alloc(1000, 0, NULL);
	void *b = thermalloc_cuda_alloc(3 << 20, 0, NULL);
	MUST(a != NULL && b != NULL && a != b);
	MUST(thermalloc_cuda_device_of(a) == 0);
	MUST(thermalloc_cuda_usable_size(a, 0) == 1024);
	MUST(stat(0, "requested_bytes") == 1000 + (3 << 20));
	MUST(thermalloc_cuda_free(a, 0) == 0);
	MUST(thermalloc_cuda_free(a, 0) == -1);
	MUST(strstr(thermalloc_cuda_last_error(), "freed before") != NULL);
	MUST(thermalloc_cuda_free(&argc, 0) == -1);
	MUST(thermalloc_cuda_free(NULL, 0) == 0);
	void *again = thermalloc_cuda_alloc(1000, 0, NULL);
	MUST(again == a);
	/* Beyond the limit: an error that tells. */
	MUST(thermalloc_cuda_alloc(300 << 20, 0, NULL) == NULL);
	MUST(strstr(thermalloc_cuda_last_error(), "300.00 MiB asked for") != NULL);
	MUST(strstr(thermalloc_cuda_last_error(), "limit 256.00 MiB") != NULL);
	MUST(thermalloc_cuda_set_limit(0, 0) == 0);
	void *large = thermalloc_cuda_alloc(300 << 20, 0, NULL);
	MUST(large != NULL);
	MUST(thermalloc_cuda_free(large, 0) == 0);
	MUST(thermalloc_cuda_free(b, 0) == 0);
	MUST(thermalloc_cuda_set_fraction(0, 2.0) == -1);
	thermalloc_cuda_poll(0);
	MUST(thermalloc_cuda_trim(0, 0) > (300 << 20));
	void *cupy = thermalloc_cuda_cupy_malloc(NULL, 5000, 0);
	MUST(cupy != NULL);
	thermalloc_cuda_cupy_free(NULL, cupy, 0);
	void *pinned = thermalloc_cuda_pinned_alloc(100000, 0);
	MUST(pinned != NULL);
	memset(pinned, 1, 100000);
	MUST(thermalloc_cuda_pinned_free(pinned, 0) == 0);
	MUST(thermalloc_cuda_pinned_free(pinned, 0) == -1);
	MUST(thermalloc_cuda_default_pool_keep(0, 123 << 20) == 0);
	uint64_t pool[5];
	MUST(thermalloc_cuda_default_pool_stats(0, pool) == 0 && pool[4] == 123 << 20);
	size_t bytes = thermalloc_cuda_report(0, NULL, 0);
	char *text = calloc(1, bytes + 1);
	MUST(thermalloc_cuda_report(0, text, bytes) == bytes && strstr(text, "ooms") != NULL);
	free(text);
	if (argc > 1) {
		bytes = thermalloc_cuda_snapshot(0, NULL, 0);
		char *pickle = malloc(bytes);
		MUST(thermalloc_cuda_snapshot(0, pickle, bytes) == bytes);
		FILE *file = fopen(argv[1], "wb");
		MUST(file != NULL && fwrite(pickle, 1, bytes, file) == bytes && fclose(file) == 0);
		free(pickle);
	}
	return thermalloc_cuda_free(again, 0);
}
