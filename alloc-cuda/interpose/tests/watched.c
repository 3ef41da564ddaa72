/* Memory by all ways: the runtime, a symbol that is linked, dlsym, cuGetProcAddress. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MUST(what)                                                                                  \
	do {                                                                                        \
		if (!(what)) {                                                                      \
			fprintf(stderr, "line %d: %s\n%s", __LINE__, #what, text);                  \
			return 1;                                                                   \
		}                                                                                   \
	} while (0)

int cudaMalloc(void **, size_t), cudaFree(void *), cudaMallocAsync(void **, size_t, void *);
int cudaFreeAsync(void *, void *), cudaMallocHost(void **, size_t), cudaFreeHost(void *);
int cudaMallocManaged(void **, size_t, unsigned);
int cuMemAlloc_v2(uint64_t *, size_t), cuMemFree_v2(uint64_t);

static char text[4096];
static size_t (*report)(void *, size_t);
static uint64_t (*bytes)(unsigned);

/* Blocks in the ledger of libthermalloc, of which these are the fields that this needs. */
struct host {
	uint32_t size, version;
	void *option_read, *option_write;
	size_t (*stat_count)(void);
	const char *(*stat_name)(size_t);
	size_t (*stat_read)(size_t, size_t, uint64_t *);
};

static uint64_t entered(const struct host *host)
{
	uint64_t value = UINT64_MAX;
	for (size_t i = 0; i < host->stat_count(); i++)
		if (strcmp(host->stat_name(i), "prof_live_blocks") == 0)
			host->stat_read(i, 1, &value);
	return value;
}

static int is_entered(void)
{
	const struct host *host = dlsym(RTLD_DEFAULT, "thermalloc_host_v1");
	void *device, *pinned;
	MUST(host != NULL && cudaMalloc(&device, 32 << 20) == 0 && cudaFree(device) == 0);
	uint64_t before = entered(host);
	MUST(cudaMalloc(&device, 32 << 20) == 0 && entered(host) == before + 1);
	MUST(cudaMallocHost(&pinned, 16 << 20) == 0 && entered(host) >= before + 2);
	MUST(cudaFree(device) == 0 && cudaFreeHost(pinned) == 0 && entered(host) == before);
	return 0;
}

enum { DEVICE, POOL, PHYSICAL, MANAGED, PINNED };

int main(int argc, char **argv)
{
	*(void **)&report = dlsym(RTLD_DEFAULT, "thermalloc_cuda_watch_report");
	*(void **)&bytes = dlsym(RTLD_DEFAULT, "thermalloc_cuda_watch_bytes");
	if (argc > 1 && strcmp(argv[1], "unwatched") == 0)
		return report == NULL && bytes == NULL ? 0 : 1;
	MUST(report != NULL && bytes != NULL);
	if (argc > 1 && strcmp(argv[1], "entered") == 0)
		return is_entered();
	void *runtime, *pooled, *pinned, *managed;
	MUST(cudaMalloc(&runtime, 1000) == 0 && bytes(DEVICE) == 1000);
	MUST(cudaMallocAsync(&pooled, 2000, NULL) == 0 && bytes(POOL) == 2000);
	MUST(cudaMallocHost(&pinned, 3000) == 0 && bytes(PINNED) == 3000);
	MUST(cudaMallocManaged(&managed, 4000, 1) == 0 && bytes(MANAGED) == 4000);
	uint64_t linked, looked_up, by_name;
	MUST(cuMemAlloc_v2(&linked, 500) == 0 && bytes(DEVICE) == 1500);
	void *driver = dlopen("libcuda.so.1", RTLD_NOW);
	int (*alloc)(uint64_t *, size_t), (*again)(uint64_t *, size_t), (*release)(uint64_t);
	int (*find)(const char *, void **, int, uint64_t, int *);
	*(void **)&alloc = dlsym(driver, "cuMemAlloc_v2");
	MUST(alloc != NULL && alloc(&looked_up, 50) == 0 && bytes(DEVICE) == 1550);
	*(void **)&find = dlsym(driver, "cuGetProcAddress_v2");
	MUST(find != NULL && find("cuMemAlloc", (void **)&again, 12000, 0, NULL) == 0);
	MUST(find("cuMemFree", (void **)&release, 12000, 0, NULL) == 0);
	MUST(again(&by_name, 5) == 0 && bytes(DEVICE) == 1555);
	MUST(dlsym(driver, "cuNoSuchFunction") == NULL && dlsym(RTLD_DEFAULT, "printf") != NULL);
	report(text, sizeof(text) - 1);
	MUST(strstr(text, "device: 1555 bytes in 4 blocks") != NULL);
	MUST(strstr(text, "  watched: 1555 bytes") != NULL);
	MUST(release(by_name) == 0 && cuMemFree_v2(looked_up) == 0 && cuMemFree_v2(linked) == 0);
	MUST(cudaFree(runtime) == 0 && bytes(DEVICE) == 0);
	MUST(cudaFreeAsync(pooled, NULL) == 0 && bytes(POOL) == 0);
	MUST(cudaFreeHost(pinned) == 0 && bytes(PINNED) == 0);
	MUST(cudaFree(managed) == 0 && bytes(MANAGED) == 0);
	/* A failure is none of the ledger's. */
	MUST(cudaMalloc(&runtime, (size_t)1 << 50) != 0 && bytes(DEVICE) == 0);
	return 0;
}
