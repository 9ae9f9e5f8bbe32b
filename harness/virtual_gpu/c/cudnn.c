// Stands in front of the real cuDNN, which plans as it does on a device: it gets the device's properties where PyTorch
// passes a handle ("Deviceless Ahead-of-time Compilation" in cudnn-frontend's documentation, cuDNN 9.8 and later).
// Replaced are handles, the running of plans, and the operators of the older interface.
#include "clock.h"

#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define REAL(name) ((__typeof__(&name))dlsym(dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_NOLOAD), #name))

static char handle[1 << 16];  // the older interface reads from it
static __thread cudaStream_t stream_of_handle;  // PyTorch has a handle for each thread, and sets its stream

cudnnStatus_t cudnnCreate(cudnnHandle_t* made) {
  *made = (cudnnHandle_t)handle;
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

// The properties that runtime.c gives, as cuDNN serializes a device in JSON.
static cudnnBackendDescriptor_t device;
static cudnnStatus_t device_status;
static void make_device(void) {
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
  cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &device);
  if (status == CUDNN_STATUS_SUCCESS)
    status = REAL(cudnnBackendSetAttribute)(
        device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, length, text);
  device_status = status == CUDNN_STATUS_SUCCESS ? REAL(cudnnBackendFinalize)(device) : status;
}

cudnnStatus_t cudnnBackendSetAttribute(
    cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
    int64_t count, const void* elements) {
  if (type == CUDNN_TYPE_HANDLE) return CUDNN_STATUS_SUCCESS;
  if (name == CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_device);
    if (device_status != CUDNN_STATUS_SUCCESS) return device_status;
    cudnnStatus_t status = REAL(cudnnBackendSetAttribute)(
        descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &device);
    if (status != CUDNN_STATUS_SUCCESS) return status;
  }
  return REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, elements);
}
cudnnStatus_t cudnnBackendExecute(
    cudnnHandle_t which, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variant_pack) {
  virtual_gpu_launched(&(Kernel){.name = "cudnn_plan"}, stream_of_handle);  // its time is the operator's
  return CUDNN_STATUS_SUCCESS;
}

// The older interface, which PyTorch uses for batch normalization, recurrent networks and samplers of images.
static cudnnStatus_t nothing(void) {
  virtual_gpu_launched(&(Kernel){.name = "cudnn_kernel"}, stream_of_handle);
  return CUDNN_STATUS_SUCCESS;
}
#define COMPUTES_NOTHING(name) extern __typeof__(name) name __attribute__((alias("nothing")))
COMPUTES_NOTHING(cudnnBatchNormalizationForwardInference);
COMPUTES_NOTHING(cudnnBatchNormalizationForwardTrainingEx);
COMPUTES_NOTHING(cudnnBatchNormalizationBackwardEx);
COMPUTES_NOTHING(cudnnRNNForward);
COMPUTES_NOTHING(cudnnRNNBackwardData_v8);
COMPUTES_NOTHING(cudnnRNNBackwardWeights_v8);
COMPUTES_NOTHING(cudnnCTCLoss);
COMPUTES_NOTHING(cudnnCTCLoss_v8);
COMPUTES_NOTHING(cudnnPoolingForward);
COMPUTES_NOTHING(cudnnSpatialTfGridGeneratorForward);
COMPUTES_NOTHING(cudnnSpatialTfGridGeneratorBackward);
COMPUTES_NOTHING(cudnnSpatialTfSamplerForward);
COMPUTES_NOTHING(cudnnSpatialTfSamplerBackward);

// cuDNN writes the sizes, which need no device, before it fails for lack of one. It gives none for the algorithms that
// keep weights in a device's registers: these get the sizes of the standard algorithm.
cudnnStatus_t cudnnGetRNNTempSpaceSizes(
    cudnnHandle_t which, cudnnRNNDescriptor_t rnn, cudnnForwardMode_t mode, cudnnRNNDataDescriptor_t data,
    size_t* workspace, size_t* reserve) {
  cudnnStatus_t status = REAL(cudnnGetRNNTempSpaceSizes)(which, rnn, mode, data, workspace, reserve);
  if (status == CUDNN_STATUS_EXECUTION_FAILED_CUDART) return CUDNN_STATUS_SUCCESS;
  cudnnRNNAlgo_t algorithm;
  cudnnRNNMode_t cell;
  cudnnRNNBiasMode_t bias;
  cudnnDirectionMode_t direction;
  cudnnRNNInputMode_t input;
  cudnnDataType_t type, precision;
  cudnnMathType_t math;
  int32_t inputs, hidden, projected, layers;
  cudnnDropoutDescriptor_t dropout;
  uint32_t flags;
  cudnnRNNDescriptor_t standard;
  if (status != CUDNN_STATUS_NOT_SUPPORTED ||
      REAL(cudnnGetRNNDescriptor_v8)(rnn, &algorithm, &cell, &bias, &direction, &input, &type, &precision, &math, &inputs,
                                     &hidden, &projected, &layers, &dropout, &flags) ||
      algorithm == CUDNN_RNN_ALGO_STANDARD || REAL(cudnnCreateRNNDescriptor)(&standard))
    return status;
  if (!REAL(cudnnSetRNNDescriptor_v8)(standard, CUDNN_RNN_ALGO_STANDARD, cell, bias, direction, input, type, precision,
                                      math, inputs, hidden, projected, layers, dropout, flags))
    status = cudnnGetRNNTempSpaceSizes(which, standard, mode, data, workspace, reserve);
  REAL(cudnnDestroyRNNDescriptor)(standard);
  return status;
}
// In place of setting the descriptor it is restored, which fills no states.
cudnnStatus_t cudnnSetDropoutDescriptor(
    cudnnDropoutDescriptor_t dropout, cudnnHandle_t which, float probability, void* states, size_t size,
    unsigned long long seed) {
  return REAL(cudnnRestoreDropoutDescriptor)(dropout, which, probability, states, size, seed);
}
