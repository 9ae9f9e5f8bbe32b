// What the files of libcudart and the other libraries share. Settings come from environment variables: device.py writes
// VIRTUAL_GPU_NAME and the other properties of the device, launch.py the options of an `emulate`.
#pragma once
#include <stddef.h>
#include <stdint.h>

uint64_t virtual_gpu_number(const char* name, uint64_t otherwise);      // of an environment variable
const char* virtual_gpu_text(const char* name, const char* otherwise);
int virtual_gpu_count(void);          // devices that CUDA_VISIBLE_DEVICES leaves
int virtual_gpu_slot(int device);     // the number that such a device would have without CUDA_VISIBLE_DEVICES
int virtual_gpu_current(void);        // the thread's device
uint64_t virtual_gpu_total(void);     // bytes that a device says it has
// Bytes of a device (processes.c), which all processes of an `emulate` share. A process that takes some, or asks how
// many are left, has a context on the device from then on.
int virtual_gpu_take(int slot, uint64_t size);  // whether it fits
void virtual_gpu_give_back(int slot, uint64_t size);
uint64_t virtual_gpu_left(int slot);
// The next process that has a context on the device, and the bytes it has there, its context included. `number` begins
// at 0. Returns 0 after the last process.
int virtual_gpu_next_process(int* number, int slot, unsigned* process, uint64_t* bytes);
int virtual_gpu_was_any(void);        // whether the thread's last kernel was one of torch.any
uint64_t virtual_gpu_handle(void);    // a new number for a stream or another handle
int virtual_gpu_owner(const void* pointer);  // the device whose memory a pointer points to; -1 for none
void virtual_gpu_called(const char* name);   // notes the last call, for the report of a crash
int virtual_gpu_without_effect(const char* name);  // a call without an implementation here: noted, and it succeeds
int virtual_gpu_count_all(void);  // devices, whatever CUDA_VISIBLE_DEVICES says

#define CALLED virtual_gpu_called(__func__)
// How often the size of a work space was guessed for these libraries: only a real device knows it. Printed at the end.
enum { CUFFT, CUSOLVER, CUSPARSE };
extern int virtual_gpu_asked[3];
