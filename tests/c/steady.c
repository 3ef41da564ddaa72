/* A steady loop on the library: every 100 ms each of three threads takes and frees the same blocks, of
 * 16 bytes to 16 MiB, some of them freed by the next thread. After a warm-up it is watched:
 * "faults N" allows N page faults in each period; "calls" no call that gives memory back or asks for
 * more: a filter for all threads ends the process at the first.
 * usage: steady WARM_SECONDS WATCH_SECONDS calls | faults N */
#include "check.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

enum { THREADS = 3, PERIOD_MS = 100, SMALL = 3000, MIDDLE = 60, LARGE = 6, BLOCKS = SMALL + MIDDLE + LARGE };

static const size_t small_sizes[] = {16, 24, 48, 100, 200, 512, 1000, 3000};
static const size_t middle_sizes[] = {5000, 17000, 40000, 100000, 300000};
static const size_t large_sizes[] = {1 << 20, (3 << 20) + 4096, 5 << 20, 8 << 20, (11 << 20) + 100, 16 << 20};

static pthread_barrier_t barrier;
static void *blocks[THREADS][BLOCKS];
static volatile long periods;

static size_t size_of(int i) {
  if (i < SMALL) {
    return small_sizes[i % 8];
  }
  return i < SMALL + MIDDLE ? middle_sizes[i % 5] : large_sizes[i % 6];
}

static void take(int me, int i) {
  size_t size = size_of(i);
  unsigned char *p = malloc(size);
  CHECK(p, "%zu bytes", size);
  for (size_t at = 0; at < size; at += 4096) {
    p[at] = (unsigned char)i;
  }
  blocks[me][i] = p;
}

static void drop(int owner, int i) {
  unsigned char *p = blocks[owner][i];
  CHECK(p[0] == (unsigned char)i, "block %d", i);
  free(p);
  blocks[owner][i] = NULL;
}

static void *work(void *arg) {
  int me = (int)(intptr_t)arg;
  struct timespec next;
  clock_gettime(CLOCK_MONOTONIC, &next);
  for (;;) {
    for (int i = 0; i < BLOCKS; i++) {
      take(me, i);
      /* Short-lived ones among them. */
      if (i % 7 == 3) {
        drop(me, i);
      }
    }
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < BLOCKS; i++) {
      /* A block goes back where it came from, or at the next thread. */
      int owner = i % 3 == 0 ? (me + 1) % THREADS : me;
      if (i % 7 != 3) {
        drop(owner, i);
      }
    }
    pthread_barrier_wait(&barrier);
    if (me == 0) {
      periods++;
    }
    next.tv_nsec += PERIOD_MS * 1000000L;
    if (next.tv_nsec >= 1000000000) {
      next.tv_sec++;
      next.tv_nsec -= 1000000000;
    }
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
  }
  return NULL;
}

static void on_sigsys(int signal, siginfo_t *info, void *context) {
  (void)signal;
  (void)context;
  char line[] = "system call 0000 after the warm-up\n";
  for (int n = info->si_syscall, at = 15; at >= 12; at--, n /= 10) {
    line[at] = (char)('0' + n % 10);
  }
  (void)!write(2, line, sizeof line - 1);
  _exit(3);
}

#define FORBID(call) \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP)

/* Where the signal is blocked, as in the library's own thread, it ends the process all the same. */
static void forbid(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      FORBID(mmap),
      FORBID(munmap),
      FORBID(mremap),
      FORBID(madvise),
      FORBID(process_madvise),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
  struct sigaction action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO};
  CHECK(sigaction(SIGSYS, &action, NULL) == 0, "errno %d", errno);
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "errno %d", errno);
  long set = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program);
  CHECK(set == 0, "%ld, errno %d", set, errno);
}

static void rest(long seconds) {
  struct timespec time = {.tv_sec = seconds};
  while (nanosleep(&time, &time) != 0) {
  }
}

static long faults(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

int main(int argc, char **argv) {
  CHECK(argc >= 4, "%d arguments", argc);
  pthread_barrier_init(&barrier, NULL, THREADS);
  for (int i = 0; i < THREADS; i++) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, (void *)(intptr_t)i) == 0, "thread %d", i);
  }
  rest(atol(argv[1]));
  long before = periods, faults_before = faults();
  if (strcmp(argv[3], "calls") == 0) {
    forbid();
  }
  rest(atol(argv[2]));
  long done = periods - before, faulted = faults() - faults_before;
  /* Whatever else runs on the machine, the loop went on. */
  CHECK(done >= atol(argv[2]), "%ld periods", done);
  if (argc == 5) {
    CHECK(faulted <= done * atol(argv[4]), "%ld faults in %ld periods", faulted, done);
  }
  _exit(0);
}
