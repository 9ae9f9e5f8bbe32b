// cuSOLVER, which decomposes nothing. NVIDIA documents no routine's work space: each gets the one that LAPACK documents
// for the routine of that name, with LAPACK's own block sizes (ilaenv.f).
#include "clock.h"
#include "virtual_gpu.h"

#include <cusolverDn.h>
#include <stdlib.h>

static __thread cudaStream_t stream_of_handle;  // PyTorch sets it before each use
enum { BLOCK = 32, BLOCK_OF_SYMMETRIC = 64 };
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define MOST(a, b) ((a) < (b) ? (b) : (a))

// ---- handles, and other things that PyTorch only hands back

static cusolverStatus_t make(void** made) {
  *made = malloc(1);
  return CUSOLVER_STATUS_SUCCESS;
}
static cusolverStatus_t destroy(void* made) {
  free(made);
  return CUSOLVER_STATUS_SUCCESS;
}
#define AS(function, name) extern __typeof__(name) name __attribute__((alias(#function)))
AS(make, cusolverDnCreate);
AS(make, cusolverDnCreateParams);
AS(make, cusolverDnCreateGesvdjInfo);
AS(make, cusolverDnCreateSyevjInfo);
AS(destroy, cusolverDnDestroy);
AS(destroy, cusolverDnDestroyParams);
AS(destroy, cusolverDnDestroyGesvdjInfo);
AS(destroy, cusolverDnDestroySyevjInfo);
cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
  stream_of_handle = stream;
  return CUSOLVER_STATUS_SUCCESS;
}

// ---- work spaces: in elements; those of the X routines in bytes

#define HANDLE cusolverDnHandle_t handle
#define SIZE(name, elements, ...)                \
  cusolverStatus_t cusolverDn##name##_bufferSize(__VA_ARGS__) { \
    *size = (elements);                          \
    virtual_gpu_asked[CUSOLVER]++;               \
    return CUSOLVER_STATUS_SUCCESS;              \
  }
