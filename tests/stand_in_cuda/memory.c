// The stand-in's device memory: ranges of addresses that nothing touches, so PyTorch's own caching allocator
// runs where there is no GPU.
// FAKE_CAPACITY, FAKE_TOTAL: bytes that can be had, and that the device says it has.
// FAKE_ADDRESSES: up (each new range above the last), down, or randomN. FAKE_FIRST: where up begins.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE (2ull << 20)
#define MAX_RANGES (1 << 16)

typedef struct {
  uint64_t address, size;
} Range;
static Range ranges[MAX_RANGES];
static uint64_t capacity, total, used, first, next_up, next_down = 0x7E0000000000ull, seed;
static int direction = 1;
static __thread cudaError_t last_error;

uint64_t stand_in_number(const char* name, uint64_t otherwise) {
  const char* value = getenv(name);
  return value ? strtoull(value, NULL, 0) : otherwise;
}

static void setup(void) {
  if (capacity) return;
  capacity = stand_in_number("FAKE_CAPACITY", 1ull << 40);
  total = stand_in_number("FAKE_TOTAL", capacity);
  first = next_up = stand_in_number("FAKE_FIRST", 0x7F0000000000ull);
  const char* addresses = getenv("FAKE_ADDRESSES");
  if (addresses && !strcmp(addresses, "down")) direction = -1;
  if (addresses && !strncmp(addresses, "random", 6)) {
    direction = 0;
    seed = 2 * strtoull(addresses + 6, NULL, 10) + 1;
  }
}

static uint64_t pages(uint64_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

static int taken(uint64_t address, uint64_t size) {
  for (int i = 0; i < MAX_RANGES; i++)
    if (ranges[i].size && address < ranges[i].address + ranges[i].size && ranges[i].address < address + size)
      return 1;
  return 0;
}

static uint64_t reserve(uint64_t size) {
  uint64_t address;
  setup();
  size = pages(size);
  if (direction == 1) {
    address = next_up;
    next_up += size;
  } else if (direction == -1) {
    address = next_down -= size;
  } else {
    do {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      address = 0x600000000000ull + (seed >> 20) % (8ull << 20) * PAGE;
    } while (taken(address, size));
  }
  for (int i = 0; i < MAX_RANGES; i++)
    if (!ranges[i].size) {
      ranges[i] = (Range){address, size};
      return address;
    }
  abort();
}

static uint64_t unreserve(uint64_t address) {
  for (int i = 0; i < MAX_RANGES; i++)
    if (ranges[i].size && ranges[i].address == address) {
      uint64_t size = ranges[i].size;
      ranges[i].size = 0;
      return size;
    }
  abort();
}

cudaError_t cudaMalloc(void** pointer, size_t size) {
  setup();
  if (used + pages(size) > capacity) return last_error = cudaErrorMemoryAllocation;
  used += pages(size);
  *pointer = (void*)reserve(size);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  if (pointer) used -= unreserve((uint64_t)pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  setup();
  *free_bytes = capacity - used;
  *total_bytes = total;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

uint64_t stand_in_total(void) {
  setup();
  return total;
}
int stand_in_owns(const void* pointer) {
  setup();
  return direction == 1 && (uint64_t)pointer >= first && (uint64_t)pointer < next_up;
}

static CUresult address_reserve(CUdeviceptr* p, size_t size, size_t align, CUdeviceptr a, unsigned long long f) {
  *p = reserve(size);
  return CUDA_SUCCESS;
}
static CUresult address_free(CUdeviceptr pointer, size_t size) {
  unreserve(pointer);
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const void* properties, unsigned long long f) {
  setup();
  if (used + size > capacity) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *handle = size;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  used -= handle;
  return CUDA_SUCCESS;
}
static CUresult attribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = 0;  // neither handles for other processes nor multicast
  return CUDA_SUCCESS;
}
static CUresult success(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult* result) {
  *function = !strcmp(name, "cuMemAddressReserve")   ? (void*)address_reserve
              : !strcmp(name, "cuMemAddressFree")    ? (void*)address_free
              : !strcmp(name, "cuMemCreate")         ? (void*)create
              : !strcmp(name, "cuMemRelease")        ? (void*)release
              : !strcmp(name, "cuDeviceGetAttribute") ? (void*)attribute
                                                     : (void*)success;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
