// What the files of libcudart and the other libraries share. Settings come from the environment: VIRTUAL_GPU_NAME
// and so on, written by device.py, where each is explained.
#pragma once
#include <stddef.h>
#include <stdint.h>

uint64_t virtual_gpu_number(const char* name, uint64_t otherwise);
const char* virtual_gpu_text(const char* name, const char* otherwise);
int virtual_gpu_count(void);          // devices that CUDA_VISIBLE_DEVICES leaves
int virtual_gpu_slot(int device);     // the number that such a device has without CUDA_VISIBLE_DEVICES
int virtual_gpu_current(void);        // the thread's device
uint64_t virtual_gpu_total(void);     // bytes that a device says it has
// Bytes of a device (processes.c), which count for all processes of an `emulate`. Who asks what is left, or takes of it,
// has a context there.
int virtual_gpu_take(int slot, uint64_t size);  // whether it fits
void virtual_gpu_give_back(int slot, uint64_t size);
uint64_t virtual_gpu_left(int slot);
// One process after the other and the bytes it has there, its context's too: `number` begins at 0. 0: there is no other.
int virtual_gpu_next_process(int* number, int slot, unsigned* process, uint64_t* bytes);
uint64_t virtual_gpu_handle(void);    // a number that no other thing has
int virtual_gpu_owner(const void* pointer);  // the device a pointer lies on, -1 for none
void virtual_gpu_called(const char* name);   // notes the last call, for a report of a crash
int virtual_gpu_without_effect(const char* name);  // a call that nobody wrote: noted, and it succeeds
int virtual_gpu_count_all(void);  // devices, whatever CUDA_VISIBLE_DEVICES says

#define CALLED virtual_gpu_called(__func__)
// How often these libraries were asked for the size of a work space, which only a device knows. Told at the end.
enum { CUFFT, CUSOLVER, CUSPARSE };
extern int virtual_gpu_asked[3];
