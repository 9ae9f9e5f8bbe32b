// Kernels, which compute nothing: their names, and how they are launched.
#include "streams.h"
#include "virtual_gpu.h"

#include <cuda_runtime_api.h>
#include <string.h>

#define MAX_ANY 4096
static const void* any_kernels[MAX_ANY];
static int number_of_any_kernels;
static const void* spin_kernel;  // of torch.cuda._sleep: its argument is the cycles that it takes
static __thread const void* last_kernel;

// Whether the thread's last kernel was one of torch.any.
int virtual_gpu_was_any(void) {
  for (int i = 0; i < number_of_any_kernels; i++)
    if (any_kernels[i] == last_kernel) return 1;
  return 0;
}
// Names of kernels, by the host function that represents each.
#define MAX_NAMES (1 << 18)
static struct {
  const void* function;
  const char* name;
} names[MAX_NAMES];
static int number_of_names;
static unsigned name_place(const void* function) {
  unsigned place = ((uintptr_t)function >> 4) * 2654435761u % MAX_NAMES;
  while (names[place].function && names[place].function != function) place = (place + 1) % MAX_NAMES;
  return place;
}
static Kernel named(const void* function, dim3 grid, dim3 block, size_t shared) {
  return (Kernel){names[name_place(function)].name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared};
}
void** __cudaRegisterFatBinary(void* binary) { return (void**)virtual_gpu_handle(); }
void __cudaRegisterFunction(
    void** binary, const char* host_function, char* device_function, const char* name, int limit, void* thread,
    void* block, void* block_size, void* grid_size, int* warp_size) {
  if (strstr(name, "14or_kernel_cuda") && number_of_any_kernels < MAX_ANY)  // torch.any, not floor or logical_or
    any_kernels[number_of_any_kernels++] = host_function;
  if (strstr(name, "11spin_kernelEl")) spin_kernel = host_function;
  if (number_of_names == MAX_NAMES / 2) return;
  unsigned place = name_place(host_function);
  if (!names[place].function) number_of_names++;
  names[place].name = name, names[place].function = host_function;
}
// What stands between <<< and >>>, from the call until the launch.
static __thread struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
  *(cudaStream_t*)stream = configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  CALLED;
  last_kernel = function;
  if (virtual_gpu_joins(stream) || !virtual_gpu_has_clock()) return cudaSuccess;
  Kernel kernel = named(function, grid, block, shared);
  if (function == spin_kernel) virtual_gpu_spins(&kernel, *(int64_t*)arguments[0], stream);
  else virtual_gpu_launched(&kernel, stream);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function, void** arguments) {
  return cudaLaunchKernel(function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}
cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
