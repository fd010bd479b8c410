// y = x W^T + b, with W [N, K] and x [M, K] used as they lie in memory.
//
// Every element of y is one dot product: lane l of an accumulator takes k = l, l + kLanes, ... in
// ascending order, then the lanes are folded. Blocking over M and N decides only which dot products
// are computed side by side, so a row of y has the same bits in every batch.
#pragma once

#include <algorithm>
#include <vector>

#include "vec.h"

namespace tandem {

#if defined(__AVX512F__)  // 32 registers
constexpr int kBlockRows = 4;
constexpr int kBlockColumns = 6;
#else  // 16 registers
constexpr int kBlockRows = 3;
constexpr int kBlockColumns = 4;
#endif
constexpr int64_t kPackFromRows = 9;        // below, weights are read once or twice: no copy
constexpr int64_t kTileBytes = 384 * 1024;  // rows of x that stay in the second-level cache

template <int MR, int NR, typename W>
inline void dot_block(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t depth,
                      float (&sums)[kBlockRows][kBlockColumns]) {
  Vec acc[MR][NR] = {};
  const int64_t whole = depth - depth % kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Vec rows[MR];
    for (int m = 0; m < MR; ++m) rows[m] = load(x + m * x_stride + k);
    for (int n = 0; n < NR; ++n) {
      const Vec column = load(w + n * w_stride + k);
      for (int m = 0; m < MR; ++m) acc[m][n] += rows[m] * column;
    }
  }
  if (whole < depth) {
    for (int n = 0; n < NR; ++n) {
      const Vec column = load_some(w + n * w_stride + whole, depth - whole);
      for (int m = 0; m < MR; ++m) {
        acc[m][n] += load_some(x + m * x_stride + whole, depth - whole) * column;
      }
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NR; ++n) sums[m][n] = sum_lanes(acc[m][n]);
  }
}

template <typename W>
using DotBlock = void (*)(const float*, int64_t, const W*, int64_t, int64_t,
                          float (&)[kBlockRows][kBlockColumns]);

template <typename W, int MR, int... NR>
constexpr DotBlock<W> pick_columns(int columns, std::integer_sequence<int, NR...>) {
  DotBlock<W> picked = nullptr;
  ((columns == NR + 1 ? (picked = dot_block<MR, NR + 1, W>, 0) : 0), ...);
  return picked;
}

template <typename W, int... MR>
constexpr DotBlock<W> pick_block(int rows, int columns, std::integer_sequence<int, MR...>) {
  DotBlock<W> picked = nullptr;
  ((rows == MR + 1 ? (picked = pick_columns<W, MR + 1>(
                          columns, std::make_integer_sequence<int, kBlockColumns>()),
                      0)
                   : 0),
   ...);
  return picked;
}

/// Columns [column, column + columns) of y for rows [first, last).
template <typename W, typename B, typename Y>
void linear_panel(const float* x, int64_t depth, const W* w, const B* bias, Y* y, int64_t y_stride,
                  int64_t first, int64_t last, int64_t column, int columns) {
  float sums[kBlockRows][kBlockColumns];
  for (int64_t row = first; row < last; row += kBlockRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kBlockRows, last - row));
    if (rows == kBlockRows && columns == kBlockColumns) {
      dot_block<kBlockRows, kBlockColumns, W>(x + row * depth, depth, w, depth, depth, sums);
    } else {
      pick_block<W>(rows, columns, std::make_integer_sequence<int, kBlockRows>())(
          x + row * depth, depth, w, depth, depth, sums);
    }
    for (int m = 0; m < rows; ++m) {
      for (int n = 0; n < columns; ++n) {
        const float offset = bias == nullptr ? 0.0f : widen(bias[column + n]);
        narrow(sums[m][n] + offset, y + (row + m) * y_stride + column + n);
      }
    }
  }
}

/// Columns [begin, end) of y; `x` is [rows, depth] in float32.
template <typename W, typename Y>
void linear_columns(const float* x, const W* w, const W* bias, Y* y, int64_t rows, int64_t depth,
                    int64_t width, int64_t begin, int64_t end) {
  const bool pack = rows >= kPackFromRows;
  std::vector<float> storage;
  if (pack) storage.resize(kBlockColumns * depth + 16);
  float* packed = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) &
                                           ~static_cast<uintptr_t>(63));
  const int64_t tile = std::max<int64_t>(
      kBlockRows, kTileBytes / (depth * 4) / kBlockRows * kBlockRows);
  for (int64_t first = 0; first < rows; first += tile) {
    const int64_t last = std::min(rows, first + tile);
    for (int64_t column = begin; column < end; column += kBlockColumns) {
      const int columns = static_cast<int>(std::min<int64_t>(kBlockColumns, end - column));
      const W* panel = w + column * depth;
      if (pack) {
        for (int64_t i = 0; i < columns * depth; ++i) packed[i] = widen(panel[i]);
        linear_panel(x, depth, packed, bias, y, width, first, last, column, columns);
      } else {
        linear_panel(x, depth, panel, bias, y, width, first, last, column, columns);
      }
    }
  }
}

}  // namespace tandem
