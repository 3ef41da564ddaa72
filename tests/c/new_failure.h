// A failing operator new, every form: [new.delete.single]. Used by the program and by the plugin that
// brings the C++ runtime with it.
#include "check.h"
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

static int calls;
struct Derived : std::bad_alloc {};

static void throws_own() {
  if (++calls >= 3) throw Derived();
}
static void throws_other() { throw std::string("not a bad_alloc"); }
static void unsets_itself() {
  if (++calls >= 2) std::set_new_handler(nullptr);
}
static void replaces_itself() {
  ++calls;
  std::set_new_handler(unsets_itself);
}

static const std::align_val_t wide{128};
using Form = void *(*)(size_t);
static const Form throwing[] = {
    [](size_t n) { return ::operator new(n); },
    [](size_t n) { return ::operator new[](n); },
    [](size_t n) { return ::operator new(n, wide); },
    [](size_t n) { return ::operator new[](n, wide); },
};
static const Form nothrow[] = {
    [](size_t n) { return ::operator new(n, std::nothrow); },
    [](size_t n) { return ::operator new[](n, std::nothrow); },
    [](size_t n) { return ::operator new(n, wide, std::nothrow); },
    [](size_t n) { return ::operator new[](n, wide, std::nothrow); },
};

enum Outcome { RETURNED, BAD_ALLOC, DERIVED, OTHER };

// Destructors between the throw and the catch must run, and callee-saved registers come back.
struct Count {
  int &n;
  explicit Count(int &n) : n(n) {}
  ~Count() { n++; }
};

__attribute__((noinline)) static void *deep(Form form, size_t size, int depth, int &destroyed) {
  Count count(destroyed);
  return depth ? deep(form, size, depth - 1, destroyed) : form(size);
}

static Outcome outcome(Form form, size_t size) {
  int destroyed = 0, depth = 20;
  Outcome result;
  try {
    void *p = deep(form, size, depth, destroyed);
    ::operator delete(p);
    result = RETURNED;
  } catch (const Derived &) {
    result = DERIVED;
  } catch (const std::bad_alloc &e) {
    CHECK(std::string(e.what()) == "std::bad_alloc", "what(): %s", e.what());
    result = BAD_ALLOC;
  } catch (...) {
    result = OTHER;
  }
  CHECK(destroyed == depth + 1, "%d destructors ran", destroyed);
  return result;
}

static void expect(Form form, size_t size, Outcome want, int want_calls, const char *what) {
  calls = 0;
  Outcome got = outcome(form, size);
  CHECK(got == want && calls == want_calls, "%s, size %zx: outcome %d, %d calls of the handler", what, size, got, calls);
}

static void new_failure() {
  for (size_t size : {size_t(huge), size_t(beyond), size_t(most)}) {
    for (Form form : throwing) {
      std::set_new_handler(nullptr);
      expect(form, size, BAD_ALLOC, 0, "no handler");
      std::set_new_handler(throws_own);
      expect(form, size, DERIVED, 3, "throwing handler");
      std::set_new_handler(throws_other);
      expect(form, size, OTHER, 0, "handler that throws another type");
      std::set_new_handler(unsets_itself);
      expect(form, size, BAD_ALLOC, 2, "handler that unsets itself");
      std::set_new_handler(replaces_itself);
      expect(form, size, BAD_ALLOC, 2, "handler that installs another");
    }
    for (Form form : nothrow) {
      std::set_new_handler(nullptr);
      CHECK(!form(size), "nothrow gave a block");
      std::set_new_handler(unsets_itself);
      expect(form, size, RETURNED, 2, "nothrow, handler that unsets itself");
      for (std::new_handler handler : {throws_own, throws_other}) {
        std::set_new_handler(handler);
        calls = 0;
        CHECK(!form(size) && calls == (handler == throws_own ? 3 : 0), "nothrow: %d calls", calls);
        CHECK(std::uncaught_exceptions() == 0, "the exception was not ended");
        CHECK(!std::current_exception(), "the exception is still being handled");
      }
    }
    std::set_new_handler(nullptr);
  }
  for (int i = 0; i < 2000; i++) {
    int depth = 0;
    try {
      deep(throwing[i % 4], huge, 3, depth);
    } catch (const std::bad_alloc &) {
      depth += 100;
    }
    CHECK(depth == 104, "round %d: %d", i, depth);
  }
}
