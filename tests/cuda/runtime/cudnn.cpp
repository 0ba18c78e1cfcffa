// cuDNN: versions and handles. The build adds all other functions, which do nothing; convolutions of torch and ONNX
// Runtime go through its graph API, of which nothing is answered.
#include <cudnn.h>

#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t *handle) {
  *handle = static_cast<cudnnHandle_t>(calloc(1, 64));
  return CUDNN_STATUS_SUCCESS;
}

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t *made) {
  *made = calloc(1, 256);
  return CUDNN_STATUS_SUCCESS;
}

EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }

EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION; }

EXPORT const char *cudnnGetErrorString(cudnnStatus_t) { return "a status of cuDNN"; }
