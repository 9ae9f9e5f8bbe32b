// cuBLASLt: it offers one algorithm for every product, computes nothing, and takes the product's time on its stream.
#include "clock.h"
#include "virtual_gpu.h"

#include <cublasLt.h>
#include <stdlib.h>
#include <string.h>

static int something;
typedef struct {
  cudaDataType type;
  uint64_t rows, columns;
  int batch;
} Layout;
typedef struct {
  int32_t a, b;  // cublasOperation_t
} Product;

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
  *made = calloc(1, sizeof(Product));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(
    cublasLtMatmulDesc_t of, cublasLtMatmulDescAttributes_t which, const void* value, size_t size) {
  if (which == CUBLASLT_MATMUL_DESC_TRANSA) ((Product*)of)->a = *(const int32_t*)value;
  if (which == CUBLASLT_MATMUL_DESC_TRANSB) ((Product*)of)->b = *(const int32_t*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t of) {
  free(of);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t columns, int64_t stride) {
  Layout* layout = calloc(1, sizeof *layout);
  *layout = (Layout){type, rows, columns, 1};
  *made = (void*)layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(
    cublasLtMatrixLayout_t of, cublasLtMatrixLayoutAttribute_t which, const void* value, size_t size) {
  if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout*)of)->batch = *(const int32_t*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t of) {
  free(of);
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
cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void* alpha, const void* a, cublasLtMatrixLayout_t of_a,
    const void* b, cublasLtMatrixLayout_t of_b, const void* beta, const void* c, cublasLtMatrixLayout_t of_c, void* d,
    cublasLtMatrixLayout_t of_d, const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t size,
    cudaStream_t stream) {
  CALLED;
  Layout *left = (Layout*)of_a, *result = (Layout*)of_d;  // column-major: see `multiplied` in cublas.c
  uint64_t inner = ((Product*)product)->a == CUBLAS_OP_N ? left->columns : left->rows;
  virtual_gpu_multiplied(left->type, result->columns, result->rows, inner, result->batch, stream);
  return CUBLAS_STATUS_SUCCESS;
}
