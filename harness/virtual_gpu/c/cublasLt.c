// cuBLASLt, which knows one algorithm for everything, and computes nothing with it.
#include "virtual_gpu.h"

#include <cublasLt.h>
#include <string.h>

static int something;

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
  *made = (void*)&something;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t stride) {
  *made = (void*)&something;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = (void*)&something;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int asked,
    cublasLtMatmulHeuristicResult_t results[], int* found) {
  memset(results, 0, asked * sizeof *results);
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}
