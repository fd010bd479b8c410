// The CPU kernels of the `tandem` operators. Schemas and formulas are in tandem/ops/library.py and
// tandem/ops/reference.py.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

#include "attention_ops.h"
#include "checks.h"
#include "linear.h"
#include "program.h"
#include "rows.h"

namespace tandem {
namespace {

using OptionalTensor = std::optional<Tensor>;

// ---- linear

Tensor& linear_out(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   bool to_float32, Tensor& out) {
  const int64_t rows = x.size(0), depth = x.size(1), width = weight.size(0);
  check_dense(x, weight, "linear", "x");
  check_dense(weight, weight, "linear", "weight");
  check_shape(weight, {width, depth}, "linear", "weight");
  check_shape(out, {rows, width}, "linear", "out");
  TORCH_CHECK(out.is_contiguous(), "linear: out must be contiguous");
  if (bias) check_dense(*bias, weight, "linear", "bias");
  if (bias) check_shape(*bias, {width}, "linear", "bias");
  const Tensor wide = x.to(at::kFloat);
  const float* input = data<float>(wide);
  with_type(weight, "linear", [&](auto type) {
    using T = decltype(type);
    const T* w = data<T>(weight);
    const T* b = bias ? data<T>(*bias) : nullptr;
    at::parallel_for(0, width, kGrainColumns, [&](int64_t begin, int64_t end) {
      const auto compute = [&](auto output) {
        if (rows <= kFromMemoryRows) {
          linear_few(input, w, output, rows, depth, begin, end);
        } else {
          linear_many(input, w, output, rows, depth, begin, end);
        }
      };
      if (to_float32) {
        compute(LinearOutput<T, float>{data<float>(out), width, b});
      } else {
        compute(LinearOutput<T, T>{data<T>(out), width, b});
      }
    });
  });
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool to_float32) {
  Tensor out = at::empty({x.size(0), weight.size(0)},
                         x.options().dtype(to_float32 ? at::kFloat : x.scalar_type()));
  return linear_out(x, weight, bias, to_float32, out);
}

// ---- norms

Tensor& rms_norm_out(const Tensor& x, const Tensor& weight, double eps, Tensor& out) {
  const int64_t rows = x.size(0), size = x.size(1);
  check_dense(x, x, "rms_norm", "x");
  check_dense(weight, x, "rms_norm", "weight");
  check_dense(out, x, "rms_norm", "out");
  check_shape(weight, {size}, "rms_norm", "weight");
  check_shape(out, x.sizes(), "rms_norm", "out");
  with_type(x, "rms_norm", [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        rms_norm_row(data<T>(x) + row * size, data<T>(weight), static_cast<float>(eps), size,
                     data<T>(out) + row * size);
      }
    });
  });
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = at::empty_like(x);
  return rms_norm_out(x, weight, eps, out);
}

std::tuple<Tensor&, Tensor&> add_rms_norm_out(const Tensor& x, const Tensor& residual,
                                              const Tensor& weight, double eps, Tensor& total,
                                              Tensor& normed) {
  const int64_t rows = x.size(0), size = x.size(1);
  for (const auto& [tensor, name] :
       {std::pair<const Tensor&, const char*>{x, "x"}, {residual, "residual"}, {total, "total"},
        {normed, "normed"}}) {
    check_dense(tensor, x, "add_rms_norm", name);
    check_shape(tensor, x.sizes(), "add_rms_norm", name);
  }
  check_dense(weight, x, "add_rms_norm", "weight");
  check_shape(weight, {size}, "add_rms_norm", "weight");
  with_type(x, "add_rms_norm", [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * size;
        add_row(data<T>(x) + at, data<T>(residual) + at, size, data<T>(total) + at);
        rms_norm_row(data<T>(total) + at, data<T>(weight), static_cast<float>(eps), size,
                     data<T>(normed) + at);
      }
    });
  });
  return {total, normed};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const Tensor& weight, double eps) {
  Tensor total = at::empty_like(x), normed = at::empty_like(x);
  add_rms_norm_out(x, residual, weight, eps, total, normed);
  return {total, normed};
}

// ---- gate

Tensor& silu_mul_out(const Tensor& gate, const Tensor& up, Tensor& out) {
  check_dense(gate, gate, "silu_mul", "gate");
  check_dense(up, gate, "silu_mul", "up");
  check_dense(out, gate, "silu_mul", "out");
  check_shape(up, gate.sizes(), "silu_mul", "up");
  check_shape(out, gate.sizes(), "silu_mul", "out");
  const int64_t rows = gate.size(0), size = gate.size(1);
  with_type(gate, "silu_mul", [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t at = row * size;
        silu_mul_row(data<T>(gate) + at, data<T>(up) + at, size, data<T>(out) + at);
      }
    });
  });
  return out;
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  Tensor out = at::empty_like(gate);
  return silu_mul_out(gate, up, out);
}

