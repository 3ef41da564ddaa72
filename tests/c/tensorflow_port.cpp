// TensorFlow's platform port with jemalloc (tensorflow/core/platform/posix/port.cc until 1.12, built with
// `--define with_jemalloc=true`), and what TensorFlow asks of it: aligned tensors that come, grow and go on
// many threads.
#define TENSORFLOW_USE_JEMALLOC
#ifdef TENSORFLOW_USE_JEMALLOC
#include "jemalloc/jemalloc.h"
#endif

#include <stdlib.h>

#include <cstring>
#include <thread>
#include <vector>

#include "check.h"

namespace tensorflow {
namespace port {

void* Malloc(size_t size) {
#ifdef TENSORFLOW_USE_JEMALLOC
  return jemalloc_malloc(size);
#else
  return malloc(size);
#endif
}

void* AlignedMalloc(size_t size, int minimum_alignment) {
  void* ptr = nullptr;
  // posix_memalign wants at least a pointer's alignment, which malloc has anyway.
  const int required_alignment = sizeof(void*);
  if (minimum_alignment < required_alignment) return Malloc(size);
#ifdef TENSORFLOW_USE_JEMALLOC
  int err = jemalloc_posix_memalign(&ptr, minimum_alignment, size);
#else
  int err = posix_memalign(&ptr, minimum_alignment, size);
#endif
  return err == 0 ? ptr : nullptr;
}

void* Realloc(void* ptr, size_t size) {
#ifdef TENSORFLOW_USE_JEMALLOC
  return jemalloc_realloc(ptr, size);
#else
  return realloc(ptr, size);
#endif
}

void Free(void* ptr) {
#ifdef TENSORFLOW_USE_JEMALLOC
  jemalloc_free(ptr);
#else
  free(ptr);
#endif
}

void AlignedFree(void* aligned_memory) { Free(aligned_memory); }

}  // namespace port
}  // namespace tensorflow

namespace port = tensorflow::port;

// Allocator::kAllocatorAlignment, with and without AVX-512.
static const int kAlignments[] = {1, 4, 8, 16, 32, 64, 4096};

static void Steps(int seed) {
  std::vector<std::pair<unsigned char*, size_t>> tensors;
  unsigned random = seed;
  for (int step = 0; step < 2000; step++) {
    random = random * 1664525u + 1013904223u;
    size_t size = 1 + (random >> 8) % (step % 50 ? 20000 : 4 << 20);
    int alignment = kAlignments[random % 7];
    auto* p = static_cast<unsigned char*>(port::AlignedMalloc(size, alignment));
    CHECK(p && is_aligned(p, alignment), "%zu %d", size, alignment);
    std::memset(p, step, size);
    tensors.emplace_back(p, size);
    if (step % 5 == 0) {
      auto& last = tensors.back();
      last.first = static_cast<unsigned char*>(port::Realloc(last.first, 2 * last.second));
      CHECK(last.first, "%zu", last.second);
    }
    for (auto& tensor : tensors) CHECK(tensor.first[0] == tensor.first[tensor.second - 1], "step %d", step);
    if (tensors.size() > 40) {
      port::AlignedFree(tensors.front().first);
      tensors.erase(tensors.begin());
    }
  }
  for (auto& tensor : tensors) port::Free(tensor.first);
}

int main() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) threads.emplace_back(Steps, i);
  for (auto& thread : threads) thread.join();
  CHECK(!port::AlignedMalloc(beyond, 64) && !port::Malloc(most), "more than there is");
  port::Free(nullptr);
  // The rest of the program's memory is of the same allocator: what one hands out the other takes.
  free(port::Malloc(100));
  port::Free(malloc(100));
  delete static_cast<char*>(port::Malloc(10));
  return 0;
}
