// Stands in front of cuDNN, which plans as it does on the device: it is given the device's properties where PyTorch
// gives a handle ("Deviceless Ahead-of-time Compilation" in cudnn-frontend's documentation, cuDNN 9.8 and later).
// What is left out: handles, and running the plans.
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define REAL(name) ((__typeof__(&name))dlsym(dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD), #name))

static char handle;
static cudaStream_t stream_of_handle;

cudnnStatus_t cudnnCreate(cudnnHandle_t* made) {
  *made = (cudnnHandle_t)&handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t which) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t which, cudaStream_t stream) {
  stream_of_handle = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t which, cudaStream_t* stream) {
  *stream = stream_of_handle;
  return CUDNN_STATUS_SUCCESS;
}

// The device of runtime.c, in the words of cuDNN's own serialization of a device.
static cudnnStatus_t make_device(cudnnBackendDescriptor_t* made) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, 0);
  char text[2048];
  int length = snprintf(
      text, sizeof text,
      "{\"driverVer\": %d, \"deviceVer\": %d, \"cudaDeviceId\": 0, \"totalGlobalMem\": %zu, "
      "\"maxGridSize\": [%d, %d, %d], \"maxBlockSize\": [%d, %d, %d], \"regsPerBlock\": %d, "
      "\"multiProcessorCount\": %d, \"warpSize\": %d, \"maxSharedMemoryPerBlock\": %zu, "
      "\"maxSharedMemoryPerBlockOptin\": %zu, \"reservedSharedMemoryPerBlock\": %zu, \"maxRegistersPerSM\": %d, "
      "\"maxCtasPerSM\": %d, \"maxThreadsPerBlock\": %d, \"maxThreadsPerSM\": %d, \"pciDeviceId\": 0, "
      "\"isTccDriver\": 0, \"supportCoopLaunch\": 1, \"smClockRateKHz\": 1500000, \"memClockRateKHz\": 2000000, "
      "\"l2CacheSize\": %d, \"deviceName\": \"%s\"}",
      CUDART_VERSION, p.major * 100 + p.minor * 10, p.totalGlobalMem, p.maxGridSize[0], p.maxGridSize[1], p.maxGridSize[2],
      p.maxThreadsDim[0], p.maxThreadsDim[1], p.maxThreadsDim[2], p.regsPerBlock, p.multiProcessorCount, p.warpSize,
      p.sharedMemPerBlock, p.sharedMemPerBlockOptin, p.reservedSharedMemPerBlock, p.regsPerMultiprocessor,
      p.maxBlocksPerMultiProcessor, p.maxThreadsPerBlock, p.maxThreadsPerMultiProcessor, p.l2CacheSize, p.name);
  cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, made);
  if (status == CUDNN_STATUS_SUCCESS)
    status = REAL(cudnnBackendSetAttribute)(
        *made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length, text);
  return status == CUDNN_STATUS_SUCCESS ? REAL(cudnnBackendFinalize)(*made) : status;
}

cudnnStatus_t cudnnBackendSetAttribute(
    cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
    int64_t count, const void* elements) {
  if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
  if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) {
    static cudnnBackendDescriptor_t device;
    if (!device) {
      cudnnStatus_t status = make_device(&device);
      if (status != CUDNN_STATUS_SUCCESS) return status;
    }
    cudnnStatus_t status = REAL(cudnnBackendSetAttribute)(
        descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    if (status != CUDNN_STATUS_SUCCESS) return status;
  }
  return REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, elements);
}
cudnnStatus_t cudnnBackendExecute(
    cudnnHandle_t which, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variant_pack) {
  return CUDNN_STATUS_SUCCESS;
}
