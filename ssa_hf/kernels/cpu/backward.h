// The backward pass: weights again from the saved normaliser, five products a block.
#pragma once

#include "forward.h"

namespace ssa {

// What the gradients of one head's b and n are made of. With c = x / (1 + b|x|) they are n·sum(dg·c) and
// sum(dg·g) / n over queries and keys.
//
// Over the keys of a query dg sums to 0, in exact arithmetic, so a constant may be taken off c and g. Where scores
// are large, c and g hardly differ between the keys that matter, and a query's rounding error in sum(dg) would
// drown the sums. So sum(dg)·mean(c) is taken off, query by query.
struct QuerySums {
  Vec dg{}, dg_g{}, dg_c{}, mean_g{}, mean_c{};
};

// One row of scores x becomes weights, one row of grad_weights becomes dx = dL/dx; `logits` is room for a row. With
// dropout factors, the weights left in `scores` are those after dropout, as they met the values.
inline void differentiate(float* scores, float* grad_weights, float* logits, int64_t low, int64_t high,
                          const float* mask, const float* factors, Scoring scoring, const float* normaliser,
                          float delta, QuerySums& sums) {
  // The same logits as in the forward pass: its weights again, bit for bit.
  for_vectors(low, high, mask, [&](int64_t j, Vec bias, auto masked) {
    Vec x = load(scores + j), g;
    if constexpr (masked.value) {
      x = bias == -kInfinity ? Vec{} : x + bias;
      g = mask_logits(scoring.logits(x), bias);
      store(scores + j, x);
    } else {
      g = scoring.logits(x);
    }
    store(logits + j, g);
  });
  const float shift = normaliser[0], normalise = normaliser[1], slope = scoring.n * scoring.b;
  const float log2_e_n = kLog2E * scoring.n;
  QuerySums s = sums;
  for (int64_t j = low / kVector * kVector; j < high; j += kVector) {
    const Vec x = load(scores + j), g = load(logits + j);
    Vec weight = exp2(g - shift) * normalise, dweight = load(grad_weights + j);
    if (factors) dweight *= load(factors + j);
    const Vec dg = weight * (dweight - delta);
    const Vec u = scoring.b * abs(x), one_plus = 1.0f + u, inverse = 1.0f / one_plus;
    // The rounding of 1 + u, made good to first order: log1p to float precision for small u as well.
    const Vec lost = times_sign_of((u - (one_plus - 1.0f)) * inverse, x);
    const Vec dx = dg * (slope * inverse);
    const Vec c = x * inverse, full_g = g + log2_e_n * lost;
    s.dg += dg;
    s.dg_g += dg * full_g;
    s.dg_c += dg * c;
    s.mean_g += weight * full_g;
    s.mean_c += weight * c;
    if (factors) weight *= load(factors + j);
    store(scores + j, weight);
    store(grad_weights + j, dx);
  }
  sums = s;
}

class Backward {
 public:
  explicit Backward(const Problem& problem)
      : p_(problem), visible_{p_}, size_(blocks_of(p_)), keys_(p_.k_len, p_.dim, size_.keys, true, true),
        values_(p_.k_len, p_.value_dim, size_.keys, true, false), ldq_(keys_.ld()), ldv_(values_.ld()),
        query_(size_.queries * ldq_), grad_output_(size_.queries * ldv_), grad_query_(size_.queries * ldq_),
        output_(size_.queries * ldv_), scores_(size_.queries * size_.keys), grad_weights_(size_.queries * size_.keys),
        logits_(size_.keys), factors_(size_.keys), delta_(size_.queries), mask_(size_.queries, size_.keys),
        query_sums_(size_.queries) {}

  // Floats that the gradients of a head's keys and values take while they are summed.
  static int64_t sums_size(const Problem& p) {
    return round_up(p.k_len, blocks_of(p).keys) * (round_up(p.dim, kVector) + round_up(p.value_dim, kVector));
  }

