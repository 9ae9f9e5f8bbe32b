// Streams, events and graphs. Events have the times of clock.c, and a thread that waits for one waits until then. When
// PyTorch's allocator asks whether an event is over, the answer is another one, so that memory does not depend on the
// speed of the host: work on a stream is done at once; or as late as can be, when the host has waited for it; or, if the
// user asks for it, when the clock says so. A captured graph keeps its kernels for the clock. Which streams take part in a
// capture is kept too: PyTorch's allocator asks, since their memory comes from the graph's own pool.
#define _GNU_SOURCE
#include "streams.h"
#include "activity.h"
#include "virtual_gpu.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MAX_CAPTURING 256
typedef unsigned long long Capture;  // its number; 0 is none
typedef struct {
  Kept* kernels;
  int count, room;
} Graph;
static struct {
  cudaStream_t stream;
  Capture capture;
  Graph* graph;
} capturing[MAX_CAPTURING];
#define num_capturing virtual_gpu_clock.capturing
static Capture last_capture;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// An amount of work on each stream, in events recorded there. Place 0 is the default stream's, and that of streams for
// which there is no place left.
#define MAX_STREAMS 64
typedef unsigned long long Work[MAX_STREAMS];
static cudaStream_t streams[MAX_STREAMS];
static int num_streams = 1;
static Work comes_after[MAX_STREAMS];  // by stream: the work that is done before what is put on it next
static Work waited_for;                // the work that the host has waited for
static pthread_mutex_t work_lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
  int64_t at, given_until;  // when it is over; when the work on its stream before it is done
  int64_t worked;           // when it is over, counted from 0, for a host that is never late
  int is_of_network;
  Capture capture;
  int place;
  Work work;
} Event;

// When an event is over, for PyTorch's allocator.
enum { AT_ONCE, LATE, BY_CLOCK };
static int over(void) {
  static int when = -1;
  if (when < 0) when = virtual_gpu_number("VIRTUAL_GPU_OVER", AT_ONCE);
  return when;
}
static int place_of(cudaStream_t stream) {
  for (int i = 1; i < num_streams; i++)
    if (streams[i] == stream) return i;
  if (stream <= cudaStreamPerThread || num_streams == MAX_STREAMS) return 0;
  streams[num_streams] = stream;
  return num_streams++;
}
static void add(unsigned long long* work, const unsigned long long* more) {
  for (int i = 0; i < num_streams; i++)
    if (work[i] < more[i]) work[i] = more[i];
}

