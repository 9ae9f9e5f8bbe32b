// cuBLAS: its products compute nothing and take their time on the stream. Each handle is another object, since PyTorch
// keeps a workspace for each.
#include "clock.h"
#include "virtual_gpu.h"

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>

struct cublasContext {
  cudaStream_t stream;
};
cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = calloc(1, sizeof **handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
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

// cuBLAS' matrices are column-major: PyTorch's product of m x k and k x n is one of n x k and k x m here.
static cublasStatus_t multiplied(cublasHandle_t handle, cudaDataType type, int columns, int rows, int inner, int batch) {
  virtual_gpu_multiplied(type, rows, columns, inner, batch, handle->stream);
  return CUBLAS_STATUS_SUCCESS;
}
#define PLAIN cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k
#define PRODUCT(name, number, type)                                                                                  \
  cublasStatus_t cublas##name##gemm_v2(PLAIN, const number* alpha, const number* a, int lda, const number* b, int ldb, \
                                       const number* beta, number* c, int ldc) {                                    \
    return multiplied(handle, type, m, n, k, 1);                                                                     \
  }                                                                                                                  \
  cublasStatus_t cublas##name##gemmStridedBatched(                                                                  \
      PLAIN, const number* alpha, const number* a, int lda, long long sa, const number* b, int ldb, long long sb,     \
      const number* beta, number* c, int ldc, long long sc, int batch) {                                             \
    return multiplied(handle, type, m, n, k, batch);                                                                 \
  }
PRODUCT(S, float, CUDA_R_32F)
PRODUCT(D, double, CUDA_R_64F)
cublasStatus_t cublasGemmEx(PLAIN, const void* alpha, const void* a, cudaDataType type, int lda, const void* b,
                            cudaDataType tb_, int ldb, const void* beta, void* c, cudaDataType tc, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return multiplied(handle, type, m, n, k, 1);
}
cublasStatus_t cublasSgemmEx(PLAIN, const float* alpha, const void* a, cudaDataType type, int lda, const void* b,
                             cudaDataType tb_, int ldb, const float* beta, void* c, cudaDataType tc, int ldc) {
  return multiplied(handle, type, m, n, k, 1);
}
cublasStatus_t cublasGemmStridedBatchedEx(
    PLAIN, const void* alpha, const void* a, cudaDataType type, int lda, long long sa, const void* b, cudaDataType tb_,
    int ldb, long long sb, const void* beta, void* c, cudaDataType tc, int ldc, long long sc, int batch,
    cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return multiplied(handle, type, m, n, k, batch);
}
// Solvers of many small systems, which say on the host whether what they are given can be.
#define SOLVERS(S, T)                                                                                                  \
  cublasStatus_t cublas##S##getrsBatched(cublasHandle_t handle, cublasOperation_t ta, int n, int columns,               \
                                         const T* const a[], int lda, const int* pivots, T* const b[], int ldb,         \
                                         int* info, int batch) {                                                       \
    return *info = CUBLAS_STATUS_SUCCESS;                                                                              \
  }                                                                                                                    \
  cublasStatus_t cublas##S##geqrfBatched(cublasHandle_t handle, int m, int n, T* const a[], int lda, T* const tau[],    \
                                         int* info, int batch) {                                                       \
    return *info = CUBLAS_STATUS_SUCCESS;                                                                              \
  }                                                                                                                    \
  cublasStatus_t cublas##S##gelsBatched(cublasHandle_t handle, cublasOperation_t ta, int m, int n, int columns,         \
                                        T* const a[], int lda, T* const c[], int ldc, int* info, int* of_each,         \
                                        int batch) {                                                                   \
    return *info = CUBLAS_STATUS_SUCCESS;                                                                              \
  }
SOLVERS(S, float)
SOLVERS(D, double)
SOLVERS(C, cuComplex)
SOLVERS(Z, cuDoubleComplex)
