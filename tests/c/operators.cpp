// Every form of operator new and delete: each pair, alignment, null, and what the language makes of them.
#include "check.h"
#include <malloc.h>
#include <memory>
#include <new>
#include <string>
#include <vector>

static void *block(void *p, size_t size, size_t align) {
  CHECK(p, "operator new(%zu, %zu)", size, align);
  CHECK(is_aligned(p, align), "%zu bytes at %p, align %zu", size, p, align);
  CHECK(malloc_usable_size(p) >= size, "usable %zu < %zu", malloc_usable_size(p), size);
  memset(p, 0x5a, size);
  return p;
}

static void plain(size_t n) {
  ::operator delete(block(::operator new(n), n, 16));
  ::operator delete(block(::operator new(n), n, 16), n);
  ::operator delete(block(::operator new(n, std::nothrow), n, 16), std::nothrow);
  ::operator delete[](block(::operator new[](n), n, 16));
  ::operator delete[](block(::operator new[](n), n, 16), n);
  ::operator delete[](block(::operator new[](n, std::nothrow), n, 16), std::nothrow);
}

static void aligned(size_t n, size_t align) {
  std::align_val_t a{align};
  ::operator delete(block(::operator new(n, a), n, align), a);
  ::operator delete(block(::operator new(n, a), n, align), n, a);
  ::operator delete(block(::operator new(n, a, std::nothrow), n, align), a, std::nothrow);
  ::operator delete[](block(::operator new[](n, a), n, align), a);
  ::operator delete[](block(::operator new[](n, a), n, align), n, a);
  ::operator delete[](block(::operator new[](n, a, std::nothrow), n, align), a, std::nothrow);
}

struct alignas(512) Wide {
  char bytes[700];
};

struct Virtual {
  std::string s = std::string(100, 'v');
  virtual ~Virtual() = default;
};

int main() {
  for (size_t n = 0; n < 5000000; n = n * 3 / 2 + 1) {
    plain(n);
    for (size_t align = 1; align <= 1u << 22; align *= 2) aligned(n, align);
  }
  ::operator delete(nullptr);
  ::operator delete(nullptr, size_t{10});
  ::operator delete(nullptr, std::align_val_t{64});
  ::operator delete(nullptr, size_t{10}, std::align_val_t{64});
  ::operator delete[](nullptr);
  ::operator delete[](nullptr, size_t{10});

  auto wide = std::make_unique<Wide[]>(9);
  CHECK(is_aligned(wide.get(), 512), "new Wide[9] at %p", static_cast<void *>(wide.get()));
  std::vector<Wide> more(33);
  CHECK(is_aligned(more.data(), 512), "vector<Wide> at %p", static_cast<void *>(more.data()));
  std::vector<std::unique_ptr<Virtual>> objects;
  for (int i = 0; i < 1000; i++) objects.push_back(std::make_unique<Virtual>());
  std::shared_ptr<Virtual[]> array(new Virtual[40]);
  // malloc's free takes what operator new gave, and the reverse: programs do it.
  free(::operator new(100));
  ::operator delete(malloc(100));
  return 0;
}
