// Device memory: ranges of addresses that nothing may touch, so that PyTorch's own caching allocator runs where there
// is no GPU. At a fixed distance from each range lies host memory for its values (startup/virtual_gpu_held.py), of which
// only pages that are written exist. VIRTUAL_GPU_ADDRESSES says which address a new range gets: driver (as an H100's
// driver gives it: see harness/allocator/addresses.py), up (above the last one), down, or randomN with the seed N. The
// first two begin anew after 32 TiB; only they have room for values.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2ull << 20)
#define MAX_RANGES (1 << 16)
#define REGION (32ull << 20)
#define FIRST 0x100000000000ull
#define FROM_MEMORY_TO_VALUES 0x200000000000ull  // no process has anything of its own at either address
#define END (FIRST + FROM_MEMORY_TO_VALUES)      // the end of device memory: the values begin there

typedef struct {
  uint64_t address, size;
  int device, has_values;
} Range;
static Range ranges[MAX_RANGES];
static int range_end;
static Range left[MAX_RANGES];  // what is left of regions, by address
static int num_left;
static uint64_t total, lowest = END, next_up, next_down = 0x7E0000000000ull, seed;
static enum { DRIVER, UP, DOWN, RANDOM } order = DRIVER;
static int has_turned;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread cudaError_t last_error;

uint64_t virtual_gpu_number(const char* name, uint64_t otherwise) {
  const char* value = getenv(name);
  return value ? strtoull(value, NULL, 0) : otherwise;
}
const char* virtual_gpu_text(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value ? value : otherwise;
}

static void read_settings(void) {
  total = virtual_gpu_number("VIRTUAL_GPU_TOTAL", 1ull << 40);
  next_up = virtual_gpu_number("VIRTUAL_GPU_FIRST", FIRST);
  const char* addresses = virtual_gpu_text("VIRTUAL_GPU_ADDRESSES", "driver");
  if (!strcmp(addresses, "up")) order = UP;
  if (!strcmp(addresses, "down")) order = DOWN;
  if (!strncmp(addresses, "random", 6)) {
    order = RANDOM;
    seed = 2 * strtoull(addresses + 6, NULL, 10) + 1;
  }
}
static void setup(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_settings);
}

