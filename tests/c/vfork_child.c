/* vfork children that allocate before they exec, exit or vfork again, in a process with busy threads. */
#include "check.h"
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

extern pid_t __vfork(void);
static volatile int stop;

static void churn(unsigned rounds, unsigned seed) {
  void *kept[64] = {0};
  for (unsigned i = 0; i < rounds; i++) {
    unsigned r = (seed + i) * 2654435761u;
    unsigned slot = r >> 26;
    if (kept[slot]) CHECK(*(unsigned *)kept[slot] == slot, "slot %u was overwritten", slot);
    free(kept[slot]);
    size_t n = (r >> 8) % (r & 7 ? 500 : 60000) + sizeof slot;
    kept[slot] = malloc(n);
    CHECK(kept[slot], "malloc");
    memset(kept[slot], 0x33, n);
    *(unsigned *)kept[slot] = slot;
  }
  for (int i = 0; i < 64; i++) free(kept[i]);
}

static void *busy(void *arg) {
  for (unsigned i = 0; !stop; i++) churn(2000, i + (unsigned)(uintptr_t)arg);
  return NULL;
}

static void reap(pid_t pid, int want) {
  int status;
  CHECK(waitpid(pid, &status, 0) == pid, "waitpid");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == want, "status %x, want exit %d", status, want);
}

static void child_execs(int i) {
  pid_t pid = vfork();
  if (pid == 0) {
    churn(200, (unsigned)i);
    execl("/bin/true", "true", (char *)NULL);
    _exit(99);
  }
  CHECK(pid > 0, "vfork: %d", errno);
  reap(pid, 0);
  churn(200, (unsigned)i);
}

static void child_exits(int i) {
  pid_t pid = __vfork();
  if (pid == 0) {
    churn(50, (unsigned)i);
    _exit(7);
  }
  CHECK(pid > 0, "vfork: %d", errno);
  reap(pid, 7);
}

/* The grandchild's end must not end the child's own state. */
static void child_vforks(int i) {
  pid_t pid = vfork();
  if (pid == 0) {
    pid_t inner = vfork();
    if (inner == 0) {
      churn(50, (unsigned)i);
      _exit(3);
    }
    int status;
    if (inner < 0 || waitpid(inner, &status, 0) != inner || WEXITSTATUS(status) != 3) _exit(98);
    churn(50, (unsigned)i);
    _exit(5);
  }
  CHECK(pid > 0, "vfork: %d", errno);
  reap(pid, 5);
}

/* What the child allocated belongs to the parent afterwards: one address space. */
static void block_crosses(void) {
  static char *volatile block;
  pid_t pid = vfork();
  if (pid == 0) {
    block = malloc(1000);
    if (block) memset(block, 'b', 1000);
    _exit(0);
  }
  reap(pid, 0);
  CHECK(block && block[999] == 'b', "block");
  free(block);
}

static void error_is_reported(void) {
  struct rlimit none = {0, 0}, old;
  getrlimit(RLIMIT_NPROC, &old);
  none.rlim_max = old.rlim_max;
  /* The limit does not bind root: become somebody else in a child of our own. */
  pid_t pid = fork();
  if (pid == 0) {
    CHECK(!setrlimit(RLIMIT_NPROC, &none), "setrlimit");
    CHECK(getuid() != 0 || !setuid(65534), "setuid");
    errno = 0;
    pid_t p = vfork();
    if (p == 0) _exit(0);
    CHECK(p == -1 && errno == EAGAIN, "vfork beyond the limit: %d, errno %d", p, errno);
    churn(200, 1);
    _exit(0);
  }
  reap(pid, 0);
}

int main(void) {
  alarm(60);
  pthread_t threads[3];
  for (uintptr_t i = 0; i < 3; i++) CHECK(!pthread_create(&threads[i], NULL, busy, (void *)(i * 1000)), "thread");
  for (int i = 0; i < 100; i++) {
    child_execs(i);
    child_exits(i);
    child_vforks(i);
    block_crosses();
  }
  error_is_reported();
  stop = 1;
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  return 0;
}