static Capture capture_of(cudaStream_t stream) {
  Capture found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_capturing; i++)
    if (capturing[i].stream == stream) found = capturing[i].capture;
  pthread_mutex_unlock(&lock);
  return found;
}
int virtual_gpu_keeps(Operation* what, const Kernel* kernel, cudaStream_t stream, int64_t took_ns) {
  if (!num_capturing) return 0;
  Graph* graph = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < num_capturing; i++)
    if (capturing[i].stream == stream) graph = capturing[i].graph;
  if (graph) {
    if (graph->count == graph->room)
      graph->kernels = realloc(graph->kernels, (graph->room = graph->room ? 2 * graph->room : 64) * sizeof(Kept));
    graph->kernels[graph->count++] = (Kept){what, kernel ? *kernel : (Kernel){.name = what->name}, took_ns};
  }
  pthread_mutex_unlock(&lock);
  return graph != NULL;
}
// Adds the stream to a capture. `by_event`: because of an event of that capture, which may have ended before; a stream
// that is in a capture already stays there then.
static cudaError_t join(cudaStream_t stream, Capture capture, int by_event) {
  pthread_mutex_lock(&lock);
  int joins = !by_event, captures = 0, fits = num_capturing < MAX_CAPTURING;
  for (int i = 0; i < num_capturing; i++) joins |= capturing[i].capture == capture;
  for (int i = 0; i < num_capturing; i++) captures |= capturing[i].stream == stream;
  joins &= !captures;
  if (joins && fits) {
    Graph* graph = NULL;
    for (int i = 0; i < num_capturing; i++)
      if (capturing[i].capture == capture) graph = capturing[i].graph;
    capturing[num_capturing].stream = stream;
    capturing[num_capturing].graph = graph ? graph : calloc(1, sizeof *graph);
    capturing[num_capturing++].capture = capture;
  }
  pthread_mutex_unlock(&lock);
  if (captures && !by_event) return cudaErrorIllegalState;
  return joins && !fits ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = (cudaStream_t)virtual_gpu_handle();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
static void wait_until(int64_t moment) {
  int is_recording = virtual_gpu_is_recording();
  if (is_recording) virtual_gpu_record_call(SYNCHRONIZE);
  virtual_gpu_wait_until(moment);
  if (is_recording) virtual_gpu_record_return();
}
cudaError_t cudaDeviceSynchronize(void) {
  wait_until(virtual_gpu_device_done(virtual_gpu_current()));
  pthread_mutex_lock(&work_lock);
  for (int i = 0; i < num_streams; i++) add(waited_for, comes_after[i]);
  pthread_mutex_unlock(&work_lock);
  return num_capturing ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CALLED;
  wait_until(virtual_gpu_given_until(stream));
  pthread_mutex_lock(&work_lock);
  add(waited_for, comes_after[place_of(stream)]);
  pthread_mutex_unlock(&work_lock);
  return capture_of(stream) ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!virtual_gpu_has_clock()) return cudaSuccess;
  return virtual_gpu_given_until(stream) > virtual_gpu_now() ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned flags) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (!(flags & cudaEventDisableTiming)) virtual_gpu_is_timed();
  *event = calloc(1, sizeof(Event));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t recorded, cudaStream_t stream) {
  Event* event = (Event*)recorded;
  event->at = virtual_gpu_stream_done(stream, &event->is_of_network, &event->worked);
  event->given_until = virtual_gpu_given_until(stream);
  event->capture = capture_of(stream);
  pthread_mutex_lock(&work_lock);
  event->place = place_of(stream);
  comes_after[event->place][event->place]++;
  memcpy(event->work, comes_after[event->place], sizeof(Work));
  pthread_mutex_unlock(&work_lock);
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  wait_until(((Event*)event)->at);
  pthread_mutex_lock(&work_lock);
  add(waited_for, ((Event*)event)->work);
  pthread_mutex_unlock(&work_lock);
  return cudaSuccess;
}
// Whether the program itself asks, by torch.cuda.Event: its Python functions are in libtorch_python, and PyTorch's
// allocators and its watchdog of NCCL in other libraries.
static int is_the_program(const void* caller) {
  Dl_info its;
  return dladdr(caller, &its) && strstr(its.dli_fname, "libtorch_python");
}
cudaError_t cudaEventQuery(cudaEvent_t recorded) {
  Event* event = (Event*)recorded;
  pthread_mutex_lock(&work_lock);
  int is_done = over() == AT_ONCE || event->work[event->place] <= waited_for[event->place];
  if (over() == BY_CLOCK) is_done |= event->at <= virtual_gpu_now();
  pthread_mutex_unlock(&work_lock);
  if (event->given_until > virtual_gpu_now() && virtual_gpu_has_clock() && is_the_program(__builtin_return_address(0)))
    is_done = 0;
  return is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = (((Event*)to)->at - ((Event*)from)->at) * 1e-6;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}
// A stream that waits for an event of a stream that is being captured takes part in the capture.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!event) return cudaSuccess;
  pthread_mutex_lock(&work_lock);
  add(comes_after[place_of(stream)], ((Event*)event)->work);
  pthread_mutex_unlock(&work_lock);
  Event* until = (Event*)event;
  virtual_gpu_stream_waits(stream, until->at, until->is_of_network, until->worked);
  Capture capture = ((Event*)event)->capture;
  return capture ? join(stream, capture, 1) : cudaSuccess;
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  CALLED;
  return join(stream, __sync_add_and_fetch(&last_capture, 1), 0);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* made) {
  CALLED;
  Capture capture = capture_of(stream);
  pthread_mutex_lock(&lock);
  int kept = 0;
  Graph* graph = NULL;
  for (int i = 0; i < num_capturing; i++)
    if (capturing[i].capture != capture) capturing[kept++] = capturing[i];
    else graph = capturing[i].graph;
  num_capturing = kept;
  pthread_mutex_unlock(&lock);
  *made = (cudaGraph_t)graph;
  return capture ? cudaSuccess : cudaErrorIllegalState;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* captured,
    const cudaGraphNode_t** dependencies,
#if CUDART_VERSION >= 13000
    const cudaGraphEdgeData** edges,
#endif
    size_t* count) {
  if (id) *id = capture_of(stream);
  if (captured) *captured = (cudaGraph_t)1;  // PyTorch hands it back to us
  if (dependencies) *dependencies = NULL;
#if CUDART_VERSION >= 13000
  if (edges) *edges = NULL;
#endif
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t which, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes && *count) *nodes = (cudaGraphNode_t)1;
  *count = 1;  // PyTorch asks whether there is any
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t which, unsigned long long flags) {
  *made = (cudaGraphExec_t)which;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t captured, cudaStream_t stream) {
  CALLED;
  Graph* graph = (Graph*)captured;
  if (graph) virtual_gpu_replay(graph->kernels, graph->count, stream);
  return cudaSuccess;
}
// In CUDA an executable graph outlives the graph that it was instantiated from. Here both are one object, which is freed
// with the executable.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t captured) {
  Graph* graph = (Graph*)captured;
  if (graph) free(graph->kernels), graph->kernels = NULL, graph->count = graph->room = 0;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t which, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, which, flags);
}
