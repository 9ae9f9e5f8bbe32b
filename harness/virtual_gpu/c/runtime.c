// The rest of the CUDA runtime: properties of devices and kernels, copies that move nothing.
#define _GNU_SOURCE
#include "streams.h"
#include "activity.h"
#include "virtual_gpu.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// ---- devices

static int slots[64], num_visible;

int virtual_gpu_count_all(void) { return virtual_gpu_number("VIRTUAL_GPU_COUNT", 1); }

// CUDA_VISIBLE_DEVICES as CUDA reads it: numbers up to the first that is no device's, or identifiers.
static void find_visible(void) {
  int all = virtual_gpu_count_all(), found = 0;
  const char* text = getenv("CUDA_VISIBLE_DEVICES");
  for (int i = 0; !text && i < all && i < 64; i++) slots[found++] = i;
  while (text && *text && found < 64) {
    int is_identifier = !strncmp(text, "GPU-", 4);
    char *number = (char*)text + 4 * is_identifier, *end;
    long slot = strtol(number, &end, is_identifier ? 16 : 10);
    if (end == number || slot < 0 || slot >= all) break;
    slots[found++] = slot;
    text = strchr(end, ',');
    if (text) text++;
  }
  num_visible = found;
}
int virtual_gpu_count(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (__builtin_expect(num_visible, 1)) return num_visible;
  pthread_once(&once, find_visible);
  return num_visible;
}
int virtual_gpu_slot(int device) { return device >= 0 && device < virtual_gpu_count() ? slots[device] : 0; }
int virtual_gpu_current(void) { return virtual_gpu_thread.device; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  if (device < 0 || device >= virtual_gpu_count()) return cudaErrorInvalidDevice;
  snprintf(p->name, sizeof p->name, "%s", virtual_gpu_text("VIRTUAL_GPU_NAME", "virtual GPU"));
  int capability = virtual_gpu_number("VIRTUAL_GPU_CAPABILITY", 90);
  p->major = capability / 10;
  p->minor = capability % 10;
  p->uuid.bytes[3] = p->pciBusID = virtual_gpu_slot(device);
  p->totalGlobalMem = virtual_gpu_total();
  p->multiProcessorCount = virtual_gpu_number("VIRTUAL_GPU_PROCESSORS", 132);
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = virtual_gpu_number("VIRTUAL_GPU_SHARED", 227 << 10);
  p->reservedSharedMemPerBlock = 1 << 10;
  p->sharedMemPerMultiprocessor = p->sharedMemPerBlockOptin + p->reservedSharedMemPerBlock;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  int has_fewer = (p->major == 8 && p->minor >= 6) || p->major >= 12;
  p->maxThreadsPerMultiProcessor = capability == 75 ? 1024 : has_fewer ? 1536 : 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = p->managedMemory = p->concurrentManagedAccess = p->concurrentKernels = 1;
  p->canMapHostMemory = p->cooperativeLaunch = p->streamPrioritiesSupported = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr which, int device) {
  struct cudaDeviceProp p;
  cudaError_t error = cudaGetDeviceProperties(&p, device);
  if (error) return error;
  *value = which == cudaDevAttrMaxThreadsPerBlock                  ? p.maxThreadsPerBlock
           : which == cudaDevAttrMaxSharedMemoryPerBlock           ? (int)p.sharedMemPerBlock
           : which == cudaDevAttrMaxSharedMemoryPerBlockOptin      ? (int)p.sharedMemPerBlockOptin
           : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor  ? (int)p.sharedMemPerMultiprocessor
           : which == cudaDevAttrReservedSharedMemoryPerBlock      ? (int)p.reservedSharedMemPerBlock
           : which == cudaDevAttrMultiProcessorCount               ? p.multiProcessorCount
           : which == cudaDevAttrComputeCapabilityMajor            ? p.major
           : which == cudaDevAttrComputeCapabilityMinor            ? p.minor
           : which == cudaDevAttrWarpSize                          ? p.warpSize
           : which == cudaDevAttrMaxGridDimX                       ? p.maxGridSize[0]
           : which == cudaDevAttrMaxGridDimY                       ? p.maxGridSize[1]
           : which == cudaDevAttrMaxGridDimZ                       ? p.maxGridSize[2]
           : which == cudaDevAttrMaxRegistersPerBlock              ? p.regsPerBlock
           : which == cudaDevAttrMaxThreadsPerMultiProcessor       ? p.maxThreadsPerMultiProcessor
           : which == cudaDevAttrMaxBlocksPerMultiprocessor        ? p.maxBlocksPerMultiProcessor
           : which == cudaDevAttrL2CacheSize                       ? p.l2CacheSize
           : which == cudaDevAttrTextureAlignment                  ? (int)p.textureAlignment
           : which == cudaDevAttrManagedMemory                     ? p.managedMemory
           : which == cudaDevAttrConcurrentManagedAccess           ? p.concurrentManagedAccess
           : which == cudaDevAttrUnifiedAddressing                 ? p.unifiedAddressing
           : which == cudaDevAttrCooperativeLaunch                 ? p.cooperativeLaunch
                                                                   : 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = virtual_gpu_count();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* device) {
  *device = virtual_gpu_thread.device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= virtual_gpu_count()) return cudaErrorInvalidDevice;
  virtual_gpu_thread.device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = virtual_gpu_number("VIRTUAL_GPU_CUDA", CUDART_VERSION);
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", virtual_gpu_slot(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
static const struct {
  cudaError_t error;
  const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to registered memory"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
};
static int place_of(cudaError_t error) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].error == error) return i;
  return -1;
}
const char* cudaGetErrorName(cudaError_t error) {
  int place = place_of(error);
  return place < 0 ? "cudaErrorUnknown" : errors[place].name;
}
const char* cudaGetErrorString(cudaError_t error) {
  int place = place_of(error);
  return place < 0 ? "an error of the virtual GPU" : errors[place].text;
}

