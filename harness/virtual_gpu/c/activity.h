// What a profiler hears of while it records (cupti.c).
#pragma once
#include "clock.h"

#include <cuda_runtime_api.h>

enum Call { LAUNCH_KERNEL, COPY, SET, SYNCHRONIZE, LAUNCH_GRAPH };
typedef struct {
  size_t size;
  int to_device, is_pinned;
} Copy;

int virtual_gpu_is_recording(void);
// Notes a call that this thread makes now, and its number: what the thread puts on a stream belongs to it.
uint32_t virtual_gpu_record_call(enum Call which);
void virtual_gpu_belongs_to(uint32_t call);     // what the thread puts on a stream now
void virtual_gpu_record_return(void);           // from it, where it has waited
void virtual_gpu_record_work(const Kernel* kernel, const Copy* copy, int stream, int device, int64_t begins, int64_t ends);
