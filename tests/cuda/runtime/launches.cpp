// Launches: kernels do nothing, except the one with which ONNX Runtime's Gemm writes a bias into its output before
// cuBLAS adds the product. A stream of another device is refused, as CUDA does.
#include <cstring>
#include <set>
#include <vector>

#include "runtime.h"

using namespace stand_in;

namespace {
struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
char something;  // what handles point to that nobody looks at

int unsupported() { return cudaErrorNotSupported; }

std::set<const void *> &bias_kernels() {
  static auto *kernels = new std::set<const void *>;
  return *kernels;
}

template <typename Value>
Value value_of(const void *argument) {
  Value value;
  memcpy(&value, argument, sizeof value);
  return value;
}

/// Its arguments: bias, output, count, columns (and what divides by them), steps of a row and a column, scale.
Work write_bias(void **arguments) {
  auto bias = value_of<const float *>(arguments[0]);
  auto output = value_of<float *>(arguments[1]);
  auto count = value_of<int64_t>(arguments[2]);
  auto columns = value_of<int>(arguments[3]), row_step = value_of<int>(arguments[4]);
  auto column_step = value_of<int>(arguments[5]);
  auto scale = value_of<float>(arguments[6]);
  return [=](bool) {
    for (int64_t i = 0; i < count; i++) output[i] = scale * bias[i / columns * row_step + i % columns * column_step];
  };
}

cudaError_t launch(cudaStream_t handle, Work work, const char *function) {
  if (cudaError_t error = enter_launch(function)) return error;
  Stream *stream = stream_of(handle);
  if (stream->device != current_device()) return fail(cudaErrorInvalidResourceHandle, function);
  perform(handle, std::move(work));
  return cudaSuccess;
}

cudaError_t launch_kernel(const void *kernel, void **arguments, cudaStream_t stream, const char *function) {
  bool is_bias = bias_kernels().count(kernel) != 0;
  return launch(stream, is_bias ? write_bias(arguments) : [](bool) {}, function);
}
}  // namespace

/// Of our own: how cuBLAS gives a stream a product to compute.
EXPORT cudaError_t cudaStandInLaunch(cudaStream_t stream, const Work *work) { return launch(stream, *work, __func__); }

EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream, __func__);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **arguments, size_t,
                                               cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream, __func__);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel, void **arguments) {
  return launch_kernel(kernel, arguments, configuration->stream, __func__);
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  CALL();
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = compute_capability();
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                          unsigned) {
  CALL();
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
  CALL();
  *blocks = 2;
  return cudaSuccess;
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *, cudaJitOption *, void **, unsigned,
                                       cudaLibraryOption *, void **, unsigned) {
  CALL();
  *library = reinterpret_cast<cudaLibrary_t>(&something);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t, const char *) {
  CALL();
  *kernel = reinterpret_cast<cudaKernel_t>(&something);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t) {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart() {
  CALL();
  return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStop() {
  CALL();
  return cudaSuccess;
}

/// Functions of the driver that libraries look up: each is there and says that it is not supported.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
  CALL();
  *function = reinterpret_cast<void *>(&unsupported);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// What nvcc writes around kernels.

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st *stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  if (configurations.empty()) return fail(cudaErrorInvalidValue, __func__);
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t *>(stream) = last.stream;
  return cudaSuccess;
}

EXPORT void **__cudaRegisterFatBinary(void *) {
  static void *handle;
  return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **) {}

EXPORT void __cudaUnregisterFatBinary(void **) {}

EXPORT void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                                   dim3 *, int *) {
  if (strstr(name, "onnxruntime4cuda19BroadcastBiasKernelIfi")) bias_kernels().insert(kernel);
}

EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

EXPORT char __cudaInitModule(void **) { return 0; }

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream, __func__);
}