// ---- kernels, as far as they are asked about

uint64_t virtual_gpu_handle(void) {
  static uint64_t last = 0x1000;
  return __sync_add_and_fetch(&last, 16);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = virtual_gpu_number("VIRTUAL_GPU_BINARY", 90);
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void* function, int threads, size_t shared, unsigned flags) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  *blocks = threads > 0 && threads <= p.maxThreadsPerMultiProcessor ? p.maxThreadsPerMultiProcessor / threads : 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

// ---- refused: memory and events of several processes, and the driver's own memory pools

static cudaError_t refuse(const char* sentence) {
  fprintf(stderr, "virtual GPU: %s.\n", sentence);
  return cudaErrorNotSupported;
}
#define BETWEEN "a tensor of the device cannot be given to another process here: each has its own. Share it on the CPU"
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* pointer) { return refuse(BETWEEN); }
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) { return refuse(BETWEEN); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) { return refuse(BETWEEN); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) { return refuse(BETWEEN); }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return refuse("the driver's own pool of memory (backend:cudaMallocAsync) is not here: nobody else knows what it "
                "reserves. Leave that setting out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF");
}

// ---- memory of the host, and copies

#define MAX_HOST (1 << 16)
static struct {
  char* start;
  size_t size;
  enum cudaMemoryType type;
} host[MAX_HOST];
static int host_end;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards host and host_end