static uint64_t pages(uint64_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

static Range* range_of(uint64_t address) {
  for (int i = 0; i < range_end; i++)
    if (ranges[i].size && address >= ranges[i].address && address < ranges[i].address + ranges[i].size)
      return &ranges[i];
  return NULL;
}
static Range* taken(uint64_t address, uint64_t size) {
  for (int i = 0; i < range_end; i++)
    if (ranges[i].size && address < ranges[i].address + ranges[i].size && ranges[i].address < address + size)
      return &ranges[i];
  return NULL;
}
static void leave(uint64_t address, uint64_t size) {
  int i = num_left;
  if (!size || num_left == MAX_RANGES) return;
  for (; i && left[i - 1].address > address; i--) left[i] = left[i - 1];
  left[i] = (Range){address, size};
  num_left++;
}
static uint64_t as_the_driver(uint64_t size) {
  int i = 0;  // the second time round a region may lie where something was left before
  while (i < num_left && (left[i].size < size || (has_turned && taken(left[i].address, size)))) i++;
  Range room = {0, (size + REGION - 1) / REGION * REGION};
  if (i < num_left) {
    room = left[i];
    memmove(left + i, left + i + 1, (--num_left - i) * sizeof *left);
  } else {
    for (;;) {  // this ends: no program reserves nearly as much as there is
      if (lowest < FIRST + room.size) has_turned = 1, num_left = 0, lowest = END;
      Range* range = has_turned ? taken(lowest - room.size, room.size) : NULL;
      if (!range) break;
      lowest = range->address / REGION * REGION;
    }
    room.address = lowest -= room.size;
  }
  leave(room.address + size, room.size - size);
  return room.address;
}
static uint64_t reserve(uint64_t size, int device) {
  uint64_t address;
  size = pages(size);
  if (order == DRIVER) {
    address = as_the_driver(size);
  } else if (order == UP) {
    for (;;) {  // as above
      if (next_up + size > END) has_turned = 1, next_up = FIRST;
      Range* range = has_turned ? taken(next_up, size) : NULL;
      if (!range) break;
      next_up = range->address + range->size;
    }
    address = next_up;
    next_up += size;
  } else if (order == DOWN) {
    address = next_down -= size;
  } else {
    do {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      address = 0x600000000000ull + (seed >> 20) % (8ull << 20) * PAGE;
    } while (taken(address, size));
  }
  int i = 0;
  while (i < range_end && ranges[i].size) i++;
  if (i == MAX_RANGES) abort();
  if (i == range_end) range_end++;
  ranges[i] = (Range){address, size, device, 0};
  return address;
}
static void unreserve(Range* range) {
  if (range->has_values) munmap((void*)(range->address + FROM_MEMORY_TO_VALUES), range->size);
  if (order == DRIVER) leave(range->address, range->size);
  range->size = 0;
}

// Where the values of device memory are kept; NULL for a pointer to other memory, and where there is no room.
void* virtual_gpu_values(const void* pointer) {
  pthread_mutex_lock(&lock);
  Range* range = range_of((uint64_t)pointer);
  if (range && !range->has_values && order <= UP) {
    void* start = (void*)(range->address + FROM_MEMORY_TO_VALUES);
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    range->has_values = mmap(start, range->size, PROT_READ | PROT_WRITE, how, -1, 0) == start;
  }
  void* values = range && range->has_values ? (char*)pointer + FROM_MEMORY_TO_VALUES : NULL;
  pthread_mutex_unlock(&lock);
  return values;
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  CALLED;
  setup();
  *pointer = NULL;
  if (!size) return cudaSuccess;
  if (size > total || !virtual_gpu_take(virtual_gpu_slot(virtual_gpu_current()), pages(size)))
    return last_error = cudaErrorMemoryAllocation;
  pthread_mutex_lock(&lock);
  *pointer = (void*)reserve(size, virtual_gpu_current());
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  CALLED;
  if (!pointer) return cudaSuccess;
  pthread_mutex_lock(&lock);
  Range* range = range_of((uint64_t)pointer);
  int is_one = range && range->address == (uint64_t)pointer;
  if (is_one) {
    virtual_gpu_give_back(virtual_gpu_slot(range->device), range->size);
    unreserve(range);
  }
  pthread_mutex_unlock(&lock);
  return is_one ? cudaSuccess : (last_error = cudaFreeHost(pointer));  // managed memory is host memory here
}
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) { return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  setup();
  *free_bytes = virtual_gpu_left(virtual_gpu_slot(virtual_gpu_current()));
  *total_bytes = total;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
uint64_t virtual_gpu_total(void) {
  setup();
  return total;
}
int virtual_gpu_owner(const void* pointer) {
  pthread_mutex_lock(&lock);
  Range* range = range_of((uint64_t)pointer);
  int device = range ? range->device : -1;
  pthread_mutex_unlock(&lock);
  return device;
}

// The driver's calls for expandable segments.
static CUresult address_reserve(CUdeviceptr* p, size_t size, size_t align, CUdeviceptr a, unsigned long long f) {
  setup();
  pthread_mutex_lock(&lock);
  *p = reserve(size, virtual_gpu_current());
  pthread_mutex_unlock(&lock);
  return CUDA_SUCCESS;
}
static CUresult address_free(CUdeviceptr pointer, size_t size) {
  pthread_mutex_lock(&lock);
  Range* range = range_of(pointer);
  int is_one = range && range->address == pointer;
  if (is_one) unreserve(range);
  pthread_mutex_unlock(&lock);
  return is_one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
static CUresult create(
    CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties, unsigned long long f) {
  int slot = virtual_gpu_slot(properties->location.id);
  *handle = size | (uint64_t)slot << 56;
  return virtual_gpu_take(slot, size) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  virtual_gpu_give_back(handle >> 56, handle & ((1ull << 56) - 1));
  return CUDA_SUCCESS;
}
static CUresult attribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = 0;  // PyTorch asks for handles for other processes and for multicast, which are not here
  return CUDA_SUCCESS;
}
static CUresult success(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* result) {
  *function = !strcmp(name, "cuMemAddressReserve")    ? (void*)address_reserve
              : !strcmp(name, "cuMemAddressFree")     ? (void*)address_free
              : !strcmp(name, "cuMemCreate")          ? (void*)create
              : !strcmp(name, "cuMemRelease")         ? (void*)release
              : !strcmp(name, "cuDeviceGetAttribute") ? (void*)attribute
                                                      : (void*)success;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

int virtual_gpu_asked[3];
