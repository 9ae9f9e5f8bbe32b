// cuFFT, which computes nothing. A plan takes the least work space that NVIDIA documents: a complex number for each
// element of each transform ("cuFFT API reference", memory). Lengths with large prime factors take up to 8 times that.
#include "clock.h"
#include "virtual_gpu.h"

#include <cufftXt.h>

static __thread cudaStream_t stream_of_plan;  // PyTorch sets it before each use

cufftResult cufftCreate(cufftHandle* plan) {
  static int plans;
  *plan = __atomic_add_fetch(&plans, 1, __ATOMIC_RELAXED);
  return CUFFT_SUCCESS;
}
cufftResult cufftSetStream(cufftHandle plan, cudaStream_t stream) {
  stream_of_plan = stream;
  return CUFFT_SUCCESS;
}
cufftResult cufftXtMakePlanMany(
    cufftHandle plan, int rank, long long* n, long long* inembed, long long istride, long long idist, cudaDataType from,
    long long* onembed, long long ostride, long long odist, cudaDataType to, long long batch, size_t* size,
    cudaDataType type) {
  *size = type == CUDA_C_64F ? 16 : type == CUDA_C_32F ? 8 : 4;
  for (int i = 0; i < rank; i++) *size *= n[i];
  *size *= batch;
  virtual_gpu_asked[CUFFT]++;
  return CUFFT_SUCCESS;
}
cufftResult cufftXtExec(cufftHandle plan, void* input, void* output, int direction) {
  CALLED;
  virtual_gpu_launched(&(Kernel){.name = "cufft_transform"}, stream_of_plan);
  return CUFFT_SUCCESS;
}
