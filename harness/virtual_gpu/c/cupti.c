// CUPTI, from which torch.profiler gets the device's kernels and copies and the calls to CUDA, with the times of
// clock.c. It does what Kineto needs (pytorch/kineto, libkineto/src/CuptiActivityApi.cpp), which enables kinds of
// activity, pushes the number of the operator that runs, and takes the records in buffers of its own.
#define _GNU_SOURCE
#include "activity.h"
#include "streams.h"
#include "virtual_gpu.h"

#include <cupti.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STRIDE 320  // bytes of a record: of the largest struct, with room for fields that later releases append
typedef union {
  CUpti_Activity any;
  CUpti_ActivityKernel9 kernel;
  CUpti_ActivityMemcpy5 copy;
  CUpti_ActivityMemset4 set;
  CUpti_ActivityAPI call;
  CUpti_ActivityExternalCorrelation external;
  char bytes[STRIDE];
} Record;
#define DEPTH 4096
typedef struct {
  uint64_t numbers[DEPTH];
  int depth;
} Stack;

static Record* records;
static size_t count, room;
static unsigned char is_enabled[CUPTI_ACTIVITY_KIND_COUNT];
static uint32_t last_correlation;
static __thread uint32_t correlation;
static __thread Stack stacks[CUPTI_EXTERNAL_CORRELATION_KIND_SIZE];
static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;
static CUpti_TimestampCallbackFunc ticks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Kineto takes records only if it was asked for a buffer before, so the first call that is recorded asks for one.
static uint8_t* first_buffer;
static size_t first_size;
static void ask_for_buffer(void) {
  uint8_t* buffer = NULL;
  size_t size = 0, most = 0;
  if (__atomic_load_n(&first_buffer, __ATOMIC_RELAXED) || !request) return;
  request(&buffer, &size, &most);
  pthread_mutex_lock(&lock);
  if (!first_buffer) first_buffer = buffer, first_size = size, buffer = NULL;
  pthread_mutex_unlock(&lock);
  if (buffer) complete(NULL, 0, buffer, size, 0);  // another thread was faster
}

static Record* append(CUpti_ActivityKind kind) {
  if (count == room) records = realloc(records, (room = room ? 2 * room : 4096) * sizeof *records);
  memset(&records[count], 0, sizeof *records);
  records[count].any.kind = kind;
  return &records[count++];
}

// ---- what the other libraries report. Records have the times of virtual_gpu_now() until Kineto takes them.

static const CUpti_CallbackId called[] = {
    [LAUNCH_KERNEL] = CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000,
    [COPY] = CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020,
    [SET] = CUPTI_RUNTIME_TRACE_CBID_cudaMemsetAsync_v3020,
    [SYNCHRONIZE] = CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020,
    [LAUNCH_GRAPH] = CUPTI_RUNTIME_TRACE_CBID_cudaGraphLaunch_v10000,
};
static __thread size_t last_call;

