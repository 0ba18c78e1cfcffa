// cuBLAS: handles, answers to questions, and products of matrices and vectors, computed on the host (product.h).
#include <cublas_v2.h>

#include "control.h"
#include "product.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace stand_in;

namespace {
struct Handle {
  cudaStream_t stream = nullptr;
  cublasPointerMode_t pointer_mode = CUBLAS_POINTER_MODE_HOST;
};

Handle *of(cublasHandle_t handle) { return reinterpret_cast<Handle *>(handle); }

/// The type of alpha and beta; integers and complex numbers are computed nowhere.
cudaDataType_t scale_type(cublasComputeType_t compute) {
  if (compute == CUBLAS_COMPUTE_64F || compute == CUBLAS_COMPUTE_64F_PEDANTIC) return CUDA_R_64F;
  if (compute == CUBLAS_COMPUTE_16F || compute == CUBLAS_COMPUTE_16F_PEDANTIC) return CUDA_R_16F;
  return CUDA_R_32F;
}

template <typename Number>
constexpr cudaDataType_t kType = sizeof(Number) == 8 ? CUDA_R_64F : CUDA_R_32F;

struct Size {
  int64_t rows, columns, depth, batch = 1;
};

/// out = alpha * a * b + beta * out.
cublasStatus_t multiply(cublasHandle_t handle, Size size, const void *alpha, const void *beta, cudaDataType_t scale,
                        Matrix a, Matrix b, Matrix out) {
  Product product{size.rows, size.columns, size.depth, size.batch, a, b, out, out};
  product.alpha = number(alpha, scale);
  product.beta = number(beta, scale);
  return perform(product, of(handle)->stream);
}

template <typename Number>
cublasStatus_t multiply_vector(cublasHandle_t handle, cublasOperation_t operation, int m, int n, const Number *alpha,
                               const Number *a, int lead, const Number *x, int x_step, const Number *beta, Number *y,
                               int y_step) {
  bool plain = operation == CUBLAS_OP_N;
  auto type = kType<Number>;
  return multiply(handle, {plain ? m : n, 1, plain ? n : m}, alpha, beta, type, by_columns(a, type, lead, operation),
                  {x, type, x_step, 0}, {y, type, y_step, 0});
}
}  // namespace

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  log("cublasCreate");
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete of(handle);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  of(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t bytes) {
  log("cublasSetWorkspace %zu", bytes);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetVersion_v2(cublasHandle_t, int *version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  of(handle)->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = of(handle)->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT const char *cublasGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS"; }

EXPORT const char *cublasGetStatusString(cublasStatus_t) { return "a status of cuBLAS"; }

// Products. Types that are not computed (integers, complex numbers, float8) are refused.

EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b,
                                                 int m, int n, int k, const void *alpha, const void *a,
                                                 cudaDataType a_type, int a_lead, long long a_step, const void *b,
                                                 cudaDataType b_type, int b_lead, long long b_step, const void *beta,
                                                 void *c, cudaDataType c_type, int c_lead, long long c_step, int batch,
                                                 cublasComputeType_t compute, cublasGemmAlgo_t) {
  return multiply(handle, {m, n, k, batch}, alpha, beta, scale_type(compute),
                  by_columns(a, a_type, a_lead, on_a, a_step), by_columns(b, b_type, b_lead, on_b, b_step),
                  by_columns(c, c_type, c_lead, CUBLAS_OP_N, c_step));
}

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m, int n,
                                   int k, const void *alpha, const void *a, cudaDataType a_type, int a_lead,
                                   const void *b, cudaDataType b_type, int b_lead, const void *beta, void *c,
                                   cudaDataType c_type, int c_lead, cublasComputeType_t compute, cublasGemmAlgo_t how) {
  return cublasGemmStridedBatchedEx(handle, on_a, on_b, m, n, k, alpha, a, a_type, a_lead, 0, b, b_type, b_lead, 0,
                                    beta, c, c_type, c_lead, 0, 1, compute, how);
}

