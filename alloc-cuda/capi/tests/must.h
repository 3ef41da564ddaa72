/* Says what failed, and ends the function with 1. */
#include <stdio.h>

#define MUST(what)                                                                                  \
	do {                                                                                        \
		if (!(what)) {                                                                      \
			fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what,                       \
			        thermalloc_cuda_last_error());                                      \
			return 1;                                                                   \
		}                                                                                   \
	} while (0)
