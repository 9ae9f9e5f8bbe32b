// What clock.c and streams.c have of each other.
#pragma once
#include "clock.h"

#include <cuda_runtime_api.h>

// Of a device, since it began: at work, its default stream waiting for the host and for collectives, collectives.
typedef struct {
  int64_t busy_ns, host_ns, exposed_ns, network_ns;
} Account;

typedef struct {  // by a graph
  Operation* what;
  Kernel kernel;
  int64_t took_ns;
} Kept;

// Whether a graph is being captured, which keeps the kernel.
int virtual_gpu_keeps(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took_ns);
void virtual_gpu_replay(const Kept* kernels, int count, void* stream);
int64_t virtual_gpu_given_until(cudaStream_t stream);  // when all is done that the stream was given
// When an event recorded now is over; `worked`: for a host that is never late.
int64_t virtual_gpu_stream_done(cudaStream_t stream, int* with_network, int64_t* worked);
void virtual_gpu_stream_waits(cudaStream_t stream, int64_t moment, int for_network, int64_t worked);
void virtual_gpu_wait_until(int64_t moment);
int64_t virtual_gpu_device_done(int device);
void virtual_gpu_is_timed(void);  // somebody wants to know a time: the clock starts
int virtual_gpu_is_pinned(const void* pointer);  // memory of the host
