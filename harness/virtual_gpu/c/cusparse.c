// cuSPARSE, whose products compute nothing. NVIDIA documents no product's buffer: none is taken here. How many entries
// a product or a sum of two sparse matrices has depends on values: here it is estimated from the counts of entries.
#include "clock.h"
#include "virtual_gpu.h"

#include <cusparse.h>
#include <stdlib.h>

static __thread cudaStream_t stream_of_handle;  // PyTorch sets it before each use
typedef struct {
  int64_t rows, columns, entries;
} Matrix;

// ---- handles, descriptions, and other things that PyTorch only hands back

static cusparseStatus_t make(void** made) {
  *made = calloc(1, sizeof(Matrix));
  return CUSPARSE_STATUS_SUCCESS;
}
static cusparseStatus_t destroy(void* made) {
  free(made);
  return CUSPARSE_STATUS_SUCCESS;
}
#define AS(function, name) extern __typeof__(name) name __attribute__((alias(#function)))
AS(make, cusparseCreate);
AS(make, cusparseCreateMatDescr);
AS(make, cusparseCreateBsrsm2Info);
AS(make, cusparseCreateBsrsv2Info);
AS(make, cusparseCreateDnVec);
AS(make, cusparseCreateDnMat);
AS(make, cusparseSpGEMM_createDescr);
AS(make, cusparseSpSM_createDescr);
AS(make, cusparseSpSV_createDescr);
AS(destroy, cusparseDestroy);
AS(destroy, cusparseDestroyMatDescr);
AS(destroy, cusparseDestroyBsrsm2Info);
AS(destroy, cusparseDestroyBsrsv2Info);
AS(destroy, cusparseDestroyDnVec);
AS(destroy, cusparseDestroyDnMat);
AS(destroy, cusparseDestroySpMat);
AS(destroy, cusparseSpGEMM_destroyDescr);
AS(destroy, cusparseSpSM_destroyDescr);
AS(destroy, cusparseSpSV_destroyDescr);
cusparseStatus_t cusparseSetStream(cusparseHandle_t handle, cudaStream_t stream) {
  stream_of_handle = stream;
  return CUSPARSE_STATUS_SUCCESS;
}
const char* cusparseGetErrorString(cusparseStatus_t status) { return "an error of the virtual GPU"; }

static cusparseStatus_t make_sparse(void** made, int64_t rows, int64_t columns, int64_t entries) {
  Matrix* matrix = malloc(sizeof *matrix);
  *matrix = (Matrix){rows, columns, entries};
  *made = matrix;
  return CUSPARSE_STATUS_SUCCESS;
}
AS(make_sparse, cusparseCreateCsr);
AS(make_sparse, cusparseCreateCoo);
cusparseStatus_t cusparseSpMatGetSize(cusparseConstSpMatDescr_t which, int64_t* rows, int64_t* columns, int64_t* entries) {
  const Matrix* matrix = (const void*)which;
  *rows = matrix->rows, *columns = matrix->columns, *entries = matrix->entries;
  return CUSPARSE_STATUS_SUCCESS;
}

// ---- buffers

#define HANDLE cusparseHandle_t handle
#define NO_BUFFER(name, ...)                      \
  cusparseStatus_t cusparse##name(__VA_ARGS__) {  \
    *size = 0;                                    \
    virtual_gpu_asked[CUSPARSE]++;                \
    return CUSPARSE_STATUS_SUCCESS;               \
  }
#define PRODUCT HANDLE, cusparseOperation_t ta, cusparseOperation_t tb, const void* alpha
NO_BUFFER(SpMM_bufferSize, PRODUCT, cusparseConstSpMatDescr_t a, cusparseConstDnMatDescr_t b, const void* beta,
          cusparseDnMatDescr_t c, cudaDataType type, cusparseSpMMAlg_t how, size_t* size)
NO_BUFFER(SDDMM_bufferSize, PRODUCT, cusparseConstDnMatDescr_t a, cusparseConstDnMatDescr_t b, const void* beta,
          cusparseSpMatDescr_t c, cudaDataType type, cusparseSDDMMAlg_t how, size_t* size)
NO_BUFFER(SpMV_bufferSize, HANDLE, cusparseOperation_t ta, const void* alpha, cusparseConstSpMatDescr_t a,
          cusparseConstDnVecDescr_t x, const void* beta, cusparseDnVecDescr_t y, cudaDataType type, cusparseSpMVAlg_t how,
          size_t* size)
NO_BUFFER(SpSV_bufferSize, HANDLE, cusparseOperation_t ta, const void* alpha, cusparseConstSpMatDescr_t a,
          cusparseConstDnVecDescr_t x, cusparseDnVecDescr_t y, cudaDataType type, cusparseSpSVAlg_t how,
          cusparseSpSVDescr_t plan, size_t* size)