// ---- rotary embedding and cache write

/// Rotates and writes one token's heads.
template <typename T>
struct RopeToken {
  const float* cos;
  const float* sin;
  int64_t head_dim;

  void heads(const T* from, T* to, int64_t count) const {
    for (int64_t head = 0; head < count; ++head) {
      rope_halves(from + head * head_dim, cos, sin, head_dim, to + head * head_dim);
    }
  }
};

Tensor& rope_write_kv_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                          const Tensor& sin, const Tensor& positions, const Tensor& slots,
                          Tensor k_pages, Tensor v_pages, Tensor& out) {
  const char* op = "rope_write_kv";
  const int64_t tokens = q.size(0), heads = q.size(1), head_dim = q.size(2), kv_heads = k.size(1);
  const int64_t num_slots = k_pages.size(0) * k_pages.size(1), half = head_dim / 2;
  check_dense(q, k_pages, op, "q");
  check_dense(k, k_pages, op, "k");
  check_dense(v, k_pages, op, "v");
  check_dense(out, k_pages, op, "out");
  check_dense(k_pages, k_pages, op, "k_pages");
  check_dense(v_pages, k_pages, op, "v_pages");
  check_shape(out, q.sizes(), op, "out");
  check_shape(k, {tokens, kv_heads, head_dim}, op, "k");
  check_shape(v, k.sizes(), op, "v");
  check_shape(k_pages, {k_pages.size(0), k_pages.size(1), kv_heads, head_dim}, op, "k_pages");
  check_shape(v_pages, k_pages.sizes(), op, "v_pages");
  check_shape(cos, {cos.size(0), half}, op, "cos");
  check_shape(sin, cos.sizes(), op, "sin");
  check_shape(positions, {tokens}, op, "positions");
  check_shape(slots, {tokens}, op, "slots");
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.scalar_type() == at::kFloat &&
                  sin.scalar_type() == at::kFloat,
              op, ": cos and sin must be contiguous float32");
  const int64_t* position = positions.data_ptr<int64_t>();
  const int64_t* slot = slots.data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK_INDEX(0 <= position[t] && position[t] < cos.size(0), op, ": position ",
                      position[t], " is outside the table of ", cos.size(0));
    TORCH_CHECK_INDEX(0 <= slot[t] && slot[t] < num_slots, op, ": slot ", slot[t],
                      " is outside the pool of ", num_slots);
  }
  with_type(k_pages, op, [&](auto type) {
    using T = decltype(type);
    const int64_t kv_size = kv_heads * head_dim, q_size = heads * head_dim;
    at::parallel_for(0, tokens, 32, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const RopeToken<T> rope{data<float>(cos) + position[t] * half,
                                data<float>(sin) + position[t] * half, head_dim};
        rope.heads(data<T>(q) + t * q_size, data<T>(out) + t * q_size, heads);
        rope.heads(data<T>(k) + t * kv_size, data<T>(k_pages) + slot[t] * kv_size, kv_heads);
        std::memcpy(data<T>(v_pages) + slot[t] * kv_size, data<T>(v) + t * kv_size,
                    static_cast<size_t>(kv_size) * sizeof(T));
      }
    });
  });
  return out;
}

Tensor rope_write_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos,
                     const Tensor& sin, const Tensor& positions, const Tensor& slots,
                     Tensor k_pages, Tensor v_pages) {
  Tensor out = at::empty_like(q);
  return rope_write_kv_out(q, k, v, cos, sin, positions, slots, std::move(k_pages),
                           std::move(v_pages), out);
}

}  // namespace
}  // namespace tandem

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.class_<tandem::Program>("Program")
      .def(torch::init<>())
      .def("add", &tandem::Program::add)
      .def("run", &tandem::Program::run)
      .def("size", &tandem::Program::size);
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("linear", tandem::linear);
  m.impl("linear.out", tandem::linear_out);
  m.impl("rms_norm", tandem::rms_norm);
  m.impl("rms_norm.out", tandem::rms_norm_out);
  m.impl("add_rms_norm", tandem::add_rms_norm);
  m.impl("add_rms_norm.out", tandem::add_rms_norm_out);
  m.impl("silu_mul", tandem::silu_mul);
  m.impl("silu_mul.out", tandem::silu_mul_out);
  m.impl("rope_write_kv", tandem::rope_write_kv);
  m.impl("rope_write_kv.out", tandem::rope_write_kv_out);
  m.impl("paged_attention", tandem::paged_attention);
  m.impl("paged_attention.out", tandem::paged_attention_out);
  m.impl("paged_prefill_attention", tandem::paged_prefill_attention);
  m.impl("paged_prefill_attention.out", tandem::paged_prefill_attention_out);
}
