// Stacks through constructors, templates, exceptions and the standard library.
#include "prof.h"
#include <algorithm>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static std::vector<void *> *kept;

static __attribute__((noinline)) void here(size_t size) {
  void *p = ::operator new(size);
  kept->push_back(p);
  tell_stack(p, size);
}

struct Object {
  explicit Object(int n) {
    if (n) inner = std::make_unique<Object>(n - 1);
    else here(123);
  }
  ~Object() {
    if (!inner) here(321);
  }
  std::unique_ptr<Object> inner;
};

template <int N, typename T> static __attribute__((noinline)) void visit(T f) {
  if constexpr (N > 0) visit<N - 1>([&] { f(); });
  else f();
}

int main() {
  kept = new std::vector<void *>;
  kept->reserve(1000);
  { Object object(5); }
  visit<4>([] { here(1000); });
  std::function<void(int)> f = [&](int n) { n ? f(n - 1) : here(2000); };
  f(10);
  std::vector<int> numbers{5, 3, 4, 1, 2};
  bool once = true;
  std::sort(numbers.begin(), numbers.end(), [&](int a, int b) {
    if (once) here(3000);
    once = false;
    return a < b;
  });
  try {
    try {
      throw std::runtime_error("an error with a text that is not short");
    } catch (...) {
      here(4000);
      throw;
    }
  } catch (const std::exception &) {
    here(5000);
  }
  std::thread([&] { f(3); }).join();
  dump();
  _exit(0);
}
