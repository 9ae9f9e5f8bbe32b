// What clock.c, launches.c and streams.c use of each other.
#pragma once
#include "clock.h"

#include <cuda_runtime_api.h>
#include <sched.h>
#include <time.h>

// What every launch reads or writes, in one line of the processor's cache.
typedef struct {
  // What Python has done around operators to follow values, in ns. Python adds to it, which stands first, with its lock
  // held: a call would take as long as what it tells of.
  int64_t following_ns;
  int64_t skipped;                  // by how much the clock is ahead of the host's
  int64_t before_real, while_real;  // of following_ns: what had passed when `is_real` began; what is not left out
  int64_t launch_ns;                // from a launch to the kernel's begin on an idle stream
  int is_real;                      // the clock never stands; until it starts, it need not
  int records;                      // a profiler does
  int capturing;                    // how many streams are being captured into graphs
  int is_locked;
  int queued;                       // how many calls launches.c has in its queue
} __attribute__((aligned(64))) Clock;
extern Clock virtual_gpu_clock;

static inline int virtual_gpu_is_real_time(void) { return __atomic_load_n(&virtual_gpu_clock.is_real, __ATOMIC_RELAXED); }
static inline int64_t virtual_gpu_host_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000ll + at.tv_nsec;
}
// By how much the clock is ahead of the host's.
static inline int64_t virtual_gpu_ahead(void) {
  Clock* clock = &virtual_gpu_clock;
  int64_t passed = __atomic_load_n(&clock->following_ns, __ATOMIC_RELAXED);
  if (__builtin_expect(virtual_gpu_is_real_time(), 0)) passed = clock->before_real;
  return __atomic_load_n(&clock->skipped, __ATOMIC_RELAXED) + clock->while_real - passed;
}
// When a launch reaches the device that the host does at this moment of its own clock.
static inline int64_t virtual_gpu_arrives(int64_t host_ns) { return host_ns + virtual_gpu_ahead() + virtual_gpu_clock.launch_ns; }
static inline int64_t virtual_gpu_arrival(void) { return virtual_gpu_arrives(virtual_gpu_host_ns()); }

// The streams' times are under a lock, which nobody holds for long; `hold` also finds the times of what is queued.
static inline void virtual_gpu_lock(void) {
  while (__atomic_exchange_n(&virtual_gpu_clock.is_locked, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
static inline void virtual_gpu_unlock(void) { __atomic_store_n(&virtual_gpu_clock.is_locked, 0, __ATOMIC_RELEASE); }
void virtual_gpu_drain(void);  // with the lock held: launches.c finds the times of what it has queued
static inline void virtual_gpu_hold(void) {
  virtual_gpu_lock();
  virtual_gpu_drain();
}

// Where a device's time went since its clock began.
typedef struct {
  int64_t busy_ns;     // in kernels
  int64_t host_ns;     // its default stream waited for the host
  int64_t exposed_ns;  // its default stream waited for collectives
  int64_t network_ns;  // in collectives, whether or not kernels ran meanwhile
} Account;

typedef struct {  // a kernel of a captured graph
  Operation* what;
  Kernel kernel;
  int64_t took_ns;
} Kept;

// Keeps the kernel if the stream is being captured into a graph; whether it is.
int virtual_gpu_keeps(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took_ns);
void virtual_gpu_replay(const Kept* kernels, int count, void* stream);
int64_t virtual_gpu_given_until(cudaStream_t stream);  // when all work on the stream is done
// When an event that is recorded now is over, on the clock; `worked`: counted from 0, for a host that is never late.
int64_t virtual_gpu_stream_done(cudaStream_t stream, int* with_network, int64_t* worked);
void virtual_gpu_stream_waits(cudaStream_t stream, int64_t moment, int for_network, int64_t worked);
void virtual_gpu_wait_until(int64_t moment);
int64_t virtual_gpu_device_done(int device);
void virtual_gpu_is_timed(void);  // the program asks for a time: the clock starts
int virtual_gpu_is_pinned(const void* pointer);  // whether it points to pinned memory of the host

// For launches.c.
// Puts work of `took` ns on the stream, with the lock held. `arrives`: when the host's launch reaches the device.
void virtual_gpu_place(Operation* what, cudaStream_t stream, int device, int64_t took, int64_t arrives);
// The same without the lock, for profilers and graphs too.
void virtual_gpu_work(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took, int64_t arrives);
void virtual_gpu_find_estimate(Operation* what);  // of work that no operator launched
int64_t virtual_gpu_bare_ns(void);                // of a kernel that moves nothing
