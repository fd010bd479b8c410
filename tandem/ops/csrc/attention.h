// Attention of query rows over paged keys and values, by online softmax (arXiv:2205.14135, alg. 1).
//
// The keys of a sequence are taken in tiles of kTile positions, always starting at position 0. What
// a row computes depends on its own query and keys only: not on the page size, not on the rows
// beside it, and not on whether it came from a prefill chunk or a decode step.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace tandem {

constexpr int kTile = 16;       // keys at a time: one lane each
constexpr int kRowBlock = 4;    // rows that share one pass over a tile of keys
constexpr int kMaxRows = 48;    // rows whose state stays in the first-level cache

typedef float Scores __attribute__((vector_size(kTile * 4)));
typedef int32_t ScoreBits __attribute__((vector_size(kTile * 4)));
typedef float LooseScores __attribute__((vector_size(kTile * 4), aligned(4), may_alias));

inline Scores splat(float value) { return Scores{} + value; }

inline float max_lanes(Scores value) {
  float best = value[0];
  for (int lane = 1; lane < kTile; ++lane) best = value[lane] > best ? value[lane] : best;
  return best;
}

/// One kv head of one layer: where the keys or values of a page lie.
template <typename T>
struct PagedHead {
  const T* base;         // page 0, token 0, this head
  int64_t page_stride;   // in elements
  int64_t token_stride;  // in elements
  int64_t page_tokens;

  const T* at(const int32_t* page_ids, int64_t position) const {
    const int64_t page = page_ids[position / page_tokens];
    return base + page * page_stride + (position % page_tokens) * token_stride;
  }
};

/// Rows of one sequence and one kv head, and the state of their softmax.
struct AttentionRows {
  int count = 0;
  int64_t stride = 0;  // head_dim rounded up to kTile
  int64_t lengths[kMaxRows] = {};
  float maximum[kMaxRows] = {};
  Scores total[kMaxRows] = {};
  std::vector<float> memory;
  float* queries = nullptr;   // [count, stride], scaled
  float* outputs = nullptr;   // [count, stride]
  float* keys = nullptr;      // [stride, kTile]: transposed tile
  float* values = nullptr;    // [kTile, stride]

  explicit AttentionRows(int64_t head_dim) {
    stride = (head_dim + kTile - 1) / kTile * kTile;
    memory.resize(static_cast<size_t>(2 * (kMaxRows + kTile) * stride + kTile));
    const auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63};
    queries = reinterpret_cast<float*>(address);
    outputs = queries + kMaxRows * stride;
    keys = outputs + kMaxRows * stride;
    values = keys + kTile * stride;
  }
};

typedef float Eight __attribute__((vector_size(32)));
typedef float LooseEight __attribute__((vector_size(32), aligned(4), may_alias));

inline Eight load_eight(const float* from) { return *reinterpret_cast<const LooseEight*>(from); }
inline Eight load_eight(const Bf16* from) {
  Eight out;
  for (int i = 0; i < 8; ++i) out[i] = widen(from[i]);
  return out;
}

#if defined(__clang__) || __GNUC__ >= 12
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t EightIndices __attribute__((vector_size(32)));
#define TANDEM_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, EightIndices{__VA_ARGS__})
#endif

