// libcuda: what a program asks the driver before it uses a device. Its cuInit goes to the log.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "control.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace stand_in;

EXPORT CUresult cuInit(unsigned) {
  log("cuInit");
  return control().lost || !device_count() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = driver_version();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  *count = control().lost ? 0 : device_count();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int index) {
  if (index < 0 || index >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice) {
  snprintf(name, length, "Stand-in without a GPU, sm%d", compute_capability());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice) {
  *bytes = device_bytes();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(physical(device) + 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = compute_capability() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = compute_capability() % 10; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  snprintf(text, length, "0000:%02X:00.0", physical(device) + 1);
  return CUDA_SUCCESS;
}

/// The runtime knows; torch asks, so as not to make a context on a device that it only returns to.
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  static auto has_context = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "cudaStandInHasContext"));
  *flags = 0;
  *active = has_context && has_context(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  static char something;
  *context = reinterpret_cast<CUcontext>(&something);
  return CUDA_SUCCESS;
}

/// Memory is the runtime's: TensorRT, which gets the addresses, calls the runtime with them.
template <typename... Given>
static CUresult call_runtime(const char *name, Given... given) {
  auto function = reinterpret_cast<int (*)(Given...)>(dlsym(RTLD_DEFAULT, name));
  return function ? static_cast<CUresult>(function(given...)) : CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { return cuCtxGetCurrent(context); }

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxSynchronize() { return call_runtime("cudaDeviceSynchronize"); }

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
  return call_runtime("cudaMalloc", reinterpret_cast<void **>(address), bytes);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  return call_runtime("cudaFree", reinterpret_cast<void *>(address));
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  return call_runtime("cudaMemcpy", reinterpret_cast<void *>(to), from, bytes, 1);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  return call_runtime("cudaMemcpy", to, reinterpret_cast<const void *>(from), bytes, 2);
}

EXPORT CUresult cuGetErrorString(CUresult, const char **text) {
  *text = "an error of the driver";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult *result) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
