// NVML: the virtual devices as nvidia-smi and Python's bindings of NVML see them. NVIDIA's header is in no wheel of
// torch, so the types that are used are declared here, after its documentation ("NVML API Reference").
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct {
  uint64_t total, free, used;
} nvmlMemory_t;
typedef struct {
  unsigned version;
  uint64_t total, reserved, free, used;
} nvmlMemory_v2_t;
typedef struct {
  unsigned pid;
  uint64_t usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} nvmlPciInfo_t;
typedef void* nvmlDevice_t;  // slot + 1

static int slot_of(nvmlDevice_t device) { return (int)(intptr_t)device - 1; }
static nvmlReturn_t find(long slot, nvmlDevice_t* device) {
  if (slot < 0 || slot >= virtual_gpu_count_all()) return NOT_FOUND;
  *device = (nvmlDevice_t)(intptr_t)(slot + 1);
  return SUCCESS;
}
static uint64_t in_use(nvmlDevice_t device) {
  unsigned process;
  uint64_t bytes, sum = 0;
  for (int next = 0; virtual_gpu_next_process(&next, slot_of(device), &process, &bytes);) sum += bytes;
  return sum < virtual_gpu_total() ? sum : virtual_gpu_total();
}

#define SUCCEEDS(name, arguments, effect) \
  nvmlReturn_t name arguments {           \
    CALLED;                               \
    effect;                               \
    return SUCCESS;                       \
  }
SUCCEEDS(nvmlInit, (void), )
SUCCEEDS(nvmlInit_v2, (void), )
SUCCEEDS(nvmlInitWithFlags, (unsigned flags), )
SUCCEEDS(nvmlShutdown, (void), )
SUCCEEDS(nvmlDeviceGetCount, (unsigned* count), *count = virtual_gpu_count_all())
SUCCEEDS(nvmlDeviceGetCount_v2, (unsigned* count), *count = virtual_gpu_count_all())
// The version of a driver for CUDA 13 (NVIDIA's release notes), in a form that programs can compare.
SUCCEEDS(nvmlSystemGetDriverVersion, (char* text, unsigned size), snprintf(text, size, "580.0+virtual"))
SUCCEEDS(nvmlSystemGetNVMLVersion, (char* text, unsigned size), snprintf(text, size, "virtual"))
SUCCEEDS(nvmlSystemGetCudaDriverVersion, (int* version), *version = virtual_gpu_number("VIRTUAL_GPU_CUDA", 13000))
SUCCEEDS(nvmlSystemGetCudaDriverVersion_v2, (int* version), *version = virtual_gpu_number("VIRTUAL_GPU_CUDA", 13000))
SUCCEEDS(nvmlDeviceGetName, (nvmlDevice_t device, char* text, unsigned size),
         snprintf(text, size, "%s", virtual_gpu_text("VIRTUAL_GPU_NAME", "virtual GPU")))
SUCCEEDS(nvmlDeviceGetUUID, (nvmlDevice_t device, char* text, unsigned size),
         snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", slot_of(device)))
SUCCEEDS(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned* index), *index = slot_of(device))
SUCCEEDS(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned* index), *index = slot_of(device))
SUCCEEDS(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int* major, int* minor),
         (*major = virtual_gpu_number("VIRTUAL_GPU_CAPABILITY", 90) / 10,
          *minor = virtual_gpu_number("VIRTUAL_GPU_CAPABILITY", 90) % 10))
SUCCEEDS(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t* memory),
         (memory->total = virtual_gpu_total(), memory->used = in_use(device),
          memory->free = memory->total - memory->used))
