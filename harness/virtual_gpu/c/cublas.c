// cuBLAS, whose products compute nothing. Handles differ, since PyTorch keeps a workspace for each.
#include "virtual_gpu.h"

#include <cublas_v2.h>

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = (cublasHandle_t)virtual_gpu_handle();
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}
