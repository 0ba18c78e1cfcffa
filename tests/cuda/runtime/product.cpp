// Sums are float32, and float64 where the result is. A fault of the control file makes what graphs replay wrong.
#include "product.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <dlfcn.h>

#include <cmath>
#include <functional>
#include <vector>

#include "control.h"

namespace stand_in {
namespace {

const char *at(const Matrix &matrix, int64_t batch) {
  int64_t bytes = matrix.type == CUDA_R_64F ? 8 : matrix.type == CUDA_R_32F ? 4 : 2;
  return static_cast<const char *>(matrix.data) + batch * matrix.batch_step * bytes;
}

template <typename Sum>
std::vector<Sum> load(const Matrix &matrix, int64_t batch, int64_t rows, int64_t columns) {
  std::vector<Sum> values(rows * columns);
  const char *start = at(matrix, batch);
  for (int64_t column = 0; column < columns; column++)
    for (int64_t row = 0; row < rows; row++)
      values[column * rows + row] =
          static_cast<Sum>(number(start, matrix.type, row * matrix.row_step + column * matrix.column_step));
  return values;
}

void store(const char *start, cudaDataType_t type, int64_t index, double value) {
  char *data = const_cast<char *>(start);
  if (type == CUDA_R_64F) reinterpret_cast<double *>(data)[index] = value;
  if (type == CUDA_R_32F) reinterpret_cast<float *>(data)[index] = static_cast<float>(value);
  if (type == CUDA_R_16F) reinterpret_cast<__half *>(data)[index] = __double2half(value);
  if (type == CUDA_R_16BF) reinterpret_cast<__nv_bfloat16 *>(data)[index] = __double2bfloat16(value);
}

double activated(Activation activation, double x) {
  if (activation == Activation::kRelu) return x > 0 ? x : 0;
  if (activation == Activation::kGelu) return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  return x;
}

template <typename Sum>
void compute(const Product &product, bool wrong) {
  int64_t rows = product.rows, depth = product.depth;
  for (int64_t batch = 0; batch < product.batch; batch++) {
    auto a = load<Sum>(product.a, batch, rows, depth);
    auto b = load<Sum>(product.b, batch, depth, product.columns);
    std::vector<Sum> sums(rows);
    for (int64_t column = 0; column < product.columns; column++) {
      std::fill(sums.begin(), sums.end(), Sum{0});
      for (int64_t i = 0; i < depth; i++) {
        Sum factor = b[column * depth + i];
        for (int64_t row = 0; row < rows; row++) sums[row] += a[i * rows + row] * factor;
      }
      for (int64_t row = 0; row < rows; row++) {
        const Matrix &c = product.c, &out = product.out;
        double value = product.alpha * sums[row];
        if (product.beta != 0)
          value += product.beta * number(at(c, batch), c.type, row * c.row_step + column * c.column_step);
        if (product.bias) value += number(product.bias, product.bias_type, row);
        value = activated(product.activation, wrong ? 2 * value : value);
        store(at(out, batch), out.type, row * out.row_step + column * out.column_step, value);
      }
    }
  }
}

}  // namespace

Matrix by_columns(const void *data, cudaDataType_t type, int64_t lead, cublasOperation_t operation,
                  int64_t batch_step) {
  bool plain = operation == CUBLAS_OP_N;
  return {data, type, plain ? 1 : lead, plain ? lead : 1, batch_step};
}

bool is_computed(cudaDataType_t type) {
  return type == CUDA_R_64F || type == CUDA_R_32F || type == CUDA_R_16F || type == CUDA_R_16BF;
}

double number(const void *data, cudaDataType_t type, int64_t index) {
  if (type == CUDA_R_64F) return static_cast<const double *>(data)[index];
  if (type == CUDA_R_16F) return __half2float(static_cast<const __half *>(data)[index]);
  if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[index]);
  return static_cast<const float *>(data)[index];
}

cublasStatus_t perform(const Product &product, cudaStream_t stream) {
  using Work = std::function<void(bool)>;
  static auto launch = reinterpret_cast<cudaError_t (*)(cudaStream_t, const Work *)>(
      dlsym(RTLD_DEFAULT, "cudaStandInLaunch"));
  for (const Matrix *matrix : {&product.a, &product.b, &product.c, &product.out})
    if (!is_computed(matrix->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
  Work work = [product](bool replayed) {
    int64_t columns = control().wrong_columns;
    bool wrong = replayed && columns && product.columns == columns;
    if (wrong) control().faults++;
    product.out.type == CUDA_R_64F ? compute<double>(product, wrong) : compute<float>(product, wrong);
  };
  return launch && launch(stream, &work) == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace stand_in
