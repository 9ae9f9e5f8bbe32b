// The kernels that PyTorch's operators launch. Of a call only a few words are queued. What follows from them, for the L2
// cache and for the streams, is found for many calls at once: when the queue is full, or when somebody asks for a time. To
// find it in each call would drive the program between two calls out of the processor's caches.
#include "clock.h"
#include "virtual_gpu.h"
#include "streams.h"
#include "activity.h"

#include <library_types.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  Kernel kernel;
  cudaStream_t stream;
  int64_t arrives;
  uint32_t call;
} Pending;
__thread Thread virtual_gpu_thread __attribute__((aligned(64)));
#define thread virtual_gpu_thread
static __thread int room;
static __thread Pending* pending;
static __thread char products[512];  // the operator's matrix products, until it is estimated

static double eased = 1;
static int64_t computed;  // ns, of eased work

// ---- the queue

enum { QUEUED = 32 };
static Call queue[QUEUED];  // under the clock's lock
#define queued virtual_gpu_clock.queued
// Not in the queue yet: nobody waits for the kernels of an operator before it returns, but in its thread.
__thread Call virtual_gpu_call;
#define unqueued virtual_gpu_call

static int64_t takes(const Operation* what, double missed_share) {
  if (what->missed_ns) return what->held_ns + missed_share * (what->missed_ns - what->held_ns);
  if (!what->at_limit) return what->took_ns;
  int64_t limited = what->took_ns * what->at_limit / 100, slowed = limited * eased;
  computed += slowed;
  return what->took_ns - limited + slowed;
}
// The time in ns of the kernel that an operator launches at this place, from 0.
static int64_t share(const Operation* what, int place) {
  int64_t bare_ns = virtual_gpu_bare_ns(), others = bare_ns * (what->kernels - 1);
  if (place >= what->kernels) return bare_ns;  // more than when it was estimated
  if (what->product && others < what->takes / 2) return place + 1 == what->product ? what->takes - others : bare_ns;
  return what->takes * (place + 1) / what->kernels - what->takes * place / what->kernels;
}
static void begins(Operation* what, int slot, const Touch* touches, const Place* places, int count) {
  what->takes = takes(what, virtual_gpu_missed_share(slot, touches, places, count, what->results));
}
static void find_times(const Call* call) {
  Operation* what = call->what;
  int slot = virtual_gpu_slot(call->device);
  if (call->touched >= 0) begins(what, slot, call->touches, call->places, call->touched);
  if (call->kernel >= 0) virtual_gpu_place(what, call->stream, call->device, share(what, call->kernel), call->arrives);
  if (!call->returns) return;
  Touch result = {call->result_bytes};
  what->results = virtual_gpu_results(slot, &result, &call->result_place, result.bytes > 0);
}
__attribute__((noinline)) static void find_queued(void) {
  for (int i = 0; i < queued; i++) {
    __builtin_prefetch(queue[i].what), __builtin_prefetch(queue[i].touches);
    for (int each = 0; each < queue[i].touched; each++) virtual_gpu_will_touch(queue[i].places[each]);
  }
  for (int i = 0; i < queued; i++) find_times(&queue[i]);
  queued = 0;
}
// Another part of the operator begins.
static void next_part(void) { unqueued.touched = -1, unqueued.kernel = -1, unqueued.returns = 0; }
void virtual_gpu_drain(void) {
  find_queued();
  if (!unqueued.what) return;
  find_times(&unqueued);
  next_part();
}
static inline void append(void) {
  virtual_gpu_lock();
  if (__builtin_expect(queued == QUEUED, 0)) find_queued();
  queue[queued++] = unqueued;
  virtual_gpu_unlock();
}
__attribute__((noinline)) static void append_part(void) { append(), next_part(); }

// ---- operators

