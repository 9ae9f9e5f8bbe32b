// The clock of the virtual GPU (clock.c), for the libraries that give a device work, and for operators.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What one kind of work takes: an operator with its shapes, a product, a collective, a kernel that nobody knows.
typedef struct Operation {
  char* name;            // "aten::mm", "copy to the device"
  char* description;     // in full, for who estimates
  const char* its_class; // of kernels: "product", "norm"; NULL until it was estimated
  double flops;          // that it does
  int64_t took_ns;       // all its kernels together; -1 until it was estimated
  int kernels;           // that it launched when it was estimated
  int product;           // which of them is its only product, and takes what the others leave; 0 for none
  int is_unknown;        // nobody knows its time: it has that of a launch, and of the bytes that can be seen
  int is_network;        // a collective
  int is_repeated;       // of a checkpointed block that runs again
  uint64_t calls, step_calls, calls_before;  // altogether, of the last whole step, and until that ended
  int64_t total_ns, step_ns, ns_before;
} Operation;

// A kernel as it was launched. Profilers are told.
typedef struct {
  const char* name;
  unsigned grid[3], block[3], shared;
  int is_product;
  size_t set_bytes, copied_bytes;  // within the device, of what is no kernel but a memset or a copy
} Kernel;

int virtual_gpu_has_clock(void);
// What only the virtual GPU needs of the host is no time of the program's: from one to the other the clock stands.
int64_t virtual_gpu_stop_clock(void);
void virtual_gpu_go_on(int64_t stopped);
int64_t virtual_gpu_now(void);  // ns of the host's monotonic clock, and of all waiting that was skipped

// Work is put on a stream, after all that is on it and what it waits for. `stream` is a cudaStream_t.
void virtual_gpu_launched(const Kernel* kernel, void* stream);            // by the operator that runs, if one does
void virtual_gpu_put(Operation* what, const Kernel* kernel, void* stream);  // work that is described by itself
void virtual_gpu_spins(const Kernel* kernel, int64_t cycles, void* stream);  // of the multiprocessors' clock
void virtual_gpu_multiplied(int type, long m, long n, long k, int batch, void* stream);  // a product, of a cudaDataType
void virtual_gpu_copied(const void* to, const void* from, size_t size, void* stream);

Operation* virtual_gpu_operation(const char* name, const char* description);  // the one of that description
void virtual_gpu_estimated(Operation* what, int64_t took_ns, const char* its_class, double flops, int is_unknown);

// The operator that this thread runs: its kernels take the time that was estimated for it. When it ends after kernels
// that nobody has estimated yet, `end` says how many.
void virtual_gpu_begin_operator(Operation* what);
int virtual_gpu_end_operator(void);
void virtual_gpu_place_pending(void);  // those kernels, now that it is estimated
const char* virtual_gpu_products(void);  // that it had computed, as "bf16 m n k batch;" each

#ifdef __cplusplus
}
#endif
