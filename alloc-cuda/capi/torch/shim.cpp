// PyTorch's CUDAPluggableAllocator over libthermalloc_cuda. In C++, since PyTorch does not check for a
// null pointer: a failure has to be an exception; and since it passes a std::function.

#include "thermalloc/cuda.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

typedef struct CUstream_st *cudaStream_t;

extern "C" {

// By value in two registers, as c10's.
struct MempoolId {
	unsigned long long first, second;
};

}

static int filter_call(void *context, void *stream)
{
	auto *filter = static_cast<std::function<bool(cudaStream_t)> *>(context);
	return (*filter)(static_cast<cudaStream_t>(stream));
}

static void filter_drop(void *context)
{
	delete static_cast<std::function<bool(cudaStream_t)> *>(context);
}

[[noreturn]] static void fail()
{
	// Programs look for these words to free memory and try again.
	throw std::runtime_error(std::string("CUDA out of memory. ") + thermalloc_cuda_last_error());
}

extern "C" {

void *thermalloc_torch_alloc(size_t size, int device, cudaStream_t stream)
{
	if (size == 0)
		return nullptr;
	void *ptr = thermalloc_cuda_alloc(size, device, stream);
	if (ptr == nullptr)
		fail();
	return ptr;
}

void thermalloc_torch_free(void *ptr, size_t, int device, cudaStream_t)
{
	thermalloc_cuda_free(ptr, device);
}

// A device's pool is made at its first use: a process need not have a context on every device.
void thermalloc_torch_init(int)
{
}

// torch.cuda.empty_cache().
void thermalloc_torch_reset(void)
{
	for (int device = 0; device < 64; device++)
		thermalloc_cuda_trim(device, 0);
}

void thermalloc_torch_memory_fraction(double fraction, int device)
{
	if (thermalloc_cuda_set_fraction(device, fraction) != 0)
		throw std::runtime_error(thermalloc_cuda_last_error());
}

void *thermalloc_torch_base_alloc(void *ptr, size_t *size)
{
	int device = thermalloc_cuda_device_of(ptr);
	if (size != nullptr)
		*size = device < 0 ? 0 : thermalloc_cuda_usable_size(ptr, device);
	return ptr;
}

void thermalloc_torch_record_stream(void *ptr, cudaStream_t stream)
{
	int device = thermalloc_cuda_device_of(ptr);
	if (device >= 0)
		thermalloc_cuda_record_use(ptr, device, stream);
}

void thermalloc_torch_begin_allocate_to_pool(int device, MempoolId id,
                                             std::function<bool(cudaStream_t)> *filter)
{
	void *context = nullptr;
	if (filter != nullptr && *filter)
		context = new std::function<bool(cudaStream_t)>(*filter);
	thermalloc_cuda_begin_pool(device, id.first, id.second, context ? filter_call : nullptr, context,
	                           context ? filter_drop : nullptr);
}

void thermalloc_torch_end_allocate_to_pool(int device, MempoolId id)
{
	thermalloc_cuda_end_pool(device, id.first, id.second);
}

void thermalloc_torch_release_pool(int device, MempoolId id)
{
	thermalloc_cuda_release_pool(device, id.first, id.second);
}

}
