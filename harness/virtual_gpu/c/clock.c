// The device's clock. The host's time is the real one. Work of the device takes the time that was estimated for it, on
// its stream: it begins when it has arrived from the host, the work before it on the stream is done, and the events
// that the stream waits for are over. Nobody sleeps: a host that waits for the device skips that time, and its clock is
// ahead by it from then on. With VIRTUAL_GPU_REAL_TIME=1, and while a profiler records, the host does sleep.
#define _GNU_SOURCE
#include "clock.h"
#include "virtual_gpu.h"
#include "streams.h"
#include "activity.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_TIMELINES 256

typedef struct {  // of one stream
  cudaStream_t stream;
  int device;
  int64_t done, waits_until;    // when the last work on it is done; when the last event that it waits for is over
  int64_t worked, works_after;  // the same two, counted from 0, for a host that is never late
  int waits_for_network, ends_with_network;  // whether that event, and that last work, is a collective
} Timeline;
static Timeline timelines[MAX_TIMELINES];
static int num_timelines;
static Account accounts[64];         // by slot
static int64_t links[64][2];         // by slot and direction: when the link to the host is free again
static int64_t links_worked[64][2];  // the same, counted from 0, for a host that is never late
static int64_t waited;               // all waiting that was skipped
static int64_t bare_ns;              // virtual_gpu_start_clock sets these two
static double link_rate;             // bytes/s
static void (*estimate)(Operation*);

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }
Clock virtual_gpu_clock = {.is_real = 1};
#define CLOCK virtual_gpu_clock
void virtual_gpu_look_whether_real(void) {
  int is_now = virtual_gpu_is_recording() || virtual_gpu_number("VIRTUAL_GPU_REAL_TIME", 0);
  int64_t passed = __atomic_load_n(&CLOCK.following_ns, __ATOMIC_RELAXED);
  if (is_now && !CLOCK.is_real) CLOCK.before_real = passed;
  if (CLOCK.is_real && !is_now) CLOCK.while_real += passed - CLOCK.before_real;
  __atomic_store_n(&CLOCK.is_real, is_now, __ATOMIC_RELAXED);
}
int64_t virtual_gpu_now(void) { return virtual_gpu_host_ns() + virtual_gpu_ahead(); }
int64_t virtual_gpu_stop_clock(void) { return virtual_gpu_host_ns(); }
void virtual_gpu_go_on(int64_t stopped) {
  if (!virtual_gpu_is_real_time()) __atomic_fetch_sub(&CLOCK.skipped, virtual_gpu_host_ns() - stopped, __ATOMIC_RELAXED);
}
int64_t virtual_gpu_waited(void) { return waited; }
int virtual_gpu_has_clock(void) { return estimate != NULL; }

// Python starts the clock when the program first asks for a time, not before: starting takes half a second.
static void (*start)(void);
void virtual_gpu_start_when_timed(void (*starter)(void)) { start = starter; }
void virtual_gpu_is_timed(void) {
  void (*starter)(void) = __atomic_exchange_n(&start, NULL, __ATOMIC_RELAXED);
  if (!starter) return;
  int64_t stopped = virtual_gpu_stop_clock();
  starter();
  virtual_gpu_go_on(stopped);
}

// Called from Python: with the function that estimates, the ns from a launch to the kernel's begin on an idle stream,
// the ns of a kernel that moves nothing, and the link's bytes/s.
void virtual_gpu_start_clock(void (*estimator)(Operation*), int64_t launch, int64_t bare, double link) {
  CLOCK.launch_ns = launch, bare_ns = bare, link_rate = link;
  estimate = estimator;
  virtual_gpu_look_whether_real();
}

// Returns when `moment` is over on the clock.
static void wait_until(int64_t moment) {
  int64_t left = moment - virtual_gpu_now();
  if (left <= 0) return;
  if (virtual_gpu_is_real_time()) {
    struct timespec sleep = {left / 1000000000, left % 1000000000};
    nanosleep(&sleep, NULL);
    return;
  }
  virtual_gpu_lock();
  left = moment - virtual_gpu_now();  // another thread may have waited meanwhile
  if (left > 0) __atomic_fetch_add(&CLOCK.skipped, left, __ATOMIC_RELAXED), waited += left;
  virtual_gpu_unlock();
}

// ---- operations, by description