void virtual_gpu_belongs_to(uint32_t call) { correlation = call; }
uint32_t virtual_gpu_record_call(enum Call which) {
  ask_for_buffer();
  pthread_mutex_lock(&lock);
  correlation = ++last_correlation;
  for (int kind = 0; kind < CUPTI_EXTERNAL_CORRELATION_KIND_SIZE; kind++) {
    Stack* stack = &stacks[kind];
    if (!stack->depth || !is_enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) continue;
    CUpti_ActivityExternalCorrelation* external = &append(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION)->external;
    external->externalKind = kind;
    external->externalId = stack->numbers[stack->depth - 1];
    external->correlationId = correlation;
  }
  if (is_enabled[CUPTI_ACTIVITY_KIND_RUNTIME]) {
    last_call = count;
    CUpti_ActivityAPI* call = &append(CUPTI_ACTIVITY_KIND_RUNTIME)->call;
    call->cbid = called[which];
    call->start = virtual_gpu_now();
    call->end = call->start + 1000;
    call->processId = getpid();
    call->threadId = (uint32_t)pthread_self();
    call->correlationId = correlation;
  }
  pthread_mutex_unlock(&lock);
  return correlation;
}
void virtual_gpu_record_return(void) {
  pthread_mutex_lock(&lock);
  if (last_call < count && records[last_call].any.kind == CUPTI_ACTIVITY_KIND_RUNTIME &&
      records[last_call].call.correlationId == correlation)
    records[last_call].call.end = virtual_gpu_now();
  pthread_mutex_unlock(&lock);
}
void virtual_gpu_record_work(const Kernel* kernel, const Copy* copy, int stream, int device, int64_t begins, int64_t ends) {
  Copy within = {kernel ? kernel->copied_bytes : 0};
  int is_within = within.size > 0;
  if (is_within) copy = &within;
  pthread_mutex_lock(&lock);
  if (copy && is_enabled[CUPTI_ACTIVITY_KIND_MEMCPY]) {
    CUpti_ActivityMemcpy5* made = &append(CUPTI_ACTIVITY_KIND_MEMCPY)->copy;
    uint8_t host = copy->is_pinned ? CUPTI_ACTIVITY_MEMORY_KIND_PINNED : CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
    made->copyKind = is_within          ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD
                     : copy->to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD
                                       : CUPTI_ACTIVITY_MEMCPY_KIND_DTOH;
    made->srcKind = copy->to_device ? host : CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    made->dstKind = copy->to_device || is_within ? CUPTI_ACTIVITY_MEMORY_KIND_DEVICE : host;
    made->bytes = copy->size, made->start = begins, made->end = ends;
    made->deviceId = device, made->contextId = device + 1, made->streamId = stream, made->correlationId = correlation;
  } else if (kernel && kernel->set_bytes && is_enabled[CUPTI_ACTIVITY_KIND_MEMSET]) {
    CUpti_ActivityMemset4* made = &append(CUPTI_ACTIVITY_KIND_MEMSET)->set;
    made->memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE, made->bytes = kernel->set_bytes;
    made->start = begins, made->end = ends;
    made->deviceId = device, made->contextId = device + 1, made->streamId = stream, made->correlationId = correlation;
  } else if (kernel && is_enabled[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL]) {
    CUpti_ActivityKernel9* made = &append(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)->kernel;
    made->name = kernel->name ? kernel->name : "unnamed";
    made->start = begins, made->end = made->completed = ends;
    made->deviceId = device, made->contextId = device + 1, made->streamId = stream, made->correlationId = correlation;
    int has_grid = kernel->grid[0] && kernel->block[0];
    made->gridX = has_grid ? kernel->grid[0] : 1, made->gridY = has_grid ? kernel->grid[1] : 1;
    made->gridZ = has_grid ? kernel->grid[2] : 1, made->blockX = has_grid ? kernel->block[0] : 1;
    made->blockY = has_grid ? kernel->block[1] : 1, made->blockZ = has_grid ? kernel->block[2] : 1;
    made->dynamicSharedMemory = kernel->shared, made->registersPerThread = 32;
  }
  pthread_mutex_unlock(&lock);
}

// ---- what Kineto calls