#define OF_TYPE(S, T, R)                                                                                               \
  SIZE(S##potrf, 0, HANDLE, cublasFillMode_t uplo, int n, T* a, int lda, int* size)                                     \
  SIZE(S##getrf, 0, HANDLE, int m, int n, T* a, int lda, int* size)                                                     \
  SIZE(S##sytrf, n * BLOCK_OF_SYMMETRIC, HANDLE, int n, T* a, int lda, int* size)                                       \
  SIZE(S##geqrf, n * BLOCK, HANDLE, int m, int n, T* a, int lda, int* size)                                             \
  SIZE(S##gesvd, MOST(3 * LEAST(m, n) + MOST(m, n), 5 * LEAST(m, n)), HANDLE, int m, int n, int* size)                  \
  SIZE(S##gesvdj, m * n, HANDLE, cusolverEigMode_t job, int econ, int m, int n, const T* a, int lda, const R* s,         \
       const T* u, int ldu, const T* v, int ldv, int* size, gesvdjInfo_t params)                                        \
  SIZE(S##gesvdjBatched, batch * m * n, HANDLE, cusolverEigMode_t job, int m, int n, const T* a, int lda, const R* s,    \
       const T* u, int ldu, const T* v, int ldv, int* size, gesvdjInfo_t params, int batch)                             \
  SIZE(S##gesvdaStridedBatched, batch * m * n, HANDLE, cusolverEigMode_t job, int rank, int m, int n, const T* a,        \
       int lda, long long sa, const R* s, long long ss, const T* u, int ldu, long long su, const T* v, int ldv,         \
       long long sv, int* size, int batch)
#define ORTHOGONAL(S, T, q)                                                                                            \
  SIZE(S##q##gqr, n * BLOCK, HANDLE, int m, int n, int k, const T* a, int lda, const T* tau, int* size)                 \
  SIZE(S##q##mqr, (side == CUBLAS_SIDE_LEFT ? n : m) * BLOCK, HANDLE, cublasSideMode_t side, cublasOperation_t trans,    \
       int m, int n, int k, const T* a, int lda, const T* tau, const T* c, int ldc, int* size)
#define WITH_VECTORS (job == CUSOLVER_EIG_MODE_VECTOR)
#define SYMMETRIC(name, T, R, vectors, values)                                                                         \
  SIZE(name##d, WITH_VECTORS ? vectors : values, HANDLE, cusolverEigMode_t job, cublasFillMode_t uplo, int n,            \
       const T* a, int lda, const R* w, int* size)                                                                      \
  SIZE(name##jBatched, batch * n * n, HANDLE, cusolverEigMode_t job, cublasFillMode_t uplo, int n, const T* a, int lda,  \
       const R* w, int* size, syevjInfo_t params, int batch)
OF_TYPE(S, float, float)
OF_TYPE(D, double, double)
OF_TYPE(C, cuComplex, float)
OF_TYPE(Z, cuDoubleComplex, double)
ORTHOGONAL(S, float, or)
ORTHOGONAL(D, double, or)
ORTHOGONAL(C, cuComplex, un)
ORTHOGONAL(Z, cuDoubleComplex, un)
SYMMETRIC(Ssyev, float, float, 1 + 6 * n + 2 * n * n, 2 * n + 1)
SYMMETRIC(Dsyev, double, double, 1 + 6 * n + 2 * n * n, 2 * n + 1)
SYMMETRIC(Cheev, cuComplex, float, 2 * n + n * n, n + 1)
SYMMETRIC(Zheev, cuDoubleComplex, double, 2 * n + n * n, n + 1)

static size_t bytes(cudaDataType type, size_t elements) {
  return elements * (type == CUDA_C_64F ? 16 : type == CUDA_R_32F ? 4 : 8);
}
#define X_SIZE(name, elements, ...)                             \
  cusolverStatus_t cusolverDnX##name##_bufferSize(__VA_ARGS__) { \
    *size = bytes(type, elements);                              \
    *size_on_host = 0;                                          \
    virtual_gpu_asked[CUSOLVER]++;                              \
    return CUSOLVER_STATUS_SUCCESS;                             \
  }
#define SIZES size_t *size, size_t *size_on_host
#define X HANDLE, cusolverDnParams_t params
X_SIZE(potrf, 0, X, cublasFillMode_t uplo, int64_t n, cudaDataType type, const void* a, int64_t lda, cudaDataType in, SIZES)
X_SIZE(geqrf, n* BLOCK, X, int64_t m, int64_t n, cudaDataType type, const void* a, int64_t lda, cudaDataType t,
       const void* tau, cudaDataType in, SIZES)
X_SIZE(syevd, WITH_VECTORS ? 1 + 6 * n + 2 * n * n : 2 * n + 1, X, cusolverEigMode_t job, cublasFillMode_t uplo, int64_t n,
       cudaDataType type, const void* a, int64_t lda, cudaDataType t, const void* w, cudaDataType in, SIZES)
X_SIZE(syevBatched, batch*(WITH_VECTORS ? 1 + 6 * n + 2 * n * n : 2 * n + 1), X, cusolverEigMode_t job,
       cublasFillMode_t uplo, int64_t n, cudaDataType type, const void* a, int64_t lda, cudaDataType t, const void* w,
       cudaDataType in, SIZES, int64_t batch)
X_SIZE(geev, 4 * n + n * n, X, cusolverEigMode_t left, cusolverEigMode_t job, int64_t n, cudaDataType type, const void* a,
       int64_t lda, cudaDataType tw, const void* w, cudaDataType tl, const void* vl, int64_t ldvl, cudaDataType tr,
       const void* vr, int64_t ldvr, cudaDataType in, SIZES)
X_SIZE(sytrs, 0, HANDLE, cublasFillMode_t uplo, int64_t n, int64_t columns, cudaDataType type, const void* a, int64_t lda,
       const int64_t* pivots, cudaDataType tb, void* b, int64_t ldb, SIZES)

// ---- the routines

static cusolverStatus_t nothing(void) {
  virtual_gpu_launched(&(Kernel){.name = "cusolver_kernel"}, stream_of_handle);
  return CUSOLVER_STATUS_SUCCESS;
}
#define ROUTINES(S)                           \
  AS(nothing, cusolverDn##S##potrf);          \
  AS(nothing, cusolverDn##S##potrfBatched);   \
  AS(nothing, cusolverDn##S##potrs);          \
  AS(nothing, cusolverDn##S##potrsBatched);   \
  AS(nothing, cusolverDn##S##getrf);          \
  AS(nothing, cusolverDn##S##getrs);          \
  AS(nothing, cusolverDn##S##sytrf);          \
  AS(nothing, cusolverDn##S##geqrf);          \
  AS(nothing, cusolverDn##S##gesvd);          \
  AS(nothing, cusolverDn##S##gesvdj);         \
  AS(nothing, cusolverDn##S##gesvdjBatched);  \
  AS(nothing, cusolverDn##S##gesvdaStridedBatched);
#define MORE(S, q, sy)                        \
  ROUTINES(S)                                 \
  AS(nothing, cusolverDn##S##q##gqr);         \
  AS(nothing, cusolverDn##S##q##mqr);         \
  AS(nothing, cusolverDn##S##sy##evd);        \
  AS(nothing, cusolverDn##S##sy##evjBatched);
MORE(S, or, sy)
MORE(D, or, sy)
MORE(C, un, he)
MORE(Z, un, he)
AS(nothing, cusolverDnXpotrf);
AS(nothing, cusolverDnXpotrs);
AS(nothing, cusolverDnXgeqrf);
AS(nothing, cusolverDnXsyevd);
AS(nothing, cusolverDnXsyevBatched);
AS(nothing, cusolverDnXgeev);
AS(nothing, cusolverDnXsytrs);
