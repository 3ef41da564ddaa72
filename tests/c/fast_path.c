/* Counts the instructions of malloc and free in small patterns, each from the call to the return.
 *
 *   fast_path               steps through each case; lines: rseq yes|no, then NAME MALLOC FREE SECTIONS of each
 *   fast_path NAME ROUNDS   only runs a case, for another tool to count
 *
 * A restartable sequence can't be stepped through: each stop would send it back to its start. So at the start of
 * one the tracer takes back what tells the kernel of it. The child then runs the same instructions as ordinary
 * ones, which is safe while nobody else runs on its CPU cache. SECTIONS is how many of them an operation ran.
 * Exit 77: no steps are to be had here. */
#include "check.h"
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/ptrace.h>
#include <sys/rseq.h>
#include <sys/user.h>
#include <sys/wait.h>

#if !defined __x86_64__
int main(void) {
  puts("only for x86-64");
  return 77;
}
#else

/* What is measured: from NAME_begin, which is the call, to NAME_end. call_NAME has three more instructions. */
#define ENTRY(name)                    \
  ".globl call_" #name "\n"            \
  ".type call_" #name ", @function\n"  \
  "call_" #name ":\n"                  \
  "sub $8, %rsp\n"                     \
  #name "_begin:\n"                    \
  "call " #name "@PLT\n"               \
  #name "_end:\n"                      \
  "add $8, %rsp\n"                     \
  "ret\n"                              \
  ".size call_" #name ", . - call_" #name "\n"
/* The C library has no free_sized. */
asm(".weak free_sized\n.text\n" ENTRY(malloc) ENTRY(free) ENTRY(free_sized) ENTRY(aligned_alloc) ENTRY(realloc));
void *call_malloc(size_t);
void call_free(void *);
void call_free_sized(void *, size_t);
void *call_aligned_alloc(size_t, size_t);
void *call_realloc(void *, size_t);

extern const char malloc_begin[], malloc_end[], free_begin[], free_end[], free_sized_begin[], free_sized_end[];
extern const char aligned_alloc_begin[], aligned_alloc_end[], realloc_begin[], realloc_end[];

enum { MALLOC, FREE };
static const struct {
  const char *begin, *end;
  int kind;
} entries[] = {
    {malloc_begin, malloc_end, MALLOC},
    {aligned_alloc_begin, aligned_alloc_end, MALLOC},
    {realloc_begin, realloc_end, MALLOC},
    {free_begin, free_end, FREE},
    {free_sized_begin, free_sized_end, FREE},
};

enum { BATCH = 100 };
static void *blocks[BATCH];

static void pair(size_t size) { call_free(call_malloc(size)); }

static void sized(size_t size) { call_free_sized(call_malloc(size), size); }

static void aligned(size_t size) { call_free(call_aligned_alloc(size, size)); }

/* A block that stays what it is. */
static void same(size_t size) {
  void *p = call_realloc(blocks[0] ? blocks[0] : malloc(size), size - 1);
  blocks[0] = p;
}

static void batch(size_t size) {
  for (int i = 0; i < BATCH; i++) blocks[i] = call_malloc(size);
  for (int i = 0; i < BATCH; i++) call_free(blocks[i]);
}

static const struct {
  const char *name;
  void (*run)(size_t);
  size_t size;
  int rounds;
} cases[] = {
    {"pair_16", pair, 16, 31},          {"pair_64", pair, 64, 31},
    {"pair_1024", pair, 1024, 31},      {"pair_4096", pair, 4096, 31},
    {"pair_32768", pair, 32768, 31},    {"pair_262144", pair, 262144, 31},
    {"batch_64", batch, 64, 3},         {"sized_64", sized, 64, 31},
    {"sized_32768", sized, 32768, 31},  {"aligned_64", aligned, 64, 31},
    {"aligned_4096", aligned, 4096, 31}, {"realloc_same_64", same, 64, 31},
};
enum { CASES = sizeof cases / sizeof cases[0] };

/* Starts of the sections of the library that malloc is from. */
static uintptr_t starts[1000];
static int sections;

static bool inside(const struct dl_phdr_info *info, uintptr_t p, unsigned flags) {
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    uintptr_t low = info->dlpi_addr + h->p_vaddr;
    if (h->p_type == PT_LOAD && (h->p_flags & flags) == flags && p >= low && p < low + h->p_memsz) return true;
  }
  return false;
}