  // Adds into `sums` (sums_size floats): first the keys' gradients, then the values'.
  void run(Task task, float* sums) {
    grad_key_ = sums;
    grad_value_ = sums + round_up(p_.k_len, size_.keys) * ldq_;
    std::memset(sums, 0, sums_size(p_) * sizeof(float));
    packed_.assign(p_.k_len / size_.keys + 1, false);
    const int64_t share = p_.heads / p_.groups;
    for (int64_t head = task.group * share; head < (task.group + 1) * share; ++head) {
      const Scoring scoring{p_.b[head], p_.n[head]};
      double sum_g = 0, sum_c = 0;
      for (int64_t query = task.split * size_.queries; query < p_.q_len; query += p_.splits * size_.queries) {
        const int64_t rows = std::min(size_.queries, p_.q_len - query);
        run_block(task, head, query, rows, scoring);
        for (int64_t i = 0; i < rows; ++i) {
          const QuerySums& s = query_sums_[i];
          const double dg = sum(s.dg);
          sum_g += sum(s.dg_g) - dg * sum(s.mean_g);
          sum_c += sum(s.dg_c) - dg * sum(s.mean_c);
        }
      }
      const int64_t at = (task.batch * p_.splits + task.split) * p_.heads + head;
      p_.grad_n[at] = sum_g * kLn2 / scoring.n;
      p_.grad_b[at] = sum_c * scoring.n;
    }
  }

  // Writes one head's gradients of keys and values, summed over `splits` times sums_size floats.
  static void write(const Problem& p, Task task, float* sums, int64_t splits) {
    const int64_t size = sums_size(p), ldq = round_up(p.dim, kVector), ldv = round_up(p.value_dim, kVector);
    for (int64_t split = 1; split < splits; ++split)
      for (int64_t i = 0; i < size; ++i) sums[i] += sums[split * size + i];
    const float* values = sums + round_up(p.k_len, blocks_of(p).keys) * ldq;
    write_rows(p.grad_key, p.dtype, task.batch, task.group, 0, p.k_len, p.dim, 1.0f, sums, ldq);
    write_rows(p.grad_value, p.dtype, task.batch, task.group, 0, p.k_len, p.value_dim, 1.0f, values, ldv);
  }

 private:
  void run_block(Task task, int64_t head, int64_t query, int64_t rows, Scoring scoring) {
    read_rows(p_.query, p_.dtype, task.batch, head, query, rows, p_.dim, float(p_.scale), query_.data(), ldq_);
    read_rows(p_.grad_output, p_.dtype, task.batch, head, query, rows, p_.value_dim, 1.0f, grad_output_.data(), ldv_);
    read_rows(p_.output, p_.dtype, task.batch, head, query, rows, p_.value_dim, 1.0f, output_.data(), ldv_);
    for (int64_t i = 0; i < rows; ++i) {
      Vec products{};
      for (int64_t j = i * ldv_; j < (i + 1) * ldv_; j += kVector)
        products += load(output_.data() + j) * load(grad_output_.data() + j);
      delta_.data()[i] = sum(products);
    }
    std::memset(grad_query_.data(), 0, rows * ldq_ * sizeof(float));
    std::fill_n(query_sums_.begin(), rows, QuerySums{});

    const int64_t end = visible_.high(query + rows - 1);
    for (int64_t key = visible_.low(query) / size_.keys * size_.keys; key < end; key += size_.keys) {
      const int64_t columns = std::min(size_.keys, end - key);
      const Mask mask = mask_.read(p_, task.batch, head, query, rows, key, columns);
      if (mask == Mask::kNothingSeen) continue;
      if (!packed_[key / size_.keys]) {
        const int64_t count = std::min(size_.keys, p_.k_len - key);
        keys_.read(p_.key, p_.dtype, task.batch, task.group, key, count);
        values_.read(p_.value, p_.dtype, task.batch, task.group, key, count);
        packed_[key / size_.keys] = true;
      }
      scores(task, head, query, rows, key, columns, mask == Mask::kMixed, scoring);
      spread(query, rows, key, columns);
    }
    write_rows(p_.grad_query, p_.dtype, task.batch, head, query, rows, p_.dim, float(p_.scale), grad_query_.data(),
               ldq_);
  }