CUptiResult cuptiGetVersion(uint32_t* version) {
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetResultString(CUptiResult result, const char** text) {
  *text = "an error of the virtual GPU's profiler";
  return CUPTI_SUCCESS;
}
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* made, CUpti_CallbackFunc callback, void* data) {
  *made = (CUpti_SubscriberHandle)records;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t which, const char** name) {
  static const char* const names[] = {
      [LAUNCH_KERNEL] = "cudaLaunchKernel_v7000", [COPY] = "cudaMemcpyAsync_v3020", [SET] = "cudaMemsetAsync_v3020",
      [SYNCHRONIZE] = "cudaStreamSynchronize_v3020", [LAUNCH_GRAPH] = "cudaGraphLaunch_v10000"};
  *name = "unknown";
  for (unsigned i = 0; i < sizeof called / sizeof *called; i++)
    if (domain == CUPTI_CB_DOMAIN_RUNTIME_API && called[i] == which) *name = names[i];
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(
    CUpti_BuffersCallbackRequestFunc requested, CUpti_BuffersCallbackCompleteFunc completed) {
  request = requested, complete = completed;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc function) {
  ticks = function;
  return CUPTI_SUCCESS;
}
static void look_whether_recording(void) {
  int records_now = is_enabled[CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL] || is_enabled[CUPTI_ACTIVITY_KIND_RUNTIME];
  __atomic_store_n(&virtual_gpu_clock.records, records_now, __ATOMIC_RELAXED);
  virtual_gpu_look_whether_real();
}
// Kineto's records have the time of its callback, or of the host's wall clock. The rate between that clock and this
// one's follows from two looks at both.
typedef struct {
  uint64_t theirs;
  int64_t ours;
} Look;
static Look first, second;
static Look look(void) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  return (Look){ticks ? ticks() : at.tv_sec * 1000000000ull + at.tv_nsec, virtual_gpu_now()};
}
static uint64_t handed_on(uint64_t moment) {
  double rate = second.ours > first.ours ? (double)(second.theirs - first.theirs) / (second.ours - first.ours) : 1;
  return first.theirs + (int64_t)(((int64_t)moment - first.ours) * rate);
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  virtual_gpu_is_timed();
  pthread_mutex_lock(&lock);
  if (!virtual_gpu_is_recording()) first = look();
  is_enabled[kind] = 1;
  look_whether_recording();
  pthread_mutex_unlock(&lock);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  is_enabled[kind] = 0;
  look_whether_recording();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t number) {
  Stack* stack = &stacks[kind];
  if (stack->depth < DEPTH) stack->numbers[stack->depth] = number;
  stack->depth++;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  Stack* stack = &stacks[kind];
  if (!stack->depth) return CUPTI_ERROR_QUEUE_EMPTY;
  stack->depth--;
  if (last) *last = stack->numbers[stack->depth < DEPTH ? stack->depth : DEPTH - 1];
  return CUPTI_SUCCESS;
}
static void in_their_time(Record* record) {
  if (record->any.kind == CUPTI_ACTIVITY_KIND_RUNTIME) {
    record->call.start = handed_on(record->call.start), record->call.end = handed_on(record->call.end);
  } else if (record->any.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    record->copy.start = handed_on(record->copy.start), record->copy.end = handed_on(record->copy.end);
  } else if (record->any.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    record->set.start = handed_on(record->set.start), record->set.end = handed_on(record->set.end);
  } else if (record->any.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    record->kernel.start = handed_on(record->kernel.start), record->kernel.end = handed_on(record->kernel.end);
    record->kernel.completed = record->kernel.end;
  }
}
CUptiResult cuptiActivityFlushAll(uint32_t flag) {
  pthread_mutex_lock(&lock);
  Record* taken = records;
  size_t number = count;
  records = NULL, count = room = 0;
  second = look();
  uint8_t* buffer = first_buffer;
  size_t size = first_size, most = 0;
  first_buffer = NULL;
  pthread_mutex_unlock(&lock);
  if (buffer && !number) complete(NULL, 0, buffer, size, 0);
  for (size_t i = 0; i < number && request; buffer = NULL) {
    if (!buffer) request(&buffer, &size, &most);
    if (!buffer || size < STRIDE) break;
    size_t fits = size / STRIDE < number - i ? size / STRIDE : number - i;
    for (size_t n = 0; n < fits; n++) in_their_time(&taken[i + n]);
    memcpy(buffer, &taken[i], fits * STRIDE);
    complete(NULL, 0, buffer, size, fits * STRIDE);
    i += fits;
  }
  free(taken);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t size, CUpti_Activity** record) {
  uint8_t* next = *record ? (uint8_t*)*record + STRIDE : buffer;
  if (next + STRIDE > buffer + size) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (CUpti_Activity*)next;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t* dropped) {
  *dropped = 0;
  return CUPTI_SUCCESS;
}
