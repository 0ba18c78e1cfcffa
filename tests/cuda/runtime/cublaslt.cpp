// cuBLASLt: handles with attributes, one algorithm for everything, and products computed on the host (product.h).
#include <cublasLt.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "product.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace stand_in;

namespace {
/// The attributes of a description or layout, as they were set.
struct Attributes {
  std::map<int, std::string> values;

  template <typename Value>
  void set(int name, Value value) {
    values[name].assign(reinterpret_cast<const char *>(&value), sizeof value);
  }

  template <typename Value>
  Value get(int name, Value fallback) const {
    auto place = values.find(name);
    if (place != values.end()) memcpy(&fallback, place->second.data(), sizeof fallback);
    return fallback;
  }
};

template <typename Handle>
Attributes *of(Handle handle) {
  return reinterpret_cast<Attributes *>(handle);
}

template <typename Handle>
cublasStatus_t set(Handle handle, int name, const void *value, size_t size) {
  of(handle)->values[name].assign(static_cast<const char *>(value), size);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename Handle>
cublasStatus_t remove(Handle handle) {
  delete of(handle);
  return CUBLAS_STATUS_SUCCESS;
}

/// A matrix with its layout, by rows or by columns, or its transpose.
Matrix matrix(const void *data, cublasLtMatrixLayout_t layout, int32_t operation = CUBLAS_OP_N) {
  const Attributes &attributes = *of(layout);
  auto type = static_cast<cudaDataType_t>(attributes.get<uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_32F));
  bool by_rows = attributes.get<int32_t>(CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_ORDER_COL) == CUBLASLT_ORDER_ROW;
  bool across = by_rows != (operation != CUBLAS_OP_N);
  return by_columns(data, type, attributes.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_LD, 0),
                    across ? CUBLAS_OP_T : CUBLAS_OP_N,
                    attributes.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 0));
}

template <typename Handle>
cublasStatus_t create(Handle *handle) {
  *handle = static_cast<Handle>(calloc(1, 256));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t destroy(void *handle) {
  free(handle);
  return CUBLAS_STATUS_SUCCESS;
}
}  // namespace

EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return create(handle); }

EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(handle); }

EXPORT size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t, cudaDataType_t scale) {
  auto *attributes = new Attributes;
  attributes->set<int32_t>(CUBLASLT_MATMUL_DESC_SCALE_TYPE, scale);
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(attributes);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description,
                                                     cublasLtMatmulDescAttributes_t name, const void *value,
                                                     size_t size) {
  return set(description, name, value, size);
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) { return remove(description); }

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t lead) {
  auto *attributes = new Attributes;
  attributes->set<uint32_t>(CUBLASLT_MATRIX_LAYOUT_TYPE, type);
  attributes->set<uint64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS, rows);
  attributes->set<uint64_t>(CUBLASLT_MATRIX_LAYOUT_COLS, columns);
  attributes->set<int64_t>(CUBLASLT_MATRIX_LAYOUT_LD, lead);
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(attributes);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t name, const void *value,
                                                       size_t size) {
  return set(layout, name, value, size);
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return remove(layout); }

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) { return create(made); }

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) { return destroy(handle); }

EXPORT cublasStatus_t cublasLtMatrixTransformDescCreate(cublasLtMatrixTransformDesc_t *made, cudaDataType) {
  return create(made);
}

EXPORT cublasStatus_t cublasLtMatrixTransformDescDestroy(cublasLtMatrixTransformDesc_t handle) {
  return destroy(handle);
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t results[], int *count) {
  memset(&results[0], 0, sizeof results[0]);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void *alpha,
                                     const void *a, cublasLtMatrixLayout_t a_layout, const void *b,
                                     cublasLtMatrixLayout_t b_layout, const void *beta, const void *c,
                                     cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,
                                     const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream) {
  const Attributes &given = *of(description), &of_a = *of(a_layout), &of_d = *of(d_layout);
  auto on_a = given.get<int32_t>(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_N);
  auto on_b = given.get<int32_t>(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  auto depth = on_a == CUBLAS_OP_N ? CUBLASLT_MATRIX_LAYOUT_COLS : CUBLASLT_MATRIX_LAYOUT_ROWS;
  Product product{of_d.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_ROWS, 0),
                  of_d.get<int64_t>(CUBLASLT_MATRIX_LAYOUT_COLS, 0),
                  of_a.get<int64_t>(depth, 0),
                  of_d.get<int32_t>(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 1),
                  matrix(a, a_layout, on_a),
                  matrix(b, b_layout, on_b),
                  matrix(c, c_layout),
                  matrix(d, d_layout)};
  auto scale = static_cast<cudaDataType_t>(given.get<int32_t>(CUBLASLT_MATMUL_DESC_SCALE_TYPE, CUDA_R_32F));
  product.alpha = number(alpha, scale);
  product.beta = number(beta, scale);
  auto epilogue = given.get<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
  constexpr uint32_t computed = CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_GELU_BIAS | CUBLASLT_EPILOGUE_RELU;
  if (epilogue & ~computed) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (epilogue & CUBLASLT_EPILOGUE_BIAS)
    product.bias = given.get<const void *>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
  auto bias_type = given.get<int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, product.out.type);
  product.bias_type = static_cast<cudaDataType_t>(bias_type);
  if (epilogue & CUBLASLT_EPILOGUE_RELU) product.activation = Activation::kRelu;
  if (epilogue & CUBLASLT_EPILOGUE_GELU) product.activation = Activation::kGelu;
  return perform(product, stream);
}
