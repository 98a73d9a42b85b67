// A disk that fails: preloaded into a process, it makes the first n reads of every place of a
// segment of the disk tier EIO, n from the environment variable FAILING_PREAD_TIMES. While the file
// that FAILING_PREAD_HANG names exists, reads and writes of segments hang, as on a frozen disk.
//
//   cc -shared -fPIC -o failing_pread.so failing_pread.c
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int IsSegment(int file) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return strstr(path, ".segment") != NULL;
}

// A read of several extents fails for all of them.
static int Fails(int file, size_t bytes, off64_t offset) {
  static atomic_long reads[1 << 16];  // by place: extents begin at multiples of 4096 bytes
  const char *times = getenv("FAILING_PREAD_TIMES");
  if (times == NULL || !IsSegment(file)) return 0;
  const off64_t first = offset >> 12;
  const int fails = atomic_fetch_add(&reads[first & 0xffff], 1) < atol(times);
  for (off64_t place = first + 1; fails && place << 12 < offset + (off64_t)bytes; ++place) {
    atomic_fetch_add(&reads[place & 0xffff], 1);
  }
  return fails;
}

static void HangWhileTold(int file) {
  const char *path = getenv("FAILING_PREAD_HANG");
  while (path != NULL && IsSegment(file) && access(path, F_OK) == 0) usleep(10000);
}

ssize_t pwrite64(int file, const void *from, size_t bytes, off64_t offset) {
  static ssize_t (*real)(int, const void *, size_t, off64_t);
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
  HangWhileTold(file);
  return real(file, from, bytes, offset);
}

ssize_t pwrite(int file, const void *from, size_t bytes, off_t offset) {
  return pwrite64(file, from, bytes, offset);
}

ssize_t pread64(int file, void *to, size_t bytes, off64_t offset) {
  static ssize_t (*real)(int, void *, size_t, off64_t);
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "pread64");
  HangWhileTold(file);
  if (!Fails(file, bytes, offset)) return real(file, to, bytes, offset);
  errno = EIO;
  return -1;
}

ssize_t pread(int file, void *to, size_t bytes, off_t offset) {
  return pread64(file, to, bytes, offset);
}
