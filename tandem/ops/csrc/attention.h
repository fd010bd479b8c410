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
constexpr int kTaskRows = 48;   // rows of one kv head: their state stays in the first-level cache

typedef float Scores __attribute__((vector_size(kTile * 4)));
typedef int32_t ScoreBits __attribute__((vector_size(kTile * 4)));
typedef float LooseScores __attribute__((vector_size(kTile * 4), aligned(4), may_alias));

inline Scores splat(float v) {  // spelled out: adding to zeros would cost an addition
  return Scores{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v};
}

inline float max_lanes(Scores value) {
  Vec8 halves[2];
  std::memcpy(halves, &value, sizeof(value));
  const Vec8 eight = halves[0] > halves[1] ? halves[0] : halves[1];
  Vec4 quarters[2];
  std::memcpy(quarters, &eight, sizeof(eight));
  const Vec4 four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
  return std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

/// Where the keys or values of one layer lie, from some kv head on.
template <typename T>
struct PagedHead {
  const T* base;         // page 0, token 0, the first head
  int64_t page_stride;   // in elements
  int64_t token_stride;  // in elements
  int64_t page_tokens;

  /// Where positions [start, start + kTile) lie; those from `length` on point to `zeros`, because
  /// their slots may hold anything.
  void locate(const int32_t* page_ids, int64_t start, int64_t length, const T* zeros,
              const T** rows) const {
    int64_t page = start / page_tokens, offset = start % page_tokens;
    for (int i = 0; i < kTile; ++i) {
      const bool inside = start + i < length;
      rows[i] = inside ? base + page_ids[page] * page_stride + offset * token_stride : zeros;
      if (++offset == page_tokens) {
        offset = 0;
        ++page;
      }
    }
  }
};

/// One tile of a sequence's keys and values.
template <typename T>
struct Tile {
  const T* keys[kTile];
  const T* values[kTile];
};

/// Query rows of one sequence, the state of their softmax, and room to work in.
///
/// Rows are grouped by kv head: head h has rows [h * per_head, (h + 1) * per_head).
struct AttentionRows {
  int heads = 0;
  int per_head = 0;
  int64_t stride = 0;  // head_dim rounded up to kTile
  std::vector<int64_t> lengths;  // keys that a row sees; at least 1
  std::vector<float> maximum;
  std::vector<Scores> total;
  float* queries = nullptr;  // [rows, stride], scaled
  float* outputs = nullptr;  // [rows, stride]
  float* keys = nullptr;     // [stride, kTile]: a tile, transposed
  float* values = nullptr;   // [kTile, stride]: a tile, where it cannot be read in place

  explicit AttentionRows(int64_t head_dim) : stride((head_dim + kTile - 1) / kTile * kTile) {}

  void resize(int num_heads, int rows_per_head) {
    if (num_heads == heads && rows_per_head == per_head) return;
    heads = num_heads;
    per_head = rows_per_head;
    const size_t rows = static_cast<size_t>(heads) * static_cast<size_t>(per_head);
    lengths.resize(rows);
    maximum.resize(rows);
    total.resize(rows);
    memory_.resize(2 * (rows + kTile) * static_cast<size_t>(stride) + kTile);
    const auto address = (reinterpret_cast<uintptr_t>(memory_.data()) + 63) & ~uintptr_t{63};
    queries = reinterpret_cast<float*>(address);
    outputs = queries + rows * static_cast<size_t>(stride);
    keys = outputs + rows * static_cast<size_t>(stride);
    values = keys + kTile * stride;
  }

 private:
  std::vector<float> memory_;
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

// The hardware cannot foresee the jump to the next tile, so each tile fetches the next one while it
// computes: a few lines at a time, because a burst would stall on its own. `next` is null for all
// but the first rows that use a tile, and for the last tile.

/// Four sums a row, over d = 0, 1, 2, 3 modulo 4: one alone would wait for itself.
template <int ROWS, typename T>
inline void score_rows(const float* queries, int64_t stride, const float* keys, Scores* scores,
                       const T* const* next) {
  Scores sums[ROWS][4] = {};
  for (int64_t d = 0; d < stride; d += 4) {
    if (next != nullptr) {  // 16 rounds fetch 64 values of 16 keys
      const T* row = next[d / 4 % kTile] + d / 64 * 64;
      for (int i = 0; i < 64; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, 3);
    }
    for (int part = 0; part < 4; ++part) {
      const Scores key = *reinterpret_cast<const Scores*>(keys + (d + part) * kTile);
      for (int row = 0; row < ROWS; ++row) {
        sums[row][part] += queries[row * stride + d + part] * key;
      }
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    scores[row] = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
  }
}

/// outputs = outputs * kept + weights @ values, for WIDTH vectors from `d` on.
template <int ROWS, int WIDTH, typename T>
inline void add_values(float* outputs, int64_t stride, const float (*weights)[kTile],
                       const float* kept, const float* const* values, int64_t d,
                       const T* const* next) {
  Scores sums[ROWS][WIDTH];
  for (int row = 0; row < ROWS; ++row) {
    for (int i = 0; i < WIDTH; ++i) {
      const float* from = outputs + row * stride + d + i * kTile;
      sums[row][i] = *reinterpret_cast<const Scores*>(from) * kept[row];
    }
  }
  for (int key = 0; key < kTile; ++key) {
    Scores shares[ROWS];
    for (int row = 0; row < ROWS; ++row) shares[row] = splat(weights[row][key]);
    for (int i = 0; i < WIDTH; ++i) {
      if (next != nullptr) __builtin_prefetch(next[key] + d + i * kTile, 0, 3);
      const Scores value = *reinterpret_cast<const LooseScores*>(values[key] + d + i * kTile);
      for (int row = 0; row < ROWS; ++row) sums[row][i] += shares[row] * value;
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    for (int i = 0; i < WIDTH; ++i) {
      *reinterpret_cast<Scores*>(outputs + row * stride + d + i * kTile) = sums[row][i];
    }
  }
}

/// One tile for ROWS rows of one kv head. Rows that have seen all their keys take part with all
/// scores masked, which leaves their state as it is.
template <int ROWS, typename T>
inline void attend_block(AttentionRows& rows, int first, int64_t start,
                         const float* const* values, const Tile<T>* next) {
  const ScoreBits lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Scores nothing = splat(-std::numeric_limits<float>::infinity());
  Scores scores[ROWS];
  float weights[ROWS][kTile];
  float kept[ROWS];
  score_rows<ROWS, T>(rows.queries + first * rows.stride, rows.stride, rows.keys, scores,
                      next == nullptr ? nullptr : next->keys);
  for (int i = 0; i < ROWS; ++i) {
    const int row = first + i;
    const int64_t valid = std::clamp<int64_t>(rows.lengths[row] - start, 0, kTile);
    const Scores masked = lane < static_cast<int32_t>(valid) ? scores[i] : nothing;
    const float before = rows.maximum[row];
    const float now = std::max(before, max_lanes(masked));
    const Scores shares = exp_lanes<Scores, ScoreBits>(masked - now);
    kept[i] = before == now ? 1.0f : exp_lanes<Scores, ScoreBits>(splat(before - now))[0];
    rows.maximum[row] = now;
    rows.total[row] = rows.total[row] * kept[i] + shares;
    std::memcpy(weights[i], &shares, sizeof(shares));
  }
  float* outputs = rows.outputs + first * rows.stride;
  const T* const* next_values = next == nullptr ? nullptr : next->values;
  int64_t d = 0;
  for (; d + 4 * kTile <= rows.stride; d += 4 * kTile) {
    add_values<ROWS, 4, T>(outputs, rows.stride, weights, kept, values, d, next_values);
  }
  for (; d < rows.stride; d += kTile) {
    add_values<ROWS, 1, T>(outputs, rows.stride, weights, kept, values, d, next_values);
  }
}

/// One tile for all rows of one kv head.
template <typename T>
void attend_tile(AttentionRows& rows, int head, int64_t start, int64_t head_dim,
                 const Tile<T>& tile, const Tile<T>* next) {
  const bool in_place = std::is_same<T, float>::value && rows.stride == head_dim;
  const float* value_rows[kTile];
  for (int i = 0; i < kTile; ++i) {
    if (in_place) {
      value_rows[i] = reinterpret_cast<const float*>(tile.values[i]);
      continue;
    }
    float* copy = rows.values + i * rows.stride;
    for (int64_t d = 0; d < head_dim; ++d) copy[d] = widen(tile.values[i][d]);
    std::fill(copy + head_dim, copy + rows.stride, 0.0f);
    value_rows[i] = copy;
  }
  transpose_keys(tile.keys, head_dim, rows.keys);
  const int last = (head + 1) * rows.per_head;
  for (int row = head * rows.per_head; row < last; row += kRowBlock) {
    switch (std::min(kRowBlock, last - row)) {
      case 1: attend_block<1, T>(rows, row, start, value_rows, next); break;
      case 2: attend_block<2, T>(rows, row, start, value_rows, next); break;
      case 3: attend_block<3, T>(rows, row, start, value_rows, next); break;
      default: attend_block<kRowBlock, T>(rows, row, start, value_rows, next);
    }
    next = nullptr;
  }
}

/// Fills rows.outputs from rows.queries and rows.lengths; `keys` and `values` are the first of
/// rows.heads kv heads. `zeros` are as many zeros as these heads have dimensions.
template <typename T>
void attend(AttentionRows& rows, const PagedHead<T>& keys, const PagedHead<T>& values,
            const int32_t* page_ids, int64_t head_dim, const T* zeros) {
  const int count = rows.heads * rows.per_head;
  std::fill(rows.outputs, rows.outputs + count * rows.stride, 0.0f);
  std::fill(rows.keys, rows.keys + rows.stride * kTile, 0.0f);
  std::fill(rows.maximum.begin(), rows.maximum.end(), -std::numeric_limits<float>::infinity());
  std::fill(rows.total.begin(), rows.total.end(), Scores{});
  const int64_t longest = *std::max_element(rows.lengths.begin(), rows.lengths.end());
  Tile<T> tile, next;
  const auto locate = [&](Tile<T>& into, int64_t start) {
    keys.locate(page_ids, start, longest, zeros, into.keys);
    values.locate(page_ids, start, longest, zeros, into.values);
  };
  locate(next, 0);
  for (int64_t start = 0; start < longest; start += kTile) {
    tile = next;
    const bool last = start + kTile >= longest;
    if (!last) locate(next, start + kTile);
    Tile<T> ahead = next;
    for (int head = 0; head < rows.heads; ++head) {
      attend_tile(rows, head, start, head_dim, tile, last ? nullptr : &ahead);
      for (int i = 0; i < kTile; ++i) {
        tile.keys[i] += head_dim;
        tile.values[i] += head_dim;
        ahead.keys[i] += head_dim;
        ahead.values[i] += head_dim;
      }
    }
  }
  for (int row = 0; row < count; ++row) {
    float total = 0.0f;
    for (int lane = 0; lane < kTile; ++lane) total += rows.total[row][lane];
    float* output = rows.outputs + row * rows.stride;
    for (int64_t d = 0; d < rows.stride; ++d) output[d] /= total;
  }
}

}  // namespace tandem
