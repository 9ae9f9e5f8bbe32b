// NCCL: communicators that know their size, and collectives that move nothing and take their time on their stream, as
// if all ranks had come to them at the same moment. startup/virtual_gpu_collectives.py exchanges the values of small
// tensors. Everything else that NCCL exports succeeds without an effect, except for symmetric memory, which is refused:
// its buffers would lie in the other processes.
#include "clock.h"
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
// The size of the new communicator would follow from what all ranks pass. PyTorch knows it and does not ask, so that of
// the old one is kept.
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

// ---- collectives. Their kernels have the names that they have on a real GPU.

static const struct {
  const char* name;
  size_t bytes;
} types[ncclNumTypes] = {{"i8", 1}, {"u8", 1}, {"i32", 4}, {"u32", 4}, {"i64", 8}, {"u64", 8},
                         {"f16", 2}, {"f32", 4}, {"f64", 8}, {"bf16", 2}};
static const char* const reductions[] = {"Sum", "Prod", "MinMax", "MinMax", "SumPostDiv"};
static __thread int depth;                          // of nested groups
static __thread size_t sent_bytes, received_bytes;  // by this thread's group
static __thread ncclComm_t group_comm;
static __thread cudaStream_t group_stream;

static ncclResult_t put(const char* kind, const char* shown, size_t bytes, ncclComm_t comm, cudaStream_t stream) {
  if (comm->size < 2) return ncclSuccess;
  char text[96], name[128];
  snprintf(text, sizeof text, "collective %s %zu %d", kind, bytes, comm->size);
  snprintf(name, sizeof name, "ncclDevKernel_%s(ncclDevKernelArgsStorage<4096ul>)", shown);
  Operation* what = virtual_gpu_operation(kind, text);
  what->is_network = 1;
  Kernel kernel = {virtual_gpu_operation(name, name)->name, {16, 1, 1}, {512, 1, 1}, 0};
  virtual_gpu_put(what, &kernel, stream);
  return ncclSuccess;
}
static size_t size_of(size_t count, ncclDataType_t type) { return count * (types[type].bytes ? types[type].bytes : 1); }
static ncclResult_t put_sum(const char* kind, const char* shown, ncclRedOp_t how, ncclDataType_t type, size_t count,
                            ncclComm_t comm, cudaStream_t stream) {
  char name[96];
  const char* reduction = reductions[how < sizeof reductions / sizeof *reductions ? how : 0];
  snprintf(name, sizeof name, "%s_%s_%s_RING_LL", shown, reduction, types[type].name ? types[type].name : "f8e4m3");
  return put(kind, name, size_of(count, type), comm, stream);
}

#define TO const void *from, void *to, size_t count, ncclDataType_t type
#define ON ncclComm_t comm, cudaStream_t stream
ncclResult_t ncclAllReduce(TO, ncclRedOp_t how, ON) {
  CALLED;
  return put_sum("all_reduce", "AllReduce", how, type, count, comm, stream);
}
ncclResult_t ncclReduceScatter(TO, ncclRedOp_t how, ON) {
  CALLED;
  return put_sum("reduce_scatter", "ReduceScatter", how, type, count * comm->size, comm, stream);
}
ncclResult_t ncclReduce(TO, ncclRedOp_t how, int root, ON) {
  CALLED;
  return put_sum("broadcast", "Reduce", how, type, count, comm, stream);
}
ncclResult_t ncclAllGather(TO, ON) {
  CALLED;
  return put("all_gather", "AllGather_RING_LL", size_of(count, type) * comm->size, comm, stream);
}
ncclResult_t ncclBroadcast(TO, int root, ON) {
  CALLED;
  return put("broadcast", "Broadcast_RING_LL", size_of(count, type), comm, stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ON) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAlltoAll(TO, ON) {
  CALLED;
  return put("send_recv", "SendRecv", size_of(count, type) * (comm->size - 1), comm, stream);
}
// All that a group sends and receives is one kernel, which uses both directions at once.
static ncclResult_t end_group(void) {
  size_t bytes = sent_bytes > received_bytes ? sent_bytes : received_bytes;
  sent_bytes = received_bytes = 0;
  return bytes ? put("send_recv", "SendRecv", bytes, group_comm, group_stream) : ncclSuccess;
}
static ncclResult_t one_way(size_t* counter, size_t count, ncclDataType_t type, int peer, ON) {
  if (peer == comm->rank) return ncclSuccess;
  *counter += size_of(count, type);
  group_comm = comm, group_stream = stream;
  return depth ? ncclSuccess : end_group();
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ON) {
  CALLED;
  return one_way(&sent_bytes, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ON) {
  CALLED;
  return one_way(&received_bytes, count, type, peer, comm, stream);
}
ncclResult_t ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd(void) { return --depth ? ncclSuccess : end_group(); }