#define MAX_OPERATIONS (1 << 17)
static Operation **table, *all[MAX_OPERATIONS];
static int num_operations;
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t hash_of(const char* text) {
  uint64_t hash = 1469598103934665603ull;
  for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 1099511628211ull;
  return hash;
}
Operation* virtual_gpu_operation(const char* name, const char* description) {
  static Operation others = {.name = "others", .description = "others", .its_class = "unknown", .is_unknown = 1};
  pthread_mutex_lock(&table_lock);
  if (!table) table = calloc(2 * MAX_OPERATIONS, sizeof *table);
  uint64_t place = hash_of(description) % (2 * MAX_OPERATIONS);
  while (table[place] && strcmp(table[place]->description, description)) place = (place + 1) % (2 * MAX_OPERATIONS);
  Operation* found = table[place];
  if (!found && num_operations < MAX_OPERATIONS) {
    // side by side: a program calls most of them in the order in which it called them first
    static Operation* side_by_side;
    if (num_operations % 256 == 0) side_by_side = aligned_alloc(64, 256 * sizeof *found);
    found = table[place] = memset(side_by_side++, 0, sizeof *found);
    found->name = strdup(name), found->description = strdup(description), found->took_ns = -1;
    all[num_operations++] = found;
  }
  pthread_mutex_unlock(&table_lock);
  return found ? found : &others;
}
void virtual_gpu_estimated(Operation* what, int64_t took_ns, const char* its_class, double flops, int is_unknown) {
  what->its_class = virtual_gpu_operation(its_class, its_class)->name;  // a name that stays
  what->flops = flops, what->is_unknown = is_unknown;
  what->took_ns = took_ns;
}
void virtual_gpu_cached(Operation* what, int64_t held_ns, int64_t missed_ns, const char* accesses) {
  what->held_ns = held_ns, what->missed_ns = missed_ns, what->accesses = strdup(accesses);
}
void virtual_gpu_find_estimate(Operation* what) {
  if (what->took_ns < 0 && estimate) {
    int64_t stopped = virtual_gpu_stop_clock();
    estimate(what);
    virtual_gpu_go_on(stopped);
  }
  if (what->took_ns < 0) virtual_gpu_estimated(what, bare_ns, "unknown", 0, 1);
}

// ---- time

static Timeline* timeline_of(cudaStream_t stream, int device) {
  if (stream <= cudaStreamPerThread) stream = NULL;  // each device's default stream; others have a number of their own
  for (int i = 0; i < num_timelines; i++)
    if (timelines[i].stream == stream && timelines[i].device == device) return &timelines[i];
  if (num_timelines == MAX_TIMELINES) return &timelines[0];
  timelines[num_timelines] = (Timeline){.stream = stream, .device = device};
  return &timelines[num_timelines++];
}
// `link`: of a copy to or from the host, when its direction of the link is free.
static int64_t place(Operation* what, Timeline* line, int64_t took, int64_t arrives, int64_t* link) {
  int64_t free_at = later(line->done, line->waits_until);
  int64_t begins = later(later(arrives, free_at), link ? *link : 0);
  Account* account = &accounts[virtual_gpu_slot(line->device) & 63];
  if (line->done && !line->stream) {
    int64_t ready = later(arrives, line->done);
    if (line->waits_for_network) account->exposed_ns += later(line->waits_until - ready, 0);
    account->host_ns += later(arrives - free_at, 0);
  }
  int64_t* other_link = link ? &links_worked[0][0] + (link - &links[0][0]) : NULL;
  line->worked = later(later(line->worked, line->works_after), other_link ? *other_link : 0) + took;
  if (other_link) *other_link = line->worked;
  line->done = begins + took;
  line->waits_for_network = 0;
  line->ends_with_network = what->is_network;
  if (link) *link = line->done;
  if (what->is_network) account->network_ns += took;
  else if (!link) account->busy_ns += took;
  what->calls++, what->total_ns += took;
  return begins;
}
void virtual_gpu_place(Operation* what, cudaStream_t stream, int device, int64_t took, int64_t arrives) {
  place(what, timeline_of(stream, device), took, arrives, NULL);
}
static void put(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took, int64_t arrives, int64_t* link,
                const Copy* copy) {
  if (virtual_gpu_keeps(what, kernel, stream, took)) return;
  int device = virtual_gpu_current();
  virtual_gpu_hold();
  Timeline* line = timeline_of(stream, device);
  int64_t begins = place(what, line, took, arrives, link), ends = line->done;
  int number = line->stream ? 13 + (int)(line - timelines) : 7;  // as CUPTI counts streams
  virtual_gpu_unlock();
  if (virtual_gpu_is_recording()) virtual_gpu_record_work(kernel, copy, number, device, begins, ends);
}
void virtual_gpu_work(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took, int64_t arrives) {
  put(what, kernel, stream, took, arrives, NULL, NULL);
}
int64_t virtual_gpu_bare_ns(void) { return bare_ns; }