NO_BUFFER(SpSM_bufferSize, PRODUCT, cusparseConstSpMatDescr_t a, cusparseConstDnMatDescr_t b,
          cusparseDnMatDescr_t c, cudaDataType type, cusparseSpSMAlg_t how, cusparseSpSMDescr_t plan, size_t* size)
NO_BUFFER(Xcoosort_bufferSizeExt, HANDLE, int m, int n, int entries, const int* rows, const int* columns,
          size_t* size)
NO_BUFFER(Xcsrsort_bufferSizeExt, HANDLE, int m, int n, int entries, const int* rows, const int* columns,
          size_t* size)
#define OF_TYPE(S, T)                                                                                                   \
  NO_BUFFER(S##csrgeam2_bufferSizeExt, HANDLE, int m, int n, const T* alpha, cusparseMatDescr_t a, int na,       \
            const T* va, const int* ra, const int* ca, const T* beta, cusparseMatDescr_t b, int nb, const T* vb,         \
            const int* rb, const int* cb, cusparseMatDescr_t c, const T* vc, const int* rc, const int* cc, size_t* size) \
  NO_BUFFER(S##bsrsm2_bufferSize, HANDLE, cusparseDirection_t d, cusparseOperation_t ta, cusparseOperation_t tx,    \
            int mb, int n, int nb, cusparseMatDescr_t a, T* v, const int* r, const int* c, int block, bsrsm2Info_t info, \
            int* size)                                                                                                  \
  NO_BUFFER(S##bsrsv2_bufferSize, HANDLE, cusparseDirection_t d, cusparseOperation_t ta, int mb, int nb,            \
            cusparseMatDescr_t a, T* v, const int* r, const int* c, int block, bsrsv2Info_t info, int* size)
OF_TYPE(S, float)
OF_TYPE(D, double)
OF_TYPE(C, cuComplex)
OF_TYPE(Z, cuDoubleComplex)

// ---- products

static cusparseStatus_t nothing(void) {
  virtual_gpu_launched(&(Kernel){.name = "cusparse_kernel"}, stream_of_handle);
  return CUSPARSE_STATUS_SUCCESS;
}
AS(nothing, cusparseSpMM);
AS(nothing, cusparseSpMV);
AS(nothing, cusparseSpSM_solve);
AS(nothing, cusparseSpSV_solve);
AS(nothing, cusparseSDDMM);
AS(nothing, cusparseSpGEMM_copy);
#define PRODUCTS(S)                     \
  AS(nothing, cusparse##S##bsrmm);      \
  AS(nothing, cusparse##S##bsrmv);      \
  AS(nothing, cusparse##S##bsrsm2_solve); \
  AS(nothing, cusparse##S##bsrsv2_solve); \
  AS(nothing, cusparse##S##csrgeam2);
PRODUCTS(S)
PRODUCTS(D)
PRODUCTS(C)
PRODUCTS(Z)

// Each entry of the left matrix makes as many entries as a row of the right one has on average; the result has no more
// than all its places.
#define SPARSE_PRODUCT                                                                                                  \
  PRODUCT, cusparseConstSpMatDescr_t a, cusparseConstSpMatDescr_t b, const void *beta, cusparseSpMatDescr_t c,           \
      cudaDataType type, cusparseSpGEMMAlg_t how, cusparseSpGEMMDescr_t plan
cusparseStatus_t cusparseSpGEMM_workEstimation(SPARSE_PRODUCT, size_t* size, void* buffer) {
  const Matrix *left = (const void*)a, *right = (const void*)b;
  Matrix* result = (void*)c;
  double met = right->rows ? (double)left->entries * right->entries / right->rows : 0, all = (double)result->rows * result->columns;
  result->entries = met < all ? met : all;
  virtual_gpu_asked[CUSPARSE]++;
  *size = 0;
  return CUSPARSE_STATUS_SUCCESS;
}
cusparseStatus_t cusparseSpGEMM_compute(SPARSE_PRODUCT, size_t* size, void* buffer) {
  *size = 0;
  return CUSPARSE_STATUS_SUCCESS;  // cusparseSpGEMM_copy is the kernel that profilers see
}
cusparseStatus_t cusparseXcsrgeam2Nnz(
    HANDLE, int m, int n, cusparseMatDescr_t a, int na, const int* ra, const int* ca, cusparseMatDescr_t b, int nb,
    const int* rb, const int* cb, cusparseMatDescr_t c, int* rc, int* entries, void* buffer) {
  *entries = na + nb;
  return CUSPARSE_STATUS_SUCCESS;
}
static cusparseStatus_t no_zero(HANDLE, void* info, int* position) {
  *position = -1;
  return CUSPARSE_STATUS_SUCCESS;
}
AS(no_zero, cusparseXbsrsm2_zeroPivot);
AS(no_zero, cusparseXbsrsv2_zeroPivot);
