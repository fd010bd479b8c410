// The attention operators: from tensors to tasks that threads share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "checks.h"

namespace tandem {

/// Consecutive query rows of one sequence, for some of the kv heads.
struct AttentionTask {
  int64_t sequence;
  int64_t first_query;
  int64_t num_queries;
  int64_t first_length;  // keys that the first query sees; each next one sees one more
  int64_t first_head;
  int64_t num_heads;
};

/// Calls body(row, element offset of that row's head in q and out) for all rows of a task.
template <typename Body>
void for_each_row(const AttentionTask& task, int64_t group, const Tensor& q, const Body& body) {
  const int64_t heads = q.size(1), head_dim = q.size(2), per_head = task.num_queries * group;
  for (int64_t row = 0; row < task.num_heads * per_head; ++row) {
    const int64_t query = row % per_head / group;
    const int64_t head = (task.first_head + row / per_head) * group + row % group;
    body(row, query, ((task.first_query + query) * heads + head) * head_dim);
  }
}

template <typename T>
void run_task(const AttentionTask& task, const Tensor& q, const Tensor& k_pages,
              const Tensor& v_pages, const Tensor& block_table, double scale, const Tensor& out,
              AttentionRows& rows, const T* zeros) {
  const int64_t head_dim = q.size(2), kv_heads = k_pages.size(2), group = q.size(1) / kv_heads;
  const int64_t token_size = kv_heads * head_dim, page_tokens = k_pages.size(1);
  rows.resize(static_cast<int>(task.num_heads), static_cast<int>(task.num_queries * group));
  for_each_row(task, group, q, [&](int64_t row, int64_t query, int64_t at) {
    float* to = rows.queries + row * rows.stride;
    std::fill(to + head_dim, to + rows.stride, 0.0f);
    for (int64_t d = 0; d < head_dim; ++d) {
      to[d] = widen(data<T>(q)[at + d]) * static_cast<float>(scale);
    }
    rows.lengths[row] = task.first_length + query;
  });
  const auto from_head = [&](const Tensor& pages) {
    return PagedHead<T>{data<T>(pages) + task.first_head * head_dim, page_tokens * token_size,
                        token_size, page_tokens};
  };
  const int32_t* pages = data<int32_t>(block_table) + task.sequence * block_table.size(1);
  attend<T>(rows, from_head(k_pages), from_head(v_pages), pages, head_dim, zeros);
  for_each_row(task, group, q, [&](int64_t row, int64_t, int64_t at) {
    const float* from = rows.outputs + row * rows.stride;
    for (int64_t d = 0; d < head_dim; ++d) narrow(from[d], data<T>(out) + at + d);
  });
}

template <typename T>
void run_attention(const std::vector<AttentionTask>& tasks, const Tensor& q, const Tensor& k_pages,
                   const Tensor& v_pages, const Tensor& block_table, double scale,
                   const Tensor& out) {
  const int64_t head_dim = q.size(2);
  const std::vector<T> zeros(static_cast<size_t>(k_pages.size(2) * head_dim), T{});
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    AttentionRows rows(head_dim);
    for (int64_t i = begin; i < end; ++i) {
      run_task<T>(tasks[i], q, k_pages, v_pages, block_table, scale, out, rows, zeros.data());
    }
  });
}

inline void check_attention(const char* op, const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                     const Tensor& block_table, const Tensor& lengths, const Tensor& out) {
  check_dense(q, k_pages, op, "q");
  check_dense(out, k_pages, op, "out");
  check_dense(k_pages, k_pages, op, "k_pages");
  check_dense(v_pages, k_pages, op, "v_pages");
  check_shape(out, q.sizes(), op, "out");
  check_shape(k_pages, {k_pages.size(0), k_pages.size(1), k_pages.size(2), q.size(2)}, op,
              "k_pages");
  check_shape(v_pages, k_pages.sizes(), op, "v_pages");
  check_shape(lengths, {block_table.size(0)}, op, "lengths");
  TORCH_CHECK(q.size(1) % k_pages.size(2) == 0, op, ": ", q.size(1), " heads on ",
              k_pages.size(2), " kv heads");
  TORCH_CHECK(block_table.scalar_type() == at::kInt && block_table.is_contiguous() &&
                  lengths.scalar_type() == at::kInt && lengths.is_contiguous(),
              op, ": block_table and lengths must be contiguous int32");
}