void virtual_gpu_begin_unknown(Operation* what) {
  virtual_gpu_begin_operator(what);
  if (what->took_ns < 0) products[0] = 0, unqueued.what = NULL;
}
void virtual_gpu_touches(const Touch* touches, const Place* places, int count) {
  unqueued.touched = -1;
  virtual_gpu_hold();
  begins(unqueued.what, virtual_gpu_slot(unqueued.device), touches, places, count);
  virtual_gpu_unlock();
}
// Where an operator tries several plans in its first call, as cuDNN's benchmark does, the later calls launch fewer kernels.
__attribute__((noinline, cold)) static void counts_fewer(Operation* what) {
  virtual_gpu_lock();
  find_queued();
  what->kernels = thread.launched;
  if (what->product > what->kernels) what->product = 0;
  virtual_gpu_unlock();
}
static inline void count_kernels(Operation* what) {
  if (thread.launched && thread.launched < what->kernels) counts_fewer(what);
}
void virtual_gpu_end_operator(float bytes, Place place) {
  Operation* what = unqueued.what;
  thread.runs = NULL;
  if (!what) return;
  count_kernels(what);
  unqueued.returns = 1, unqueued.result_bytes = bytes, unqueued.result_place = place;
  append();
  unqueued.what = NULL;
}
void virtual_gpu_end_operator_with(const Touch* results, const Place* places, int count) {
  thread.runs = NULL;
  Operation* what = unqueued.what;
  if (!what) return;
  count_kernels(what);
  virtual_gpu_hold();
  what->results = virtual_gpu_results(virtual_gpu_slot(unqueued.device), results, places, count);
  virtual_gpu_unlock();
  unqueued.what = NULL;
}
const char* virtual_gpu_products(void) { return products; }
int64_t virtual_gpu_computed(void) {
  virtual_gpu_hold();
  int64_t found = computed;
  virtual_gpu_unlock();
  return found;
}
void virtual_gpu_ease(double factor) {
  virtual_gpu_hold();
  eased = factor;
  virtual_gpu_unlock();
}
void virtual_gpu_place_pending(const Touch* touches, const Place* places, int touched) {
  Operation* what = thread.runs;
  int count = thread.pending, all = thread.launched;
  thread.runs = NULL, thread.pending = 0, unqueued.what = NULL;
  if (what->took_ns < 0) virtual_gpu_estimated(what, virtual_gpu_bare_ns() * count, "unknown", 0, 1);
  virtual_gpu_hold();
  begins(what, virtual_gpu_slot(virtual_gpu_current()), touches, places, touched);
  virtual_gpu_unlock();
  int products = 0;
  for (int i = 0; i < count; i++)
    if (pending[i].kernel.is_product) products++, what->product = i + 1;
  if (products != 1) what->product = 0;
  what->kernels = all;
  for (int i = 0; i < count; i++) {
    virtual_gpu_belongs_to(pending[i].call);
    virtual_gpu_work(what, &pending[i].kernel, pending[i].stream, share(what, i), pending[i].arrives);
  }
}

// ---- their kernels, and those of no operator

// The host's clock by the processor's counter, in a third of the time that clock_gettime takes. Each thread compares the
// two about every millisecond, and uses the counter once it knows its rate from the last one.
#ifdef __x86_64__
enum { LONG = 1 << 22 };  // ticks, until they are compared again
__attribute__((noinline)) static int64_t compared(uint64_t ticks, uint64_t passed) {
  int64_t now = virtual_gpu_host_ns();
  if (thread.at_ns && passed < LONG) return now;  // too short to tell a rate
  thread.ns_per_tick = thread.at_ns && passed < 16ull * LONG ? (double)(now - thread.at_ns) / passed : 0;
  thread.at_ticks = ticks, thread.at_ns = now;
  return now;
}
static inline int64_t host_ns(void) {
  uint64_t ticks = __builtin_ia32_rdtsc(), passed = ticks - thread.at_ticks;
  if (__builtin_expect(passed >= LONG || !thread.ns_per_tick, 0)) return compared(ticks, passed);
  return thread.at_ns + (int64_t)((int64_t)passed * thread.ns_per_tick);
}
#else
static inline int64_t host_ns(void) { return virtual_gpu_host_ns(); }
#endif

