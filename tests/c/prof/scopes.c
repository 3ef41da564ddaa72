/* Scopes, steps and marks; and the table for memory of devices. */
#include "prof.h"
#include "thermalloc/thermalloc.h"
#include <dlfcn.h>
#include <pthread.h>

static void *kept[10];
static uint32_t captured;

static void *thread(void *unused) {
  uint32_t before = thermalloc_scope_attach(captured);
  CHECK(before == 0, "%u", before);
  kept[2] = malloc(3 << 20);
  thermalloc_scope_pop(before);
  kept[3] = malloc(4 << 20);
  return unused;
}

int main(void) {
  const struct thermalloc_host_v1 *host = dlsym(RTLD_DEFAULT, "thermalloc_host_v1");
  CHECK(host && host->size >= sizeof *host, "host");
  kept[0] = malloc(1 << 21);
  thermalloc_scope_step(7);
  uint32_t outer = thermalloc_scope_push("weights:encoder");
  kept[1] = malloc(5 << 20);
  uint32_t inner = thermalloc_scope_push("layer 1");
  captured = thermalloc_scope_capture();
  pthread_t t;
  CHECK(pthread_create(&t, 0, thread, 0) == 0, "thread");
  pthread_join(t, 0);
  kept[4] = malloc(6 << 20);
  thermalloc_scope_pop(inner);
  kept[5] = malloc(7 << 20);
  thermalloc_scope_pop(outer);
  kept[6] = malloc(8 << 20);
  CHECK(thermalloc_scope_mark(kept[6], captured) == 1, "marked");
  CHECK(thermalloc_scope_mark(kept[6], captured) == 0, "it is already");
  CHECK(thermalloc_scope_mark(kept[6], 12345) == 0, "no such scope");
  CHECK(thermalloc_scope_mark((char *)kept[6] + 4096, captured) == 0, "no block");
  CHECK(thermalloc_scope_mark(&captured, captured) == 0, "not ours");
  kept[6] = realloc(kept[6], 9 << 20);

  struct thermalloc_device_block block = {
    .struct_bytes = sizeof block, .address = 0x700000000000, .size = 1000, .usable = 2048,
    .stream = 5, .device = 3, .space = 1, .user = "nccl", .user_bytes = 4,
  };
  uint64_t first = host->device_alloc(&block);
  block.address += 1 << 20, block.user = 0, block.user_bytes = 0, block.space = 2;
  uint64_t second = host->device_alloc(&block);
  block.address += 1 << 20;
  uint64_t third = host->device_alloc(&block);
  CHECK(first && second && third, "device");
  host->device_free(second, 9, 1);
  host->device_free(third, 9, 1);
  host->device_free(third, 9, 0);
  host->device_free(third, 9, 0);
  block.struct_bytes = 8;
  CHECK(host->device_alloc(&block) == 0, "too small to be one");
  CHECK(host->device_alloc(0) == 0, "none");
  dump();
  exit(0);
}