static cudaError_t keep(void* start, size_t size, enum cudaMemoryType type) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < host_end && host[i].start) i++;
  int fits = i < MAX_HOST;
  if (fits && i == host_end) host_end++;
  if (fits) host[i].start = start, host[i].size = size, host[i].type = type;
  pthread_mutex_unlock(&lock);
  return fits ? cudaSuccess : cudaErrorMemoryAllocation;
}
// The type of the host memory that a pointer points to; Unregistered for memory that CUDA does not know. `forget`: it is
// removed from the list if the pointer is its start.
static enum cudaMemoryType kept(const void* pointer, int forget, size_t* size) {
  enum cudaMemoryType type = cudaMemoryTypeUnregistered;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < host_end && type == cudaMemoryTypeUnregistered; i++) {
    char *start = host[i].start, *at = (char*)pointer;
    if (!start || at < start || at >= start + host[i].size || (forget && at != start)) continue;
    type = host[i].type;
    if (size) *size = host[i].size;
    if (forget) host[i].start = NULL;
  }
  pthread_mutex_unlock(&lock);
  return type;
}
static cudaError_t take(void** pointer, size_t size, enum cudaMemoryType type) {
  *pointer = NULL;
  if (!size) return cudaSuccess;
  void* start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return cudaErrorMemoryAllocation;
  cudaError_t error = keep(start, size, type);
  if (error) munmap(start, size);
  else *pointer = start;
  return error;
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  return take(pointer, size, cudaMemoryTypeHost);
}
cudaError_t cudaMallocHost(void** pointer, size_t size) { return take(pointer, size, cudaMemoryTypeHost); }
cudaError_t cudaMallocManaged(void** pointer, size_t size, unsigned flags) {
  return take(pointer, size, cudaMemoryTypeManaged);
}
cudaError_t cudaFreeHost(void* pointer) {
  size_t size;
  if (!pointer) return cudaSuccess;
  if (kept(pointer, 1, &size) == cudaMemoryTypeUnregistered) return cudaErrorInvalidValue;
  munmap(pointer, size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned flags) {
  return keep(pointer, size, cudaMemoryTypeHost);
}
cudaError_t cudaHostUnregister(void* pointer) {
  return kept(pointer, 1, NULL) == cudaMemoryTypeUnregistered ? cudaErrorHostMemoryNotRegistered : cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  int device = virtual_gpu_owner(pointer);
  attributes->type = device >= 0 ? cudaMemoryTypeDevice : kept(pointer, 0, NULL);
  if (device >= 0) attributes->device = device;
  if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = (void*)pointer;
  if (device < 0) attributes->hostPointer = (void*)pointer;
  return cudaSuccess;
}
int virtual_gpu_is_pinned(const void* pointer) { return kept(pointer, 0, NULL) != cudaMemoryTypeUnregistered; }
// A number that an operator's kernel would count (startup/virtual_gpu_values.py): this thread's next copies to the host
// read it.
static __thread char answer[64];
static __thread size_t answer_size;
void virtual_gpu_answer(const void* bytes, size_t size) {
  answer_size = size < sizeof answer ? size : sizeof answer;
  memcpy(answer, bytes, answer_size);
}
// Fills with zeros, and leaves pages that were never written without memory.
static void clear(char* to, size_t size) {
  static const char zeros[4096];
  unsigned char there[256];
  size_t before = -(uintptr_t)to % sizeof zeros;
  if (before > size) before = size;
  memset(to, 0, before);
  to += before, size -= before;
  while (size >= sizeof zeros) {
    size_t pages = size / sizeof zeros;
    if (pages > sizeof there) pages = sizeof there;
    if (mincore(to, pages * sizeof zeros, there)) memset(there, 1, pages);
    for (size_t i = 0; i < pages; i++, to += sizeof zeros, size -= sizeof zeros)
      if (there[i] & 1 && memcmp(to, zeros, sizeof zeros)) memset(to, 0, sizeof zeros);
  }
  memset(to, 0, size);
}
// Device memory reads as zeros, since no kernel computed it. A single byte, a bool, reads as the result of a reduction
// over nothing: true, but false after torch.any.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  CALLED;
  if (kind == cudaMemcpyDeviceToDevice) {
    virtual_gpu_launched(&(Kernel){.name = "copy within the device", .copied_bytes = size}, stream);
    return cudaSuccess;
  }
  virtual_gpu_copied(to, from, size, stream);
  if (virtual_gpu_owner(to) >= 0) return cudaSuccess;
  int64_t stopped = virtual_gpu_stop_clock();
  if (virtual_gpu_owner(from) < 0) {
    memcpy(to, from, size);
  } else if (answer_size) {
    memset(to, 0, size);
    memcpy(to, answer, size < answer_size ? size : answer_size);
  } else if (size == 1) {
    *(char*)to = !virtual_gpu_was_any();
  } else {
    clear(to, size);
  }
  virtual_gpu_go_on(stopped);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, enum cudaMemcpyKind kind) {
  cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
  virtual_gpu_wait_until(virtual_gpu_given_until(NULL));
  return error;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  CALLED;
  virtual_gpu_launched(&(Kernel){.name = "memset", .set_bytes = size}, stream);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }
