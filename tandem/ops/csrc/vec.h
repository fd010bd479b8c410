// Fixed-width vectors of float32, in the GNU vector dialect that g++ and clang++ share.
#pragma once

#include <cstdint>
#include <cstring>

namespace tandem {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef float LooseVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
typedef uint16_t LooseHalfBits __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));

/// bfloat16 as it lies in memory.
struct Bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline void narrow(float value, float* out) { *out = value; }
/// Rounds to nearest, ties to even; NaN stays NaN.
inline void narrow(float value, Bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 0x40);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
inline Vec load(const Bf16* from) {
  const HalfBits half = *reinterpret_cast<const LooseHalfBits*>(from);
  return reinterpret_cast<Vec>(__builtin_convertvector(half, Bits) << 16);
}
/// The first `count` values, then zeros.
template <typename T>
inline Vec load_some(const T* from, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}
inline void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }

/// Sum of all lanes, always in the same order: halves folded onto each other.
inline float sum_lanes(Vec value) {
#if defined(__AVX512F__)
  Vec8 halves[2];
  std::memcpy(halves, &value, sizeof(value));
  Vec8 eight = halves[0] + halves[1];
#else
  Vec8 eight = value;
#endif
  Vec4 quarters[2];
  std::memcpy(quarters, &eight, sizeof(eight));
  const Vec4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/// exp(x), relative error below 2e-7 for |x| <= 87.3; 0 below, at most 2.4e38 above.
///
/// Cephes expf: range reduction by ln 2 in two parts, then a polynomial of degree 6.
template <typename V, typename I>
inline V exp_lanes(V x) {
  const V lowest = V{} - 87.3f;
  const V highest = V{} + 88.3f;
  V kept = x < lowest ? lowest : x;
  kept = kept > highest ? highest : kept;
  const V power = (kept * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds
  const V r = (kept - power * 0.693359375f) - power * -2.12194440e-4f;
  V sum = V{} + 1.9875691500e-4f;
  sum = sum * r + 1.3981999507e-3f;
  sum = sum * r + 8.3334519073e-3f;
  sum = sum * r + 4.1665795894e-2f;
  sum = sum * r + 1.6666665459e-1f;
  sum = sum * r + 5.0000001201e-1f;
  sum = sum * (r * r) + (r + 1.0f);
  const I exponent = (__builtin_convertvector(power, I) + 127) << 23;
  const V value = sum * reinterpret_cast<V>(exponent);
  return x < lowest ? V{} : value;
}

}  // namespace tandem