EXPORT cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m,
                                    int n, int k, const float *alpha, const void *a, cudaDataType a_type, int a_lead,
                                    const void *b, cudaDataType b_type, int b_lead, const float *beta, void *c,
                                    cudaDataType c_type, int c_lead) {
  return cublasGemmEx(handle, on_a, on_b, m, n, k, alpha, a, a_type, a_lead, b, b_type, b_lead, beta, c, c_type,
                      c_lead, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

EXPORT cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m,
                                          int n, int k, const void *alpha, const void *const a[], cudaDataType a_type,
                                          int a_lead, const void *const b[], cudaDataType b_type, int b_lead,
                                          const void *beta, void *const c[], cudaDataType c_type, int c_lead, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t how) {
  for (int i = 0; i < batch; i++)
    if (cublasStatus_t status = cublasGemmEx(handle, on_a, on_b, m, n, k, alpha, a[i], a_type, a_lead, b[i], b_type,
                                             b_lead, beta, c[i], c_type, c_lead, compute, how))
      return status;
  return CUBLAS_STATUS_SUCCESS;
}

#define OF_ONE_TYPE(Number, letter, compute)                                                                           \
  EXPORT cublasStatus_t cublas##letter##gemm_v2(                                                                       \
      cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m, int n, int k, const Number *alpha, \
      const Number *a, int a_lead, const Number *b, int b_lead, const Number *beta, Number *c, int c_lead) {           \
    return cublasGemmEx(handle, on_a, on_b, m, n, k, alpha, a, kType<Number>, a_lead, b, kType<Number>, b_lead, beta,  \
                        c, kType<Number>, c_lead, compute, CUBLAS_GEMM_DEFAULT);                                       \
  }                                                                                                                    \
  EXPORT cublasStatus_t cublas##letter##gemmStridedBatched(                                                            \
      cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m, int n, int k, const Number *alpha, \
      const Number *a, int a_lead, long long a_step, const Number *b, int b_lead, long long b_step,                    \
      const Number *beta, Number *c, int c_lead, long long c_step, int batch) {                                        \
    return cublasGemmStridedBatchedEx(handle, on_a, on_b, m, n, k, alpha, a, kType<Number>, a_lead, a_step, b,         \
                                      kType<Number>, b_lead, b_step, beta, c, kType<Number>, c_lead, c_step, batch,    \
                                      compute, CUBLAS_GEMM_DEFAULT);                                                   \
  }                                                                                                                    \
  EXPORT cublasStatus_t cublas##letter##gemmBatched(                                                                   \
      cublasHandle_t handle, cublasOperation_t on_a, cublasOperation_t on_b, int m, int n, int k, const Number *alpha, \
      const Number *const a[], int a_lead, const Number *const b[], int b_lead, const Number *beta, Number *const c[], \
      int c_lead, int batch) {                                                                                         \
    return cublasGemmBatchedEx(handle, on_a, on_b, m, n, k, alpha, reinterpret_cast<const void *const *>(a),           \
                               kType<Number>, a_lead, reinterpret_cast<const void *const *>(b), kType<Number>, b_lead, \
                               beta, reinterpret_cast<void *const *>(c), kType<Number>, c_lead, batch, compute,        \
                               CUBLAS_GEMM_DEFAULT);                                                                   \
  }                                                                                                                    \
  EXPORT cublasStatus_t cublas##letter##gemv_v2(cublasHandle_t handle, cublasOperation_t operation, int m, int n,      \
                                                const Number *alpha, const Number *a, int lead, const Number *x,       \
                                                int x_step, const Number *beta, Number *y, int y_step) {               \
    return multiply_vector(handle, operation, m, n, alpha, a, lead, x, x_step, beta, y, y_step);                       \
  }

OF_ONE_TYPE(float, S, CUBLAS_COMPUTE_32F)
OF_ONE_TYPE(double, D, CUBLAS_COMPUTE_64F)
