// What the other libraries report to cupti.c while a profiler records.
#pragma once
#include "streams.h"

#include <cuda_runtime_api.h>

enum Call { LAUNCH_KERNEL, COPY, SET, SYNCHRONIZE, LAUNCH_GRAPH };
typedef struct {
  size_t size;
  int to_device, is_pinned;
} Copy;

static inline int virtual_gpu_is_recording(void) { return __atomic_load_n(&virtual_gpu_clock.records, __ATOMIC_RELAXED); }
// Records that this thread calls `which` now. The call's number: the work that the thread puts on a stream afterwards
// belongs to this call.
uint32_t virtual_gpu_record_call(enum Call which);
void virtual_gpu_belongs_to(uint32_t call);     // the work that the thread puts on a stream from now on
void virtual_gpu_record_return(void);           // the end of the last call, where the thread has waited in it
void virtual_gpu_record_work(const Kernel* kernel, const Copy* copy, int stream, int device, int64_t begins, int64_t ends);