/* A descriptor: version and flags 0, start, length, abort handler, which has the signature before it. */
static bool is_descriptor(const struct dl_phdr_info *info, const uint64_t *d) {
  uint32_t signature;
  if (d[0] || d[2] > 4096 || !inside(info, d[1], PF_X) || !inside(info, d[3] - 4, PF_X)) return false;
  memcpy(&signature, (const char *)d[3] - 4, sizeof signature);
  return signature == RSEQ_SIG;
}

static int find_sections(struct dl_phdr_info *info, size_t size, void *malloc_at) {
  (void)size;
  if (!inside(info, (uintptr_t)malloc_at, PF_X)) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *h = &info->dlpi_phdr[i];
    if (h->p_type != PT_LOAD || !(h->p_flags & PF_W)) continue;
    uintptr_t low = (info->dlpi_addr + h->p_vaddr + 31) & -32ul, high = info->dlpi_addr + h->p_vaddr + h->p_filesz;
    for (; low + 32 <= high; low += 32)
      if (is_descriptor(info, (const uint64_t *)low) && sections < 1000) starts[sections++] = ((const uint64_t *)low)[1];
  }
  return 1;
}

/* Counts of one case. */
struct counts {
  unsigned n[2], sections;
  unsigned of[2][BATCH * 31];
};

static int less(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static unsigned median(unsigned *of, unsigned n) {
  qsort(of, n, sizeof *of, less);
  return n ? of[n / 2] : 0;
}

static void child(int c) {
  if (ptrace(PTRACE_TRACEME, 0, 0, 0)) _exit(77);
  for (int i = 0; i < 3000; i++) cases[c].run(cases[c].size);
  raise(SIGSTOP);
  for (int i = 0; i < cases[c].rounds; i++) cases[c].run(cases[c].size);
  _exit(0);
}

/* Steps to the child's end. */
static void count(pid_t pid, struct counts *found) {
  char *rseq_cs = (char *)__builtin_thread_pointer() + __rseq_offset + offsetof(struct rseq, rseq_cs);
  int status, entry = -1;
  unsigned steps = 0;
  CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
    puts("no ptrace here");
    exit(77);
  }
  CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP, "status %x", status);
  for (;;) {
    if (ptrace(PTRACE_SINGLESTEP, pid, 0, 0)) {
      printf("no steps here: %s\n", strerror(errno));
      kill(pid, SIGKILL);
      exit(77);
    }
    CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
    if (WIFEXITED(status)) break;
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP, "status %x", status);
    struct user_regs_struct regs;
    CHECK(!ptrace(PTRACE_GETREGS, pid, 0, &regs), "registers");
    steps++;
    for (int i = 0; i < sections; i++) {
      if (regs.rip != starts[i]) continue;
      CHECK(!ptrace(PTRACE_POKEDATA, pid, rseq_cs, 0), "rseq_cs");
      found->sections += entry >= 0;
    }
    for (int i = 0; i < (int)(sizeof entries / sizeof entries[0]); i++) {
      if (regs.rip == (uintptr_t)entries[i].begin) entry = i, steps = 0;
      if (entry == i && regs.rip == (uintptr_t)entries[i].end) {
        int kind = entries[i].kind;
        CHECK(found->n[kind] < BATCH * 31, "too many");
        found->of[kind][found->n[kind]++] = steps;
        entry = -1;
      }
    }
  }
  CHECK(WEXITSTATUS(status) == 0, "status %x", status);
}

int main(int argc, char **argv) {
  if (argc == 3) {
    for (int c = 0; c < CASES; c++)
      for (int i = strcmp(cases[c].name, argv[1]) ? 0 : atoi(argv[2]); i > 0; i--) cases[c].run(cases[c].size);
    return 0;
  }
  /* One CPU for parent and child, so that each step finds the CPU cache where the last one left it. */
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  CHECK(!sched_setaffinity(0, sizeof one, &one), "affinity");
  struct rseq *own = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);
  printf("rseq %s\n", __rseq_size && (int)own->cpu_id >= 0 ? "yes" : "no");
  CHECK(dl_iterate_phdr(find_sections, (void *)&malloc), "malloc is nowhere");
  for (int c = 0; c < CASES; c++) {
    static struct counts found;
    memset(&found, 0, sizeof found);
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (!pid) child(c);
    count(pid, &found);
    unsigned ops = found.n[MALLOC] + found.n[FREE];
    CHECK(ops, "%s: nothing was counted", cases[c].name);
    printf("%s %u %u %.2f\n", cases[c].name, median(found.of[MALLOC], found.n[MALLOC]), median(found.of[FREE], found.n[FREE]),
           (double)found.sections / ops);
  }
  return 0;
}
#endif
