// Typed access to tensors, and checks that name the operator and the argument.
#pragma once

#include <ATen/ATen.h>

#include "vec.h"

namespace tandem {

using at::Tensor;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

/// Calls `body` with a value of the element type: float or Bf16.
template <typename Body>
void with_type(const Tensor& tensor, const char* op, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, op, ": expected float32 or bfloat16, got ",
                tensor.scalar_type());
    body(Bf16{});
  }
}

inline void check_dense(const Tensor& tensor, const Tensor& like, const char* op, const char* name) {
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), op, ": ", name, " is ",
              tensor.scalar_type(), ", expected ", like.scalar_type());
}

inline void check_shape(const Tensor& tensor, at::IntArrayRef shape, const char* op, const char* name) {
  TORCH_CHECK(tensor.sizes() == shape, op, ": ", name, " is ", tensor.sizes(), ", expected ",
              shape);
}

}  // namespace tandem