  // Weights and dx of a block, and with them the gradient of its queries.
  void scores(Task task, int64_t head, int64_t query, int64_t rows, int64_t key, int64_t columns, bool masked,
              Scoring scoring) {
    const float* normaliser = p_.normaliser + 2 * ((task.batch * p_.heads + head) * p_.q_len + query);
    const int64_t ld = size_.keys, all = round_up(columns, kVector);
    for (int64_t first = 0; first < rows; first += kRowGroup) {
      const int64_t count = std::min(kRowGroup, rows - first);
      const int64_t seen = std::clamp<int64_t>(visible_.high(query + first + count - 1) - key, 0, columns);
      const int64_t width = round_up(seen, kVector);
      float *x = scores_.data() + first * ld, *dx = grad_weights_.data() + first * ld;
      if (width) {
        times_transposed({query_.data() + first * ldq_, ldq_, 1}, keys_, key, x, ld, count, width);
        times_transposed({grad_output_.data() + first * ldv_, ldv_, 1}, values_, key, dx, ld, count, width);
      }
      for (int64_t i = first; i < first + count; ++i) {
        float *row = scores_.data() + i * ld, *grad_row = grad_weights_.data() + i * ld;
        const int64_t high = std::clamp<int64_t>(visible_.high(query + i) - key, 0, seen);
        const int64_t low = std::clamp<int64_t>(visible_.low(query + i) - key, 0, high);
        clear_outside(row, low, high, all);
        clear_outside(grad_row, low, high, all);
        if (p_.dropout > 0) dropout_row(p_, task.batch, head, query + i, key, width, factors_.data());
        differentiate(row, grad_row, logits_.data(), low, high, masked ? mask_.row(i) : nullptr,
                      p_.dropout > 0 ? factors_.data() : nullptr, scoring, normaliser + 2 * i, delta_.data()[i],
                      query_sums_[i]);
      }
      gemm<true>({dx, ld, 1}, keys_.plain(key), ldq_, kStripWidth, grad_query_.data() + first * ldq_, ldq_, count, ldq_,
                 seen);
    }
  }

  // Gradients of a block's keys and values; the first query that sees a group of keys begins the sum.
  void spread(int64_t query, int64_t rows, int64_t key, int64_t columns) {
    for (int64_t first = 0; first < columns; first += kRowGroup) {
      const int64_t count = std::min(kRowGroup, columns - first);
      int64_t start = 0;
      if (p_.causal) start = std::clamp<int64_t>(key + first - (p_.k_len - p_.q_len) - query, 0, rows);
      const int64_t at = start * size_.keys + first;
      gemm<true>({grad_weights_.data() + at, 1, size_.keys}, query_.data() + start * ldq_, ldq_, kStripWidth,
                 grad_key_ + (key + first) * ldq_, ldq_, count, ldq_, rows - start);
      gemm<true>({scores_.data() + at, 1, size_.keys}, grad_output_.data() + start * ldv_, ldv_, kStripWidth,
                 grad_value_ + (key + first) * ldv_, ldv_, count, ldv_, rows - start);
    }
  }

  const Problem& p_;
  Visible visible_;
  Blocks size_;
  Packed keys_, values_;
  int64_t ldq_, ldv_;
  Buffer query_, grad_output_, grad_query_, output_, scores_, grad_weights_, logits_, factors_, delta_;
  MaskBlock mask_;
  std::vector<QuerySums> query_sums_;
  std::vector<bool> packed_;
  float *grad_key_ = nullptr, *grad_value_ = nullptr;
};

}  // namespace ssa