// A copy over the link to the host: one at a time in each direction. A copy within a device is a kernel of the operator.
void virtual_gpu_copied(const void* to, const void* from, size_t size, void* stream) {
  static Operation* over_link[2];
  if (!estimate) return;
  int goes_in = virtual_gpu_owner(to) >= 0, comes_out = virtual_gpu_owner(from) >= 0;
  if (goes_in == comes_out) {
    if (goes_in) virtual_gpu_launched(&(Kernel){.name = "copy within the device", .copied_bytes = size}, stream);
    return;
  }
  if (!over_link[0]) {
    over_link[1] = virtual_gpu_operation("copy to the device", "copy to the device");
    over_link[0] = virtual_gpu_operation("copy to the host", "copy to the host");
    for (int i = 0; i < 2; i++) virtual_gpu_estimated(over_link[i], 0, "copy", 0, 0);
  }
  if (virtual_gpu_is_recording()) virtual_gpu_record_call(COPY);
  int64_t arrives = virtual_gpu_arrival(), took = 1000 + size * 1e9 / link_rate;
  Copy copy = {size, goes_in, virtual_gpu_is_pinned(goes_in ? from : to)};
  put(over_link[goes_in], NULL, stream, took, arrives, &links[virtual_gpu_slot(virtual_gpu_current()) & 63][goes_in], &copy);
}

// ---- for streams.c

int64_t virtual_gpu_stream_done(cudaStream_t stream, int* with_network, int64_t* worked) {
  virtual_gpu_hold();
  Timeline* line = timeline_of(stream, virtual_gpu_current());
  int64_t done = later(line->done, line->waits_until);
  *worked = later(line->worked, line->works_after);
  *with_network = line->done >= line->waits_until ? line->ends_with_network : line->waits_for_network;
  virtual_gpu_unlock();
  return later(done, virtual_gpu_arrival());
}
void virtual_gpu_stream_waits(cudaStream_t stream, int64_t moment, int for_network, int64_t worked) {
  virtual_gpu_hold();
  Timeline* line = timeline_of(stream, virtual_gpu_current());
  if (moment > line->waits_until) line->waits_until = moment, line->waits_for_network = for_network;
  line->works_after = later(line->works_after, worked);
  virtual_gpu_unlock();
}
void virtual_gpu_wait_until(int64_t moment) {
  if (estimate) wait_until(moment);
}
int64_t virtual_gpu_given_until(cudaStream_t stream) {
  virtual_gpu_hold();
  Timeline* line = timeline_of(stream, virtual_gpu_current());
  int64_t done = later(line->done, line->waits_until);
  virtual_gpu_unlock();
  return done;
}
int64_t virtual_gpu_device_done(int device) {
  int64_t done = 0;
  virtual_gpu_hold();
  for (int i = 0; i < num_timelines; i++)
    if (timelines[i].device == device) done = later(done, later(timelines[i].done, timelines[i].waits_until));
  virtual_gpu_unlock();
  return done;
}
// The same, counted from 0, for a host that is never late: the time that the device needs for all its work.
int64_t virtual_gpu_device_worked(int device) {
  int64_t worked = 0;
  virtual_gpu_hold();
  for (int i = 0; i < num_timelines; i++)
    if (timelines[i].device == device) worked = later(worked, timelines[i].worked);
  virtual_gpu_unlock();
  return worked;
}

// ---- for Python: what a device did
void virtual_gpu_account(int device, Account* to) {
  virtual_gpu_hold();
  *to = accounts[virtual_gpu_slot(device) & 63];
  virtual_gpu_unlock();
}
// A step has ended: the calls of operations since the end of the step before are that step's. Returns their FLOPs.
double virtual_gpu_end_step(void) {
  double flops = 0;
  virtual_gpu_hold();
  for (int i = 0; i < num_operations; i++) {
    Operation* what = all[i];
    what->step_calls = what->calls - what->calls_before, what->step_ns = what->total_ns - what->ns_before;
    what->calls_before = what->calls, what->ns_before = what->total_ns;
    flops += what->step_calls * what->flops / (what->kernels > 1 ? what->kernels : 1);
  }
  virtual_gpu_unlock();
  return flops;
}
const Operation* virtual_gpu_nth_operation(int n) { return n < num_operations ? all[n] : NULL; }
