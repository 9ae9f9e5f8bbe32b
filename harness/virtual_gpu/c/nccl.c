// NCCL: communicators that know their size, collectives that move nothing (values.py gives values to what is small
// enough to be looked at). Everything else that NCCL exports succeeds without an effect, but symmetric memory, which
// is refused: its buffers would lie in the other processes.
#include "virtual_gpu.h"

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ncclComm {
  int size, rank, device;
};
static __thread const char* refusal = "";

static ncclResult_t make(ncclComm_t* comm, int size, int rank) {
  *comm = malloc(sizeof **comm);
  **comm = (struct ncclComm){size, rank, virtual_gpu_current()};
  return ncclSuccess;
}
static ncclResult_t refuse(const char* sentence) {
  refusal = sentence;
  fprintf(stderr, "virtual GPU: %s\n", sentence);
  return ncclInvalidUsage;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "virtual-%d", getpid());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  CALLED;
  return make(comm, size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  CALLED;
  return make(comm, size, rank);
}
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int ids, ncclUniqueId* id, ncclConfig_t* config) {
  CALLED;
  return make(comm, size, rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  CALLED;
  for (int i = 0; i < count; i++) make(&comms[i], count, i), comms[i]->device = devices ? devices[i] : i;
  return ncclSuccess;
}
// How many join is known to them all together, and to PyTorch, which does not ask.
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  CALLED;
  *made = NULL;
  return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : make(made, comm->size, comm->rank);
}
ncclResult_t ncclCommShrink(
    ncclComm_t comm, int* excluded, int count, ncclComm_t* made, ncclConfig_t* config, int flags) {
  CALLED;
  int rank = comm->rank;
  for (int i = 0; i < count; i++) rank -= excluded[i] < comm->rank;
  return make(made, comm->size - count, rank);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  CALLED;
  free(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) { return result == ncclSuccess ? "no error" : "an error of the virtual GPU"; }
const char* ncclGetLastError(ncclComm_t comm) { return refusal; }
ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) {
  return refuse("symmetric memory (ncclCommWindowRegister) lies in several processes at once: there is none here");
}
ncclResult_t ncclDevCommCreate(void) {
  return refuse("communication from inside kernels (ncclDevCommCreate): no kernel runs here");
}
