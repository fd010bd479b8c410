// Kernels that work on one row at a time: norms, rotary embedding, gate.
#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace tandem {

/// out = x * weight / sqrt(mean(x^2) + eps); the mean is summed lane by lane.
template <typename T>
inline void rms_norm_row(const T* x, const T* weight, float eps, int64_t size, T* out) {
  Vec squares = {};
  const int64_t whole = size - size % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Vec value = load(x + i);
    squares += value * value;
  }
  if (whole < size) {
    const Vec value = load_some(x + whole, size - whole);
    squares += value * value;
  }
  const float scale = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) narrow(widen(x[i]) * scale * widen(weight[i]), out + i);
}

template <typename T>
inline void add_row(const T* a, const T* b, int64_t size, T* out) {
  for (int64_t i = 0; i < size; ++i) narrow(widen(a[i]) + widen(b[i]), out + i);
}

/// Rotates dimension i with i + head_dim / 2.
template <typename T>
inline void rope_halves(const T* x, const float* cos, const float* sin, int64_t head_dim, T* out) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = widen(x[i]);
    const float b = widen(x[i + half]);
    narrow(a * cos[i] - b * sin[i], out + i);
    narrow(b * cos[i] + a * sin[i], out + i + half);
  }
}

inline void store_some(float* to, Vec value, int64_t count) {
  std::memcpy(to, &value, static_cast<size_t>(count) * 4);
}
inline void store_some(Bf16* to, Vec value, int64_t count) {
  for (int64_t i = 0; i < count; ++i) narrow(value[i], to + i);
}

/// out = silu(gate) * up.
template <typename T>
inline void silu_mul_row(const T* gate, const T* up, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, size - i);
    const Vec g = count == kLanes ? load(gate + i) : load_some(gate + i, count);
    const Vec u = count == kLanes ? load(up + i) : load_some(up + i, count);
    store_some(out + i, g / (1.0f + exp_lanes<Vec, Ints>(-g)) * u, count);
  }
}

}  // namespace tandem
