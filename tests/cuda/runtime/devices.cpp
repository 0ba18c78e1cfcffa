// Devices: how many, what they can do, and which one the calling thread uses.
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace stand_in {
int &current_device() {
  static thread_local int device = 0;
  return device;
}
}  // namespace stand_in

using namespace stand_in;

namespace {
constexpr int kRuntime = 13000;

bool too_old() { return driver_version() < kRuntime; }

bool exists(int device) { return device >= 0 && device < device_count(); }

/// The figures of a small Ada card, whatever the compute capability.
constexpr int kMultiprocessors = 128, kWarp = 32, kThreadsPerBlock = 1024, kThreadsPerMultiprocessor = 1536;
constexpr int kSharedPerBlock = 48 << 10, kSharedPerBlockOptin = 99 << 10, kSharedPerMultiprocessor = 100 << 10;
constexpr int kRegisters = 65536, kL2Bytes = 72 << 20, kGridX = 2147483647, kGridYZ = 65535;
}  // namespace

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  if (too_old()) return fail(cudaErrorInsufficientDriver, __func__);
  CALL();
  if (!device_count()) return fail(cudaErrorNoDevice, __func__);
  *count = device_count();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
  if (too_old()) return fail(cudaErrorInsufficientDriver, __func__);
  *device = current_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (too_old()) return fail(cudaErrorInsufficientDriver, __func__);
  if (exists(device) && has_context(device)) {  // choosing it again is a matter of the thread, and never fails
    current_device() = device;
    return cudaSuccess;
  }
  CALL();
  if (!exists(device)) return fail(cudaErrorInvalidDevice, __func__);
  if (!ensure_context(device)) return fail(cudaErrorMemoryAllocation, __func__);
  current_device() = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  CALL();
  if (!exists(device)) return fail(cudaErrorInvalidDevice, __func__);
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Stand-in without a GPU, sm%d", compute_capability());
  properties->uuid.bytes[0] = static_cast<char>(physical(device) + 1);
  properties->pciBusID = physical(device) + 1;
  properties->totalGlobalMem = device_bytes();
  properties->major = compute_capability() / 10;
  properties->minor = compute_capability() % 10;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = kWarp;
  properties->maxThreadsPerBlock = kThreadsPerBlock;
  properties->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  properties->sharedMemPerBlock = kSharedPerBlock;
  properties->sharedMemPerBlockOptin = kSharedPerBlockOptin;
  properties->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegisters;
  properties->l2CacheSize = kL2Bytes;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreadsPerBlock;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = properties->memPitch = kGridX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = kGridYZ;
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->concurrentKernels = properties->unifiedAddressing = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  CALL();
  if (!exists(device)) return fail(cudaErrorInvalidDevice, __func__);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = compute_capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = compute_capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrWarpSize: *value = kWarp; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = kThreadsPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = kSharedPerMultiprocessor; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = kRegisters; break;
    case cudaDevAttrL2CacheSize: *value = kL2Bytes; break;
    case cudaDevAttrMaxGridDimX: *value = kGridX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = kGridYZ; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  CALL_UNCAPTURABLE();
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  CALL();
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  CALL();
  if (!exists(device)) return fail(cudaErrorInvalidDevice, __func__);
  snprintf(text, length, "0000:%02X:00.0", physical(device) + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  CALL();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = driver_version();
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = kRuntime;
  return cudaSuccess;
}