int virtual_gpu_joins(void* stream) {
  Operation* what = thread.runs;
  if (!what || !what->kernels || virtual_gpu_is_recording() || virtual_gpu_clock.capturing) return 0;
  if (__builtin_expect(unqueued.kernel >= 0, 0)) append_part();
  unqueued.stream = stream, unqueued.arrives = virtual_gpu_arrives(host_ns()), unqueued.kernel = thread.launched++;
  return 1;
}
void virtual_gpu_launched(const Kernel* kernel, void* stream) {
  if (virtual_gpu_joins(stream) || !virtual_gpu_has_clock()) return;
  Operation* what = thread.runs;
  if (!what) {
    char text[512];
    snprintf(text, sizeof text, "kernel %s", kernel->name ? kernel->name : "?");
    virtual_gpu_put(virtual_gpu_operation(kernel->name ? kernel->name : "?", text), kernel, stream);
    return;
  }
  uint32_t recorded = virtual_gpu_is_recording() ? virtual_gpu_record_call(LAUNCH_KERNEL) : 0;
  int64_t arrives = virtual_gpu_arrival();
  int place = thread.launched++;
  if (what->took_ns < 0 || !what->kernels) {
    if (thread.pending == room) pending = realloc(pending, (room = room ? 2 * room : 64) * sizeof *pending);
    pending[thread.pending++] = (Pending){*kernel, stream, arrives, recorded};
  } else {
    virtual_gpu_hold();
    int64_t took = share(what, place);
    virtual_gpu_unlock();
    virtual_gpu_work(what, kernel, stream, took, arrives);
  }
}
void virtual_gpu_put(Operation* what, const Kernel* kernel, void* stream) {
  if (!virtual_gpu_has_clock()) return;
  virtual_gpu_find_estimate(what);
  if (virtual_gpu_is_recording()) virtual_gpu_record_call(LAUNCH_KERNEL);
  virtual_gpu_work(what, kernel, stream, what->took_ns, virtual_gpu_arrival());
}
void virtual_gpu_spins(const Kernel* kernel, int64_t cycles, void* stream) {
  char text[64];
  snprintf(text, sizeof text, "spin %lld", (long long)cycles);
  Operation* what = virtual_gpu_operation(kernel->name, text);
  virtual_gpu_estimated(what, cycles * 1000000 / virtual_gpu_number("VIRTUAL_GPU_KILOHERTZ", 1000000), "spin", 0, 0);
  virtual_gpu_put(what, kernel, stream);
}
// Puts the kernels of a captured graph on the stream, one after the other.
void virtual_gpu_replay(const Kept* kernels, int count, void* stream) {
  if (!virtual_gpu_has_clock()) return;
  if (virtual_gpu_is_recording()) virtual_gpu_record_call(LAUNCH_GRAPH);
  int64_t arrives = virtual_gpu_arrival();
  for (int i = 0; i < count; i++) virtual_gpu_work(kernels[i].what, &kernels[i].kernel, stream, kernels[i].took_ns, arrives);
}
void virtual_gpu_multiplied(int type, long m, long n, long k, int batch, void* stream) {
  if (virtual_gpu_joins(stream) || !virtual_gpu_has_clock()) return;
  const char* dtype = type == CUDA_R_16BF ? "bf16" : type == CUDA_R_16F ? "fp16" : type == CUDA_R_32F ? "fp32"
                      : type == CUDA_R_64F ? "fp64" : type == CUDA_R_8I ? "int8" : "fp8";
  Kernel kernel = {type == CUDA_R_16BF  ? "cublas_gemm_bf16"
                   : type == CUDA_R_16F ? "cublas_gemm_fp16"
                   : type == CUDA_R_32F ? "cublas_gemm_fp32"
                                        : "cublas_gemm",
                   {1, 1, 1}, {256, 1, 1}, 0, 1};
  if (thread.runs && thread.runs->took_ns >= 0) {
    virtual_gpu_launched(&kernel, stream);
    return;
  }
  char shape[128], text[160];
  snprintf(shape, sizeof shape, "%s %ld %ld %ld %d;", dtype, m, n, k, batch);
  if (thread.runs) {
    strncat(products, shape, sizeof products - strlen(products) - 1);
    virtual_gpu_launched(&kernel, stream);
    return;
  }
  snprintf(text, sizeof text, "product %s", shape);
  virtual_gpu_put(virtual_gpu_operation(kernel.name, text), &kernel, stream);
}
