// The clock of the virtual GPU (clock.c, launches.c), for the libraries that put work on its streams, and for operators.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The place of a tensor, by which it is known again: a number made of the address of its storage, or of its first element
// where the storage is large.
typedef uint32_t Place;
static inline Place virtual_gpu_place_at(uint64_t address) { return (address >> 9) * 0x9E3779B97F4A7C15ull >> 32; }
// A tensor that an operator reads or writes. Beside it stands its place.
typedef struct {
  float bytes;
  short item;              // its number in the list that the argument or the result is; -1 if that is no list
  unsigned char argument;  // its number among the arguments or the results
  unsigned char is_read : 1, is_written : 1;
} Touch;
typedef struct {
  float bytes, filled;  // of an operator's results: all, and those that were brought into the cache
} Results;

// One kind of work, with its time: an operator with its shapes, a product, a collective, a kernel that is not known.
typedef struct Operation {
  // What every call needs is in one line of the processor's cache: the program between two calls needs the rest of it.
  int64_t took_ns;             // the time of all its kernels together; -1 until it was estimated
  int64_t held_ns, missed_ns;  // took_ns if the L2 cache holds all that they move, and if nothing; 0: it is the same
  int64_t takes;               // took_ns of the last call, which follows from the cache and from the device's power
  Results results;             // of the last call
  uint64_t calls;              // its kernels
  int64_t total_ns;            // the times of these kernels
  int kernels;                 // how many it launches: as many as in the call with the fewest so far
  short product;               // the number, from 1, of its only product, which takes what the others leave; 0 for none
  char is_network;             // it is a collective
  char at_limit;               // the percentage of took_ns that only a device at its power limit takes so long for
  char* name;                  // "aten::mm", "copy to the device"
  char* description;           // with shapes and dtypes, from which the time is estimated
  const char* its_class;       // the class of its kernels: "product", "norm"; NULL until it was estimated
  double flops;                // of all its kernels together
  int is_unknown;              // its time cannot be estimated: it has that of a launch, or of the bytes that can be seen
  int is_repeated;             // it belongs to a checkpointed block that runs again in backward
  uint64_t step_calls, calls_before;  // calls in the last whole step, and until that step ended
  int64_t step_ns, ns_before;         // the times of these
  const char* accesses;  // a letter for each argument, '|', and one for each result: r is read, w written, b both, - neither
} __attribute__((aligned(64))) Operation;

// A kernel as it was launched, for profilers.
typedef struct {
  const char* name;
  unsigned grid[3], block[3], shared;
  int is_product;
  size_t set_bytes, copied_bytes;  // within the device, for a memset or a copy, which are no kernels
} Kernel;

int virtual_gpu_has_clock(void);
// Between these two the clock stands: the virtual GPU's own work on the host is not counted as the program's.
int64_t virtual_gpu_stop_clock(void);
void virtual_gpu_go_on(int64_t stopped);
int64_t virtual_gpu_now(void);  // the host's monotonic clock plus all waiting that was skipped, in ns
void virtual_gpu_look_whether_real(void);  // to be called when a profiler begins or ends to record

// Puts a kernel on the stream of which only its place in the operator counts: of one that was estimated, while nobody
// records. Whether it is such a kernel.
int virtual_gpu_joins(void* stream);
// These put work on a stream, behind the work on it and the events it waits for. `stream` is a cudaStream_t.
void virtual_gpu_launched(const Kernel* kernel, void* stream);              // a kernel of the operator that runs, if any
void virtual_gpu_put(Operation* what, const Kernel* kernel, void* stream);  // a kernel that is an operation of its own
void virtual_gpu_spins(const Kernel* kernel, int64_t cycles, void* stream);  // cycles of the multiprocessors' clock
void virtual_gpu_multiplied(int type, long m, long n, long k, int batch, void* stream);  // a product, of a cudaDataType
void virtual_gpu_copied(const void* to, const void* from, size_t size, void* stream);

Operation* virtual_gpu_operation(const char* name, const char* description);  // the one of that description
void virtual_gpu_estimated(Operation* what, int64_t took_ns, const char* its_class, double flops, int is_unknown);

// For work that waits for memory, what a time depends on: see Operation.
void virtual_gpu_cached(Operation* what, int64_t held_ns, int64_t missed_ns, const char* accesses);
void virtual_gpu_will_touch(Place place);  // soon: a hint
// Note that a device's kernels touch these, at these places, and their results. Returns the share of the bytes that they wait
// for memory for. For launches.c, with the clock's lock held.
double virtual_gpu_missed_share(int slot, const Touch* touches, const Place* places, int count, Results results);
// Note that these were written just now.
Results virtual_gpu_results(int slot, const Touch* touches, const Place* places, int count);

// What is known of a thread, in one line of the processor's cache.
typedef struct {
  Operation* runs;        // the operator that was begun and has not ended; NULL between operators
  int launched, pending;  // its kernels so far; how many of them wait for its estimate
  int device;             // the current one
  void* last;             // for operators.cpp: the description of the last operator
  int is_again;           // for operators.cpp: see is_again(); 0 until it is known
  int64_t at_ticks, at_ns;  // for launches.c: see host_ns()
  double ns_per_tick;       // 0 until it is known
} Thread;
extern __thread Thread virtual_gpu_thread;

// An operator's call, or a part of it, as it is queued: in one line of the processor's cache.
enum { MOST_TOUCHED = 4 };
typedef struct {
  Operation* what;
  const Touch* touches;  // the tensors that it reads and writes
  void* stream;
  int64_t arrives;
  Place places[MOST_TOUCHED];
  Place result_place;
  float result_bytes;
  short kernel;          // its number within the operator; -1 for none
  unsigned char device;
  signed char touched;   // how many tensors; -1 in all parts but the first
  char returns;          // whether the operator has returned its result, of no bytes if it has written none
} __attribute__((aligned(64))) Call;
// The call of the operator that this thread runs, as far as it is not queued yet.
extern __thread Call virtual_gpu_call;

// The operator that this thread runs from now on: its kernels take the time that was estimated for it. Then the tensors that
// it touches are written into virtual_gpu_call, or told if they are too many.
__attribute__((always_inline)) static inline void virtual_gpu_begin_operator(Operation* what) {
  virtual_gpu_thread.runs = what, virtual_gpu_thread.launched = virtual_gpu_thread.pending = 0;
  virtual_gpu_call.what = what, virtual_gpu_call.device = virtual_gpu_thread.device;
  virtual_gpu_call.touched = 0, virtual_gpu_call.kernel = -1, virtual_gpu_call.returns = 0;
}
void virtual_gpu_begin_unknown(Operation* what);  // where it may not have been estimated: its kernels are pending then
void virtual_gpu_touches(const Touch* touches, const Place* places, int count);
// It has returned, and written this tensor, of 0 bytes if there is none; or these. No kernel may be pending.
void virtual_gpu_end_operator(float bytes, Place place);
void virtual_gpu_end_operator_with(const Touch* results, const Place* places, int count);
// Puts the pending kernels on their streams, once the operator is estimated.
void virtual_gpu_place_pending(const Touch* touches, const Place* places, int touched);
// For Python, once a step: ns spent in work that the power limit may slow down, and the factor on it from now on.
int64_t virtual_gpu_computed(void);
void virtual_gpu_ease(double factor);
const char* virtual_gpu_products(void);  // the operator's matrix products, as "bf16 m n k batch;" each

#ifdef __cplusplus
}
#endif
