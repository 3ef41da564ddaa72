// The failure of operator new in a C++ program; a handler that frees memory makes it succeed.
#include "new_failure.h"
#include <sys/mman.h>
#include <sys/resource.h>

static void *reserve;
static const size_t reserve_bytes = size_t{600} << 20;

static void frees_reserve() {
  ++calls;
  if (!reserve) throw std::bad_alloc();
  munmap(reserve, reserve_bytes);
  reserve = nullptr;
}

static size_t address_space() {
  size_t pages = 0;
  FILE *f = fopen("/proc/self/statm", "r");
  CHECK(f && fscanf(f, "%zu", &pages) == 1, "statm");
  fclose(f);
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

static void retry_succeeds(Form form) {
  reserve = mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(reserve != MAP_FAILED, "mmap");
  rlimit old;
  getrlimit(RLIMIT_AS, &old);
  rlimit tight = old;
  tight.rlim_cur = address_space() + (size_t{100} << 20);
  setrlimit(RLIMIT_AS, &tight);
  std::set_new_handler(frees_reserve);
  calls = 0;
  void *p = form(size_t{400} << 20);
  std::set_new_handler(nullptr);
  setrlimit(RLIMIT_AS, &old);
  CHECK(p && calls == 1, "%p after %d calls of the handler", p, calls);
  ::operator delete(p);
}

int main() {
  new_failure();
  retry_succeeds(throwing[0]);
  return 0;
}
