// Calls the PyTorch entry points as PyTorch does: by addresses, with its signatures.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

typedef struct CUstream_st *cudaStream_t;
struct MempoolId { unsigned long long first, second; };

#define MUST(what)                                                                                  \
	do {                                                                                        \
		if (!(what)) {                                                                      \
			fprintf(stderr, "line %d: %s\n", __LINE__, #what);                          \
			return 1;                                                                   \
		}                                                                                   \
	} while (0)

static void *library;

// torch.cuda.memory.CUDAPluggableAllocator takes integers.
template <class F> static std::function<F> address(const char *name)
{
	auto integer = reinterpret_cast<unsigned long long>(dlsym(library, name));
	if (integer == 0)
		throw std::logic_error(name);
	return reinterpret_cast<F *>(integer);
}

extern "C" int cuStreamCreate(cudaStream_t *, unsigned);
extern "C" int cuDevicePrimaryCtxRetain(void **, int);
extern "C" int cuCtxSetCurrent(void *);

int main()
{
	library = dlopen("libthermalloc_cuda_torch.so", RTLD_NOW);
	if (library == nullptr) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	auto alloc = address<void *(size_t, int, cudaStream_t)>("thermalloc_torch_alloc");
	auto release = address<void(void *, size_t, int, cudaStream_t)>("thermalloc_torch_free");
	auto init = address<void(int)>("thermalloc_torch_init");
	auto reset = address<void()>("thermalloc_torch_reset");
	auto fraction = address<void(double, int)>("thermalloc_torch_memory_fraction");
	auto base = address<void *(void *, size_t *)>("thermalloc_torch_base_alloc");
	auto record = address<void(void *, cudaStream_t)>("thermalloc_torch_record_stream");
	typedef std::function<bool(cudaStream_t)> Filter;
	auto begin = address<void(int, MempoolId, Filter *)>("thermalloc_torch_begin_allocate_to_pool");
	auto end = address<void(int, MempoolId)>("thermalloc_torch_end_allocate_to_pool");
	auto drop = address<void(int, MempoolId)>("thermalloc_torch_release_pool");

	init(1);
	cudaStream_t one = nullptr, two = nullptr;
	void *first = alloc(1 << 20, 0, nullptr);
	void *context = nullptr;
	MUST(cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
	MUST(cuStreamCreate(&one, 1) == 0 && cuStreamCreate(&two, 1) == 0);
	release(first, 1 << 20, 0, nullptr);
	MUST(alloc(0, 0, one) == nullptr);

	void *ptr = alloc(5 << 20, 0, one);
	size_t size = 0;
	MUST(base(ptr, &size) == ptr && size == 5 << 20);
	record(ptr, two);
	release(ptr, 5 << 20, 0, one);
	// Stream two may still use it: stream one gets another block.
	void *other = alloc(5 << 20, 0, one);
	MUST(other != ptr);
	release(other, 5 << 20, 0, one);

	// Out of memory is an exception with the words that programs look for.
	fraction(0.25, 0);
	std::string text;
	try {
		alloc(1ull << 40, 0, one);
	} catch (const std::exception &error) {
		text = error.what();
	}
	MUST(text.find("CUDA out of memory") == 0);
	MUST(text.find("1.00 TiB asked for") != std::string::npos);
	bool refused = false;
	try {
		fraction(7.0, 0);
	} catch (const std::exception &) {
		refused = true;
	}
	MUST(refused);

	// A graph's pool: only the streams that the filter takes, and its memory serves nobody else.
	int asked = 0;
	MempoolId id = {0, 7};
	{
		Filter filter = [&](cudaStream_t stream) { asked++; return stream == one; };
		begin(0, id, &filter);
	}
	void *captured = alloc(3 << 20, 0, one);
	void *outside = alloc(3 << 20, 0, two);
	MUST(asked >= 2);
	end(0, id);
	release(captured, 3 << 20, 0, one);
	void *later = alloc(3 << 20, 0, one);
	MUST(later != captured);
	drop(0, id);
	release(later, 3 << 20, 0, one);
	release(outside, 3 << 20, 0, two);
	reset();
	return 0;
}
