// The CUDA driver, for libraries that call it themselves: Triton, and torch when it looks for a compiler of kernels.
#define _GNU_SOURCE
#include "clock.h"
#include "virtual_gpu.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define SUCCEEDS(name, arguments, effect) \
  CUresult name arguments {               \
    effect;                               \
    return CUDA_SUCCESS;                  \
  }
SUCCEEDS(cuDriverGetVersion, (int* version), cudaDriverGetVersion(version))
SUCCEEDS(cuDeviceGet, (CUdevice * device, int index), *device = index)
SUCCEEDS(cuDeviceGetCount, (int* count), cudaGetDeviceCount(count))
SUCCEEDS(cuDeviceGetAttribute, (int* value, CUdevice_attribute which, CUdevice device),
         cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)which, device))
SUCCEEDS(cuCtxGetCurrent, (CUcontext * context), *context = (CUcontext)1)
SUCCEEDS(cuCtxGetDevice, (CUdevice * device), cudaGetDevice(device))
SUCCEEDS(cuMemGetInfo, (size_t* free_bytes, size_t* total), cudaMemGetInfo(free_bytes, total))
SUCCEEDS(cuDeviceTotalMem, (size_t* total, CUdevice device), *total = virtual_gpu_total())
SUCCEEDS(cuDeviceGetName, (char* name, int size, CUdevice device),
         snprintf(name, size, "%s", virtual_gpu_text("VIRTUAL_GPU_NAME", "virtual GPU")))
SUCCEEDS(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), *context = (CUcontext)1)
SUCCEEDS(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned* flags, int* active), (*flags = 0, *active = 1))
SUCCEEDS(cuGetErrorString, (CUresult error, const char** text), *text = "an error of the virtual GPU")
SUCCEEDS(cuGetErrorName, (CUresult error, const char** text), *text = "error")
SUCCEEDS(cuModuleLoadData, (CUmodule * module, const void* image), *module = (CUmodule)1)
// The handle of a function is its name, in memory that stays. Triton launches its kernels by these handles.
static const char* kept_name(const char* name) { return virtual_gpu_operation(name, name)->name; }
SUCCEEDS(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name),
         *function = (CUfunction)kept_name(name))
SUCCEEDS(cuLibraryLoadData,
         (CUlibrary * library, const void* code, CUjit_option* a, void** b, unsigned c, CUlibraryOption* d, void** e,
          unsigned f),
         *library = (CUlibrary)1)
SUCCEEDS(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char* name),
         *kernel = (CUkernel)kept_name(name))
SUCCEEDS(cuKernelGetFunction, (CUfunction * function, CUkernel kernel), *function = (CUfunction)kernel)
static CUresult launched(CUfunction function, const unsigned* grid, const unsigned* block, unsigned shared, CUstream stream) {
  Kernel kernel = {(const char*)function, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared};
  virtual_gpu_launched(&kernel, stream);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void** arguments, void** extra) {
  CALLED;
  return launched(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction function, void** arguments, void** extra) {
  CALLED;
  return launched(function, &how->gridDimX, &how->blockDimX, how->sharedMemBytes, how->hStream);
}
SUCCEEDS(cuFuncGetAttribute, (int* value, CUfunction_attribute which, CUfunction function),
         *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
// Host memory that is not pinned is an error: Triton recognizes a tensor of the CPU by it.
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr pointer) {
  struct cudaPointerAttributes its;
  cudaPointerGetAttributes(&its, (void*)pointer);
  if (its.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  int is_host = its.type == cudaMemoryTypeHost;
  switch (which) {  // the size of the value differs
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr*)value = pointer; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)value = is_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)value = its.device; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}
// A library with a CUDA runtime of its own asks cuGetProcAddress for the driver's functions, and finds none. Its own
// error would mislead (libcudart.so.12 next to PyTorch's 13 says that the driver is too old), so this says the reason.
static const char* const without[][2] = {  // a part of the library's path, and what it is for
    {"libcusparseLt.so", "products of matrices with two zeros in four"},
    {"cuda/bindings", "calls of CUDA from Python itself"},
};
static void say_who(const void* caller) {
  static int said, said_without[sizeof without / sizeof *without];
  Dl_info its;
  if (!dladdr(caller, &its)) return;
  if (strstr(its.dli_fname, "libcudart.so") && !said++)
    fprintf(stderr, "virtual GPU: %s is the runtime of another CUDA than PyTorch's and does not work here. Install the "
            "build for PyTorch's CUDA of what loads it.\n", its.dli_fname);
  for (unsigned i = 0; i < sizeof without / sizeof *without; i++)
    if (strstr(its.dli_fname, without[i][0]) && !said_without[i]++)
      fprintf(stderr, "virtual GPU: there are no %s here: %s cannot be replaced. Compute them on the CPU, or leave them "
              "out of what you emulate.\n", without[i][1], without[i][0]);
}
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  CALLED;
  say_who(__builtin_return_address(0));
  *function = NULL;
  if (!status) return CUDA_ERROR_NOT_FOUND;
  *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
CUresult cuGetExportTable(const void** table, const CUuuid* which) {
  say_who(__builtin_return_address(0));
  return CUDA_ERROR_NOT_FOUND;  // NVIDIA's own libraries ask for private tables: there are none
}
