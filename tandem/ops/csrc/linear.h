// y = x W^T + b, with W [N, K] and x [M, K] used as they lie in memory.
//
// Every element of y is one dot product: lane l of an accumulator takes k = l, l + kLanes, ... in
// ascending order, then the lanes are folded. Blocking decides only which dot products are computed
// side by side, so a row of y has the same bits in every batch.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "vec.h"

namespace tandem {

// Few rows read W once, straight from memory, and fetch ahead. Many rows copy a panel of W into the
// first-level cache and pass over it. Both kinds of block fill the vector registers, but no more.
#if defined(__AVX512F__)  // 32 registers
constexpr int kFewRows = 8;
constexpr int kFewColumns = 3;
constexpr int kManyRows = 5;
constexpr int kManyColumns = 5;
#else  // 16 registers
constexpr int kFewRows = 4;
constexpr int kFewColumns = 2;
constexpr int kManyRows = 3;
constexpr int kManyColumns = 4;
#endif
constexpr int64_t kPanelColumns = 2 * kManyColumns;
constexpr int64_t kFromMemoryRows = 2 * kFewRows;  // above, copying W into panels pays
constexpr int64_t kTileBytes = 384 * 1024;         // rows of x that stay in the second-level cache
constexpr int64_t kGrainColumns = 48;              // columns worth a thread of their own

struct DotOperands {
  const float* x;
  const void* w;
  const void* next;  // columns that will be needed next, or null: brought near meanwhile
  int64_t depth;     // also the distance between rows of x and between columns of w
  float* sums;       // [MR, NR]
};

template <typename W, int MR, int NR>
void dot_block(const DotOperands& operands) {
  const float* x = operands.x;
  const W* w = static_cast<const W*>(operands.w);
  const int64_t depth = operands.depth, whole = depth - depth % kLanes;
  const W* next = static_cast<const W*>(operands.next);
  Vec acc[MR][NR] = {};
  for (int64_t k = 0; k < whole; k += kLanes) {
    Vec columns[NR];
    for (int n = 0; n < NR; ++n) {
      columns[n] = load(w + n * depth + k);
      if (next != nullptr) __builtin_prefetch(next + n * depth + k, 0, 3);
    }
    for (int m = 0; m < MR; ++m) {
      const Vec row = load(x + m * depth + k);
      for (int n = 0; n < NR; ++n) acc[m][n] += row * columns[n];
    }
  }
  for (int n = 0; n < NR && whole < depth; ++n) {
    const Vec column = load_some(w + n * depth + whole, depth - whole);
    for (int m = 0; m < MR; ++m) {
      acc[m][n] += load_some(x + m * depth + whole, depth - whole) * column;
    }
  }
  for (int m = 0; m < MR; ++m) {
    for (int n = 0; n < NR; ++n) operands.sums[m * NR + n] = sum_lanes(acc[m][n]);
  }
}

using DotBlock = void (*)(const DotOperands&);

/// Blocks of 1 .. ROWS by 1 .. COLUMNS, row by row.
template <typename W, int ROWS, int COLUMNS, int... I>
constexpr std::array<DotBlock, ROWS * COLUMNS> dot_blocks(std::integer_sequence<int, I...>) {
  return {dot_block<W, I / COLUMNS + 1, I % COLUMNS + 1>...};
}

/// Where results go: y = sums + bias, rounded to the type of y.
template <typename B, typename Y>
struct LinearOutput {
  Y* y;
  int64_t stride;
  const B* bias;

  void write(const float* sums, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    for (int64_t m = 0; m < rows; ++m) {
      for (int64_t n = 0; n < columns; ++n) {
        const float offset = bias == nullptr ? 0.0f : widen(bias[column + n]);
        narrow(sums[m * columns + n] + offset, y + (row + m) * stride + column + n);
      }
    }
  }
};

/// Columns [begin, end) of all rows, W read in place.
template <typename W, typename Y>
void linear_few(const float* x, const W* w, const LinearOutput<W, Y>& output, int64_t rows,
                int64_t depth, int64_t begin, int64_t end) {
  static constexpr auto blocks = dot_blocks<W, kFewRows, kFewColumns>(
      std::make_integer_sequence<int, kFewRows * kFewColumns>());
  float sums[kFewRows * kFewColumns];
  for (int64_t column = begin; column < end; column += kFewColumns) {
    const int64_t columns = std::min<int64_t>(kFewColumns, end - column);
    const W* here = w + column * depth;
    for (int64_t row = 0; row < rows; row += kFewRows) {
      const int64_t count = std::min<int64_t>(kFewRows, rows - row);
      const bool fetch = row == 0 && column + kFewColumns + columns <= end;
      const W* next = fetch ? here + kFewColumns * depth : nullptr;
      blocks[(count - 1) * kFewColumns + columns - 1]({x + row * depth, here, next, depth, sums});
      output.write(sums, row, count, column, columns);
    }
  }
}

/// Columns [begin, end) of all rows, W copied panel by panel.
template <typename W, typename Y>
void linear_many(const float* x, const W* w, const LinearOutput<W, Y>& output, int64_t rows,
                 int64_t depth, int64_t begin, int64_t end) {
  static constexpr auto blocks = dot_blocks<float, kManyRows, kManyColumns>(
      std::make_integer_sequence<int, kManyRows * kManyColumns>());
  float sums[kManyRows * kManyColumns];
  std::vector<float> memory(static_cast<size_t>(kPanelColumns * depth + kLanes));
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
  float* panel = reinterpret_cast<float*>((address + 4 * kLanes - 1) & ~uintptr_t{4 * kLanes - 1});
  const int64_t tile = std::max<int64_t>(1, kTileBytes / (depth * 4) / kManyRows) * kManyRows;
  for (int64_t first = 0; first < rows; first += tile) {
    const int64_t last = std::min(rows, first + tile);
    for (int64_t start = begin; start < end; start += kPanelColumns) {
      const int64_t stop = std::min(end, start + kPanelColumns);
      for (int64_t i = 0; i < (stop - start) * depth; ++i) panel[i] = widen(w[start * depth + i]);
      for (int64_t row = first; row < last; row += kManyRows) {
        const int64_t count = std::min<int64_t>(kManyRows, last - row);
        for (int64_t column = start; column < stop; column += kManyColumns) {
          const int64_t columns = std::min<int64_t>(kManyColumns, stop - column);
          const float* here = panel + (column - start) * depth;
          blocks[(count - 1) * kManyColumns + columns - 1](
              {x + row * depth, here, nullptr, depth, sums});
          output.write(sums, row, count, column, columns);
        }
      }
    }
  }
}

}  // namespace tandem
