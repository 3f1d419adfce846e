#include "datasets/error.hpp"
#include "datasets/problem_check.hpp"
#include "datasets/shape_text.hpp"

namespace bitattn {
namespace {

template <class T>
void expect_whole(const Tensor<T>& tensor, const char* name, const std::string& where) {
  if (tensor.empty() && tensor.data.empty()) return;
  if (tensor.empty() || checked_elements(tensor.shape, where + ": tensor " + name) != tensor.data.size()) {
    throw InputError(where + ": tensor " + name + " has shape " + shape_text(tensor.shape) + " but holds " +
                     std::to_string(tensor.data.size()) + " values");
  }
}

template <class T>
void expect_shape(const Tensor<T>& tensor, const std::vector<std::size_t>& shape, const char* name,
                  const std::string& where) {
  if (!tensor.empty() && tensor.shape != shape) {
    throw InputError(where + ": tensor " + name + " has shape " + shape_text(tensor.shape) + ", expected " +
                     shape_text(shape));
  }
  expect_whole(tensor, name, where);
}

}  // namespace

void check_result(const Problem& problem, const Result& result, const std::string& where) {
  expect_shape(result.out, problem.out_shape(), "out", where);
  expect_shape(result.lse, problem.row_shape(), "lse", where);
  expect_shape(result.dq, problem.q_shape(), "dq", where);
  expect_shape(result.dk, problem.k_shape(), "dk", where);
  expect_shape(result.dv, problem.v_shape(), "dv", where);
  expect_shape(result.uncast.out, problem.out_shape(), "uncast/out", where);
  expect_shape(result.uncast.lse, problem.row_shape(), "uncast/lse", where);
  expect_shape(result.uncast.dq, problem.q_shape(), "uncast/dq", where);
  expect_shape(result.uncast.dk, problem.k_shape(), "uncast/dk", where);
  expect_shape(result.uncast.dv, problem.v_shape(), "uncast/dv", where);
  const Intermediates& between = result.intermediates;
  expect_whole(between.dpsum, "dpsum", where);
  expect_whole(between.lse_log2, "lse_log2", where);
  expect_whole(between.dq_accum, "dq_accum", where);
  expect_whole(between.dk_accum, "dk_accum", where);
  expect_whole(between.dv_accum, "dv_accum", where);
}

}  // namespace bitattn