SUCCEEDS(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t* memory),
         (memory->total = virtual_gpu_total(), memory->reserved = 0, memory->used = in_use(device),
          memory->free = memory->total - memory->used))

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  return find(index, device) ? INVALID_ARGUMENT : SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* uuid, nvmlDevice_t* device) {
  char* end;
  if (strncmp(uuid, "GPU-", 4)) return INVALID_ARGUMENT;
  long slot = strtol(uuid + 4, &end, 16);
  return end == uuid + 4 ? NOT_FOUND : find(slot, device);
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* bus, nvmlDevice_t* device) {
  const char* colon = strchr(bus, ':');
  return colon ? find(strtol(colon + 1, NULL, 16), device) : INVALID_ARGUMENT;
}
static nvmlReturn_t pci(nvmlDevice_t device, nvmlPciInfo_t* info) {
  memset(info, 0, sizeof *info);
  info->bus = slot_of(device);
  snprintf(info->busId, sizeof info->busId, "00000000:%02X:00.0", info->bus);
  snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "0000:%02X:00.0", info->bus);
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t* info) { return pci(device, info); }
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t* info) { return pci(device, info); }

// `size`: bytes of one answer. The first version of the function has only the first two fields of the struct.
static nvmlReturn_t processes(nvmlDevice_t device, unsigned* count, void* found, size_t size) {
  unsigned room = *count;
  nvmlProcessInfo_t its = {0, 0, ~0u, ~0u};
  *count = 0;
  for (int next = 0; virtual_gpu_next_process(&next, slot_of(device), &its.pid, &its.usedGpuMemory); ++*count)
    if (*count < room) memcpy((char*)found + *count * size, &its, size);
  return *count > room ? 7 : SUCCESS;  // insufficient size: the caller asks again
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned* n, nvmlProcessInfo_t* found) {
  return processes(d, n, found, sizeof *found);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t d, unsigned* n, nvmlProcessInfo_t* found) {
  return processes(d, n, found, sizeof *found);
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t d, unsigned* n, nvmlProcessInfo_t* found) {
  return processes(d, n, found, offsetof(nvmlProcessInfo_t, gpuInstanceId));
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned* n, nvmlProcessInfo_t* found) {
  *n = 0;
  return SUCCESS;
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned process, char* name, unsigned size) {
  char path[32];
  snprintf(path, sizeof path, "/proc/%u/cmdline", process);
  FILE* file = fopen(path, "r");
  if (!file) return NOT_FOUND;
  size_t read = fread(name, 1, size - 1, file);  // its arguments, each with a zero after it
  name[read] = 0;
  fclose(file);
  return SUCCESS;
}

// Nothing computes: there is no utilization, temperature, power or clock, and no MIG or NVLink either.
#define LACKS(name) \
  nvmlReturn_t name(void) { return NOT_SUPPORTED; }
LACKS(nvmlDeviceGetUtilizationRates)
LACKS(nvmlDeviceGetEncoderUtilization)
LACKS(nvmlDeviceGetDecoderUtilization)
LACKS(nvmlDeviceGetTemperature)
LACKS(nvmlDeviceGetTemperatureThreshold)
LACKS(nvmlDeviceGetFanSpeed)
LACKS(nvmlDeviceGetPowerUsage)
LACKS(nvmlDeviceGetPowerManagementLimit)
LACKS(nvmlDeviceGetEnforcedPowerLimit)
LACKS(nvmlDeviceGetTotalEnergyConsumption)
LACKS(nvmlDeviceGetPerformanceState)
LACKS(nvmlDeviceGetClockInfo)
LACKS(nvmlDeviceGetMaxClockInfo)
LACKS(nvmlDeviceGetPcieThroughput)
LACKS(nvmlDeviceGetMigMode)
LACKS(nvmlDeviceGetMaxMigDeviceCount)
LACKS(nvmlDeviceGetNvLinkState)
LACKS(nvmlDeviceGetNvLinkRemoteDeviceType)
LACKS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
LACKS(nvmlDeviceGetGpuFabricInfoV)
nvmlReturn_t nvmlDeviceGetSamples(void) { return NOT_FOUND; }
const char* nvmlErrorString(nvmlReturn_t result) {
  return result == SUCCESS          ? "Success"
         : result == NOT_SUPPORTED  ? "Not Supported (a virtual GPU)"
         : result == NOT_FOUND      ? "Not Found"
                                    : "an error of the virtual GPU";
}
