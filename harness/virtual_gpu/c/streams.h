// What clock.c, launches.c and streams.c use of each other.
#pragma once
#include "clock.h"

#include <cuda_runtime_api.h>

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
int virtual_gpu_is_capturing(void);   // whether any stream is

// For launches.c. The streams' times are under a lock; `hold` also finds the times of what is queued.
void virtual_gpu_lock(void);
void virtual_gpu_hold(void);
void virtual_gpu_unlock(void);
void virtual_gpu_drain(void);  // with the lock held: launches.c finds the times of what it has queued
// Puts work of `took` ns on the stream, with the lock held. `arrives`: when the host's launch reaches the device.
void virtual_gpu_place(Operation* what, cudaStream_t stream, int device, int64_t took, int64_t arrives);
// The same without the lock, for profilers and graphs too.
void virtual_gpu_work(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took, int64_t arrives);
void virtual_gpu_find_estimate(Operation* what);  // of work that no operator launched
int64_t virtual_gpu_bare_ns(void);                // of a kernel that moves nothing
int64_t virtual_gpu_arrival(void);                // when a launch reaches the device that the host does now
