/* The device pool beside libthermalloc: one ledger, one set of options, one pace. Says what failed and
 * returns 1. The argument says which; libthermalloc is preloaded and set by THERMALLOC_CONF. */
#include "thermalloc/cuda.h"
#include "thermalloc/thermalloc.h"

#include "must.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 64 << 20 };

static const struct thermalloc_host_v1 *host;

static uint64_t reserved(void)
{
	uint64_t values[128];
	size_t n = thermalloc_cuda_stats(0, values, 128);
	for (size_t i = 0; i < n; i++)
		if (strcmp(thermalloc_cuda_stat_name(i), "reserved_bytes") == 0)
			return values[i];
	return UINT64_MAX;
}

/* Blocks that the profiler's ledger has. */
static uint64_t entered(void)
{
	for (size_t i = 0; i < host->stat_count(); i++) {
		uint64_t value;
		if (strcmp(host->stat_name(i), "prof_live_blocks") == 0 && host->stat_read(i, 1, &value) == 1)
			return value;
	}
	return UINT64_MAX;
}

static void pass(int ms)
{
	struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
	nanosleep(&time, NULL);
}

/* Whether the pool gave everything back within some seconds in which the program calls nothing. */
static int cools(void)
{
	for (int i = 0; i < 80; i++) {
		if (reserved() == 0)
			return 1;
		pass(100);
	}
	return 0;
}

static int use_some(void)
{
	void *block = thermalloc_cuda_alloc(BYTES, 0, NULL);
	MUST(block != NULL);
	MUST(thermalloc_cuda_free(block, 0) == 0);
	MUST(reserved() >= BYTES);
	return 0;
}

static int set(const char *name, const char *value)
{
	return host->option_write(name, strlen(name), value, strlen(value));
}

static int ledger(void)
{
	void *per_thread = (void *)2;
	/* The pool's own tables are in the ledger too. */
	MUST(use_some() == 0);
	void *first = thermalloc_cuda_pinned_alloc(BYTES / 2, 0);
	MUST(first != NULL && thermalloc_cuda_pinned_free(first, 0) == 0);
	uint64_t before = entered();
	MUST(before != UINT64_MAX);
	void *device = thermalloc_cuda_alloc(BYTES, 0, NULL);
	MUST(device != NULL && entered() == before + 1);
	void *pinned = thermalloc_cuda_pinned_alloc(BYTES / 2, 0);
	MUST(pinned != NULL && entered() == before + 2);
	/* A stream still uses it: it stays until that is over. */
	MUST(thermalloc_cuda_record_use(device, 0, per_thread) == 0);
	MUST(thermalloc_cuda_free(device, 0) == 0);
	MUST(entered() == before + 2);
	thermalloc_cuda_poll(0);
	MUST(entered() == before + 1);
	MUST(thermalloc_cuda_pinned_free(pinned, 0) == 0);
	MUST(entered() == before);
	return 0;
}

int main(int argc, char **argv)
{
	host = dlsym(RTLD_DEFAULT, "thermalloc_host_v1");
	MUST(argc == 2 && host != NULL && host->size >= sizeof(*host));
	if (strcmp(argv[1], "ledger") == 0)
		return ledger();
	if (strcmp(argv[1], "seen") == 0) {
		void *block = thermalloc_cuda_alloc(BYTES, 0, NULL);
		MUST(block != NULL);
		pass(3500);
		/* Its statistics page stays where it is. */
		_exit(0);
	}
	MUST(use_some() == 0);
	if (strcmp(argv[1], "paced") == 0) {
		MUST(cools());
	} else if (strcmp(argv[1], "no-thread") == 0) {
		pass(2500);
		MUST(reserved() >= BYTES);
		/* It is done at the program's own calls then. */
		for (int i = 0; i < 30 && reserved() > 0; i++) {
			thermalloc_cuda_poll(0);
			pass(100);
		}
		MUST(reserved() == 0);
	} else if (strcmp(argv[1], "live") == 0) {
		pass(1500);
		MUST(reserved() >= BYTES);
		MUST(set("dirty_decay_ms", "0") == 0);
		MUST(cools());
	} else {
		MUST(!"a known argument");
	}
	return 0;
}
