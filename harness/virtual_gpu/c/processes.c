// How much memory of each device the processes of one `emulate` have taken: a table in a file that lies in memory. The
// first process makes it, and the others find it by VIRTUAL_GPU_PROCESSES. A process that uses a device has an entry,
// and keeps the byte of that number locked in the file: the operating system undoes the lock when the process ends,
// however it ends. An entry whose byte is not locked is free.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define VARIABLE "VIRTUAL_GPU_PROCESSES"
#define MAX_PROCESSES 4096
#define MAX_DEVICES 64
#define HIGH 500             // the file's descriptor is at least this: a script may use small ones itself
#define WHOLE MAX_PROCESSES  // the byte that a process locks while it changes something

typedef struct {
  int process;
  uint64_t contexts;           // a bit for each device where it has a context
  uint64_t used[MAX_DEVICES];  // bytes of each device, without the context
} Entry;
static struct {
  int end;  // one after the last entry that a process ever had
  Entry entries[MAX_PROCESSES];
} * table;
static int file = -1;
static Entry* ours;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Whether fcntl locks, unlocks or (F_GETLK) finds a lock on these bytes of the file.
static int to_byte(int how, int type, long byte, long count) {
  struct flock asked = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = count};
  int error;
  do error = fcntl(file, how, &asked);
  while (error && errno == EINTR);
  return how == F_GETLK ? !error && asked.l_type != F_UNLCK : !error;
}

// The same file under a descriptor of at least HIGH.
static int high(int descriptor, int how) {
  int moved = descriptor < 0 ? -1 : fcntl(descriptor, how, HIGH);
  if (moved < 0) return descriptor;
  close(descriptor);
  return moved;
}
static void make(void) {  // execve leaves the file open: processes that start later open it through /proc
  char path[64];
  file = high(memfd_create("processes of the virtual GPU", 0), F_DUPFD);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), file);
  if (file >= 0 && (ftruncate(file, sizeof *table) || setenv(VARIABLE, path, 1))) close(file), file = -1;
}
static void map(void) {
  int how = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, how, file, 0);
  if (table == MAP_FAILED) abort();
}
static void alone(void) {  // this process gets a table of its own, as after the program closed the file
  file = -1;
  map();
}
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
static void in_the_child(void) {
  ours = NULL;
  pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void find(void) {
  struct stat found;
  const char* given = getenv(VARIABLE);
  file = high(given ? open(given, O_RDWR | O_CLOEXEC) : -1, F_DUPFD_CLOEXEC);
  if (file >= 0 && (fstat(file, &found) || found.st_size != sizeof *table)) close(file), file = -1;
  if (file < 0) make();
  to_byte(F_SETLK, F_UNLCK, 0, 0);  // locks from before this process became another program (execve)
  map();
  pthread_atfork(before_fork, after_fork, in_the_child);
}

static void begin(void) {
  pthread_mutex_lock(&lock);
  to_byte(F_SETLKW, F_WRLCK, WHOLE, 1);
}
static void end(void) {
  to_byte(F_SETLK, F_UNLCK, WHOLE, 1);
  pthread_mutex_unlock(&lock);
}

static uint64_t context(void) {  // bytes of a context
  uint64_t total = virtual_gpu_total(), left = virtual_gpu_number("VIRTUAL_GPU_CAPACITY", total);
  return total > left ? total - left : 0;
}
static uint64_t bytes_of(int number, int slot) {
  Entry* entry = &table->entries[number];
  int is_used = entry->contexts >> slot & 1 && (entry == ours || to_byte(F_GETLK, F_WRLCK, number, 1));
  return is_used ? entry->used[slot] + context() : 0;
}
// Bytes of a device that are left for this process, which has a context there from now on.
static uint64_t left(int slot) {
  for (int number = 0; !ours; number++) {
    if (number == MAX_PROCESSES) alone(), number = 0;
    if (file >= 0 && !to_byte(F_SETLK, F_WRLCK, number, 1)) continue;
    ours = &table->entries[number];
    memset(ours, 0, sizeof *ours);
    ours->process = getpid();
    if (number >= table->end) table->end = number + 1;
  }
  ours->contexts |= 1ull << slot;
  uint64_t bytes = 0, total = virtual_gpu_total();
  for (int number = 0; number < table->end; number++) bytes += bytes_of(number, slot);
  return bytes < total ? total - bytes : 0;
}

static uint64_t most[64];  // bytes that this process had of each device, without its context
int virtual_gpu_take(int slot, uint64_t size) {
  begin();
  int fits = size <= left(slot);
  if (fits) ours->used[slot] += size;
  if (most[slot & 63] < ours->used[slot]) most[slot & 63] = ours->used[slot];
  end();
  return fits;
}
void virtual_gpu_give_back(int slot, uint64_t size) {
  begin();
  if (ours && ours->used[slot] >= size) ours->used[slot] -= size;  // else the parent took it, before the fork
  end();
}
uint64_t virtual_gpu_most(int device) { return most[virtual_gpu_slot(device) & 63] + context(); }
uint64_t virtual_gpu_left(int slot) {
  begin();
  uint64_t bytes = left(slot);
  end();
  return bytes;
}
int virtual_gpu_next_process(int* number, int slot, unsigned* process, uint64_t* bytes) {
  begin();
  for (*bytes = 0; *number < table->end && !*bytes; ++*number) {
    *bytes = bytes_of(*number, slot);
    *process = table->entries[*number].process;
  }
  end();
  return *bytes > 0;
}