/// Writes the transpose of the 8 x 8 block that starts at rows[i] + column.
template <typename T>
inline void transpose_eight(const T* const* rows, int64_t column, float* to) {
  Eight a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = load_eight(rows[i] + column);
  for (int i = 0; i < 8; i += 2) {  // pairs of rows, within 128-bit halves
    b[i] = TANDEM_SHUFFLE(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    b[i + 1] = TANDEM_SHUFFLE(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = TANDEM_SHUFFLE(b[i], b[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    a[i + 1] = TANDEM_SHUFFLE(b[i], b[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    a[i + 2] = TANDEM_SHUFFLE(b[i + 1], b[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    a[i + 3] = TANDEM_SHUFFLE(b[i + 1], b[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    const Eight low = TANDEM_SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Eight high = TANDEM_SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    *reinterpret_cast<LooseEight*>(to + i * kTile) = low;
    *reinterpret_cast<LooseEight*>(to + (i + 4) * kTile) = high;
  }
}

template <typename T>
inline void transpose_keys(const T* const* rows, int64_t head_dim, float* to) {
  const int64_t whole = head_dim - head_dim % 8;
  for (int64_t column = 0; column < whole; column += 8) {
    transpose_eight(rows, column, to + column * kTile);
    transpose_eight(rows + 8, column, to + column * kTile + 8);
  }
  for (int64_t column = whole; column < head_dim; ++column) {
    for (int key = 0; key < kTile; ++key) to[column * kTile + key] = widen(rows[key][column]);
  }
}

template <int ROWS>
inline void score_rows(const float* queries, int64_t stride, const float* keys, int64_t head_dim,
                       Scores* scores) {
  Scores sums[ROWS] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    const Scores key = *reinterpret_cast<const Scores*>(keys + d * kTile);
    for (int row = 0; row < ROWS; ++row) sums[row] += queries[row * stride + d] * key;
  }
  for (int row = 0; row < ROWS; ++row) scores[row] = sums[row];
}

/// outputs = outputs * kept + weights @ values, in chunks of 4 vectors.
inline void add_values(float* outputs, float kept, Scores weights, const float* const* values,
                       int64_t stride) {
  int64_t d = 0;
  for (; d + 4 * kTile <= stride; d += 4 * kTile) {
    Scores sums[4];
    for (int i = 0; i < 4; ++i) {
      sums[i] = *reinterpret_cast<const Scores*>(outputs + d + i * kTile) * kept;
    }
    for (int key = 0; key < kTile; ++key) {
      const float weight = weights[key];
      for (int i = 0; i < 4; ++i) {
        sums[i] += weight * *reinterpret_cast<const LooseScores*>(values[key] + d + i * kTile);
      }
    }
    for (int i = 0; i < 4; ++i) *reinterpret_cast<Scores*>(outputs + d + i * kTile) = sums[i];
  }
  for (; d < stride; d += kTile) {
    Scores sum = *reinterpret_cast<const Scores*>(outputs + d) * kept;
    for (int key = 0; key < kTile; ++key) {
      sum += weights[key] * *reinterpret_cast<const LooseScores*>(values[key] + d);
    }
    *reinterpret_cast<Scores*>(outputs + d) = sum;
  }
}

/// Rows that are done take part with all scores masked, which leaves their state as it is.
template <int ROWS>
inline void attend_block(AttentionRows& rows, int first, int64_t start, int64_t head_dim,
                         const float* const* values) {
  const ScoreBits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Scores scores[ROWS];
  score_rows<ROWS>(rows.queries + first * rows.stride, rows.stride, rows.keys, head_dim, scores);
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + i;
    const int64_t valid = std::min<int64_t>(kTile, rows.lengths[row] - start);
    if (valid <= 0) continue;
    const Scores masked = lane < static_cast<int32_t>(valid)
                              ? scores[i]
                              : splat(-std::numeric_limits<float>::infinity());
    const float before = rows.maximum[row];
    const float now = std::max(before, max_lanes(masked));
    const Scores weights = exp_lanes<Scores, ScoreBits>(masked - now);
    const float kept = exp_lanes<Scores, ScoreBits>(splat(before - now))[0];
    rows.maximum[row] = now;
    rows.total[row] = rows.total[row] * kept + weights;
    add_values(rows.outputs + row * rows.stride, kept, weights, values, rows.stride);
  }
}

/// Fills rows.outputs; rows.queries and rows.lengths (all at least 1) are set by the caller.
template <typename T>
void attend(AttentionRows& rows, const PagedHead<T>& keys, const PagedHead<T>& values,
            const int32_t* page_ids, int64_t head_dim, const T* zeros) {
  std::fill(rows.outputs, rows.outputs + rows.count * rows.stride, 0.0f);
  int64_t longest = 0;
  for (int row = 0; row < rows.count; ++row) {
    rows.maximum[row] = -std::numeric_limits<float>::infinity();
    rows.total[row] = Scores{};
    longest = std::max(longest, rows.lengths[row]);
  }
  const bool in_place = std::is_same<T, float>::value && rows.stride == head_dim;
  for (int64_t start = 0; start < longest; start += kTile) {
    const T* key_rows[kTile];
    const float* value_rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const bool inside = start + i < longest;  // beyond, pages may hold anything
      key_rows[i] = inside ? keys.at(page_ids, start + i) : zeros;
      const T* value = inside ? values.at(page_ids, start + i) : zeros;
      if (in_place) {
        value_rows[i] = reinterpret_cast<const float*>(value);
        continue;
      }
      float* copy = rows.values + i * rows.stride;
      for (int64_t d = 0; d < head_dim; ++d) copy[d] = widen(value[d]);
      std::fill(copy + head_dim, copy + rows.stride, 0.0f);
      value_rows[i] = copy;
    }
    transpose_keys(key_rows, head_dim, rows.keys);
    for (int row = 0; row < rows.count; row += kRowBlock) {
      switch (std::min(kRowBlock, rows.count - row)) {
        case 1: attend_block<1>(rows, row, start, head_dim, value_rows); break;
        case 2: attend_block<2>(rows, row, start, head_dim, value_rows); break;
        case 3: attend_block<3>(rows, row, start, head_dim, value_rows); break;
        default: attend_block<kRowBlock>(rows, row, start, head_dim, value_rows);
      }
    }
  }
  for (int row = 0; row < rows.count; ++row) {
    float total = 0.0f;
    for (int lane = 0; lane < kTile; ++lane) total += rows.total[row][lane];
    float* output = rows.outputs + row * rows.stride;
    for (int64_t d = 0; d < rows.stride; ++d) output[d] /= total;
  }
}

}  // namespace tandem
