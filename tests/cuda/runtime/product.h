// Matrix products, computed on the host: what cuBLAS and cuBLASLt have in common.
#pragma once

#include <cublas_api.h>

#include <cstdint>

namespace stand_in {

/// A matrix of any order: element (row, column) is at row * row_step + column * column_step, counted in elements.
struct Matrix {
  const void *data;
  cudaDataType_t type;
  int64_t row_step, column_step;
  int64_t batch_step = 0;
};

/// A matrix as BLAS describes it, by columns; its transpose where `operation` asks for that.
Matrix by_columns(const void *data, cudaDataType_t type, int64_t lead, cublasOperation_t operation = CUBLAS_OP_N,
                  int64_t batch_step = 0);

enum class Activation { kNone, kRelu, kGelu };

/// out = activation(alpha * a * b + beta * c + bias), for each of a batch.
struct Product {
  int64_t rows, columns, depth, batch = 1;
  Matrix a, b, c, out;
  double alpha = 1, beta = 0;
  const void *bias = nullptr;  // one value for each row
  cudaDataType_t bias_type = CUDA_R_32F;
  Activation activation = Activation::kNone;
};

/// Whether numbers of this type are computed: float64, float32, float16 and bfloat16.
bool is_computed(cudaDataType_t type);

/// Read one number.
double number(const void *data, cudaDataType_t type, int64_t index = 0);

/// Compute a product on a stream; a stream that is captured records it, and each replay computes it.
cublasStatus_t perform(const Product &product, cudaStream_t stream);

}  // namespace stand_in