/// The pages that `length` keys of a sequence lie in must exist.
inline void check_pages(const char* op, const Tensor& k_pages, const Tensor& block_table,
                 int64_t sequence, int64_t length) {
  const int64_t used = (length + k_pages.size(1) - 1) / k_pages.size(1);
  TORCH_CHECK_INDEX(used <= block_table.size(1), op, ": ", length, " keys need ", used,
                    " pages, the block table holds ", block_table.size(1));
  const int32_t* pages = data<int32_t>(block_table) + sequence * block_table.size(1);
  for (int64_t i = 0; i < used; ++i) {
    TORCH_CHECK_INDEX(0 <= pages[i] && pages[i] < k_pages.size(0), op, ": page ", pages[i],
                      " is outside the pool of ", k_pages.size(0));
  }
}

inline void dispatch_attention(const char* op, const std::vector<AttentionTask>& tasks, const Tensor& q,
                        const Tensor& k_pages, const Tensor& v_pages, const Tensor& block_table,
                        double scale, const Tensor& out) {
  with_type(k_pages, op, [&](auto type) {
    run_attention<decltype(type)>(tasks, q, k_pages, v_pages, block_table, scale, out);
  });
}

inline void zero_row(const Tensor& out, int64_t row) {
  const int64_t bytes = out.size(1) * out.size(2) * out.element_size();
  std::memset(data<char>(out) + row * bytes, 0, static_cast<size_t>(bytes));
}

inline Tensor& paged_attention_out(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                            const Tensor& block_table, const Tensor& lengths, double scale,
                            Tensor& out) {
  check_attention("paged_attention", q, k_pages, v_pages, block_table, lengths, out);
  check_shape(lengths, {q.size(0)}, "paged_attention", "lengths");
  // one pass over a page for all heads; with fewer rows than threads, the heads are shared out
  const int64_t kv_heads = k_pages.size(2);
  const int64_t together = q.size(0) >= at::get_num_threads() ? kv_heads : 1;
  std::vector<AttentionTask> tasks;
  for (int64_t row = 0; row < q.size(0); ++row) {
    const int64_t length = data<int32_t>(lengths)[row];
    if (length <= 0) {
      zero_row(out, row);
      continue;
    }
    check_pages("paged_attention", k_pages, block_table, row, length);
    for (int64_t head = 0; head < kv_heads; head += together) {
      tasks.push_back({row, row, 1, length, head, together});
    }
  }
  dispatch_attention("paged_attention", tasks, q, k_pages, v_pages, block_table, scale, out);
  return out;
}

inline Tensor paged_attention(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                       const Tensor& block_table, const Tensor& lengths, double scale) {
  Tensor out = at::empty_like(q);
  return paged_attention_out(q, k_pages, v_pages, block_table, lengths, scale, out);
}

inline Tensor& paged_prefill_attention_out(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                                    const Tensor& block_table, const Tensor& lengths,
                                    const Tensor& query_starts, double scale, Tensor& out) {
  const char* op = "paged_prefill_attention";
  check_attention(op, q, k_pages, v_pages, block_table, lengths, out);
  const int64_t sequences = lengths.size(0);
  check_shape(query_starts, {sequences + 1}, op, "query_starts");
  TORCH_CHECK(query_starts.scalar_type() == at::kInt && query_starts.is_contiguous(), op,
              ": query_starts must be contiguous int32");
  const int64_t most = std::max<int64_t>(1, kTaskRows / (q.size(1) / k_pages.size(2)));
  const int32_t* starts = data<int32_t>(query_starts);
  TORCH_CHECK(starts[0] == 0 && starts[sequences] == q.size(0), op,
              ": query_starts must run from 0 to the number of queries");
  std::vector<AttentionTask> tasks;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t queries = starts[sequence + 1] - starts[sequence];
    const int64_t length = data<int32_t>(lengths)[sequence];
    TORCH_CHECK(0 <= queries && queries <= length, op, ": sequence ", sequence, " has ", queries,
                " queries and ", length, " keys");
    check_pages(op, k_pages, block_table, sequence, length);
    for (int64_t query = 0; query < queries; query += most) {
      for (int64_t head = 0; head < k_pages.size(2); ++head) {
        tasks.push_back({sequence, starts[sequence] + query, std::min(most, queries - query),
                         length - queries + query + 1, head, 1});
      }
    }
  }
  dispatch_attention(op, tasks, q, k_pages, v_pages, block_table, scale, out);
  return out;
}

inline Tensor paged_prefill_attention(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                               const Tensor& block_table, const Tensor& lengths,
                               const Tensor& query_starts, double scale) {
  Tensor out = at::empty_like(q);
  return paged_prefill_attention_out(q, k_pages, v_pages, block_table, lengths, query_starts,
                                     scale, out);
}

}  // namespace tandem
