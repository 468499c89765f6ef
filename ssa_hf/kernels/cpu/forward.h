// The forward pass.
#pragma once

#include <vector>

#include "blocks.h"

namespace ssa {

// |g| up to which weights are summed as they are: 2^40 a key overflows no sum. SSA's weights grow like a power of
// the score, so nearly every block stays below, and needs no running maximum.
constexpr float kPlainLimit = 40.0f;

// Largest Euclidean norm of the rows.
inline float largest_norm(const float* rows, int64_t count, int64_t ld) {
  float top = 0;
  for (int64_t i = 0; i < count; ++i) {
    Vec squares{};
    for (int64_t j = 0; j < ld; j += kVector) squares += load(rows + i * ld + j) * load(rows + i * ld + j);
    top = std::max(top, sum(squares));
  }
  return std::sqrt(top);
}

// g of SSA in base 2, for one head.
struct Scoring {
  float b, n;
  Vec logits(Vec x) const { return times_sign_of(n * log2(1.0f + b * abs(x)), x); }
};

// The logit of a masked key: its weight is 0, and 0 times it is 0.
constexpr float kMaskedLogit = -1e38f;
inline Vec mask_logits(Vec g, Vec bias) { return bias == -kInfinity ? splat(kMaskedLogit) : g; }

// One row of scores becomes logits; returns their largest, and `top` at least, if it is asked for.
template <bool kLargest>
inline float to_logits(float* row, int64_t low, int64_t high, const float* mask, Scoring scoring, float top) {
  Vec largest = splat(top);
  for_vectors(low, high, mask, [&](int64_t j, Vec bias, auto masked) {
    Vec g;
    if constexpr (masked.value)
      g = mask_logits(scoring.logits(load(row + j) + bias), bias);
    else
      g = scoring.logits(load(row + j));
    store(row + j, g);
    if (kLargest) largest = max(largest, g);
  });
  return kLargest ? max(largest) : 0;
}

// One row of logits becomes weights 2^(g - shift); returns their sums, lane by lane.
template <bool kShift>
inline Vec to_weights(float* row, int64_t low, int64_t high, float shift) {
  Vec total{};
  for (int64_t j = low / kVector * kVector; j < high; j += kVector) {
    const Vec w = exp2(kShift ? load(row + j) - shift : load(row + j));
    store(row + j, w);
    total += w;
  }
  return total;
}

// Two short passes over a row, which the first-level cache holds, are faster than a long one: all their constants
// fit into registers.
inline void weigh(float* row, int64_t low, int64_t high, const float* mask, Scoring scoring, Vec& total) {
  to_logits<false>(row, low, high, mask, scoring, 0);
  total += to_weights<false>(row, low, high, 0);
}

// The same where weights could overflow: relative to 2^top, the largest so far. `top` and `total` go on from the
// blocks before; returns the factor that brings their sums to the new maximum.
inline float weigh_online(float* row, int64_t low, int64_t high, const float* mask, Scoring scoring, float& top,
                          Vec& total) {
  const float new_top = to_logits<true>(row, low, high, mask, scoring, top);
  if (new_top <= kMaskedLogit) {  // nothing seen yet
    std::memset(row, 0, round_up(high, kVector) * sizeof(float));
    return 1.0f;
  }
  const float factor = top == -kInfinity ? 1.0f : std::exp2(top - new_top);
  total = total * factor + to_weights<true>(row, low, high, new_top);
  top = new_top;
  return factor;
}

class Forward {
 public:
  explicit Forward(const Problem& problem)
      : p_(problem), visible_{p_}, size_(blocks_of(p_)),
        keys_(p_.k_len, p_.dim, size_.keys, true, false), values_(p_.k_len, p_.value_dim, size_.keys, false, true),
        key_norms_(p_.k_len / size_.keys + 1), query_(size_.queries * keys_.ld()),
        scores_(size_.queries * size_.keys), output_(size_.queries * values_.ld()), factors_(size_.keys),
        mask_(size_.queries, size_.keys), top_(size_.queries), total_(size_.queries) {}

  void run(Task task) {
    packed_.assign(p_.k_len / size_.keys + 1, false);
    const int64_t share = p_.heads / p_.groups;
    for (int64_t head = task.group * share; head < (task.group + 1) * share; ++head)
      for (int64_t query = task.split * size_.queries; query < p_.q_len; query += p_.splits * size_.queries)
        run_block(task, head, query, std::min(size_.queries, p_.q_len - query));
  }

 private:
  void run_block(Task task, int64_t head, int64_t query, int64_t rows) {
    const int64_t ldq = keys_.ld();
    read_rows(p_.query, p_.dtype, task.batch, head, query, rows, p_.dim, float(p_.scale), query_.data(), ldq);
    const float query_norm = largest_norm(query_.data(), rows, ldq);
    const Scoring scoring{p_.b[head], p_.n[head]};
    std::memset(output_.data(), 0, rows * values_.ld() * sizeof(float));
    std::fill_n(top_.begin(), rows, -kInfinity);
    std::fill_n(total_.begin(), rows, Vec{});
    bool online = false;

    const int64_t end = visible_.high(query + rows - 1);
    for (int64_t key = visible_.low(query) / size_.keys * size_.keys; key < end; key += size_.keys) {
      const int64_t columns = std::min(size_.keys, end - key);
      const Mask mask = mask_.read(p_, task.batch, head, query, rows, key, columns);
      if (mask == Mask::kNothingSeen) continue;
      const int64_t block = key / size_.keys;
      if (!packed_[block]) {
        const int64_t count = std::min(size_.keys, p_.k_len - key);
        const float* rows_read = keys_.read(p_.key, p_.dtype, task.batch, task.group, key, count);
        values_.read(p_.value, p_.dtype, task.batch, task.group, key, count);
        key_norms_[block] = largest_norm(rows_read, count, keys_.ld());
        packed_[block] = true;
      }
      // By Cauchy-Schwarz no |x| of this block exceeds the product of the norms; a bias may. Once online, the
      // rows' sums are relative to a maximum, and stay so.
      const float bound = scoring.n * std::log2(1.0f + scoring.b * query_norm * key_norms_[block]);
      if (!online && (!(bound <= kPlainLimit) || (mask == Mask::kMixed && p_.mask_kind == kAdditive))) {
        online = true;
        // Plain sums are relative to 2^0.
        for (int64_t i = 0; i < rows; ++i)
          if (sum(total_[i]) > 0) top_[i] = 0;
      }
      attend(task, head, query, rows, key, columns, mask == Mask::kMixed, scoring, online);
    }
    finish(task, head, query, rows);
  }

  void attend(Task task, int64_t head, int64_t query, int64_t rows, int64_t key, int64_t columns, bool masked,
              Scoring scoring, bool online) {
    const int64_t ldq = keys_.ld();
    for (int64_t first = 0; first < rows; first += kRowGroup) {
      const int64_t count = std::min(kRowGroup, rows - first);
      const int64_t seen = std::min(columns, visible_.high(query + first + count - 1) - key);
      if (seen <= 0) continue;
      const int64_t width = round_up(seen, kVector);
      float* scores = scores_.data() + first * size_.keys;
      times_transposed({query_.data() + first * ldq, ldq, 1}, keys_, key, scores, size_.keys, count, width);
      for (int64_t i = first; i < first + count; ++i) {
        float* row = scores_.data() + i * size_.keys;
        const int64_t high = std::clamp<int64_t>(visible_.high(query + i) - key, 0, seen);
        const int64_t low = std::clamp<int64_t>(visible_.low(query + i) - key, 0, high);
        clear_outside(row, low, high, width);
        if (low == high) continue;
        const float* mask = masked ? mask_.row(i) : nullptr;
        if (online) {
          const float factor = weigh_online(row, low, high, mask, scoring, top_[i], total_[i]);
          if (factor != 1.0f) rescale(i, factor);
        } else {
          weigh(row, low, high, mask, scoring, total_[i]);
        }
        if (p_.dropout > 0) {
          dropout_row(p_, task.batch, head, query + i, key, width, factors_.data());
          for (int64_t j = 0; j < width; ++j) row[j] *= factors_.data()[j];
        }
      }
      gemm<true>({scores, size_.keys, 1}, values_.plain(key), values_.ld(), kStripWidth,
                 output_.data() + first * values_.ld(), values_.ld(), count, values_.ld(), seen);
    }
  }

  void rescale(int64_t row, float factor) {
    float* output = output_.data() + row * values_.ld();
    for (int64_t j = 0; j < values_.ld(); ++j) output[j] *= factor;
  }

  void finish(Task task, int64_t head, int64_t query, int64_t rows) {
    float* normaliser = p_.normaliser + 2 * ((task.batch * p_.heads + head) * p_.q_len + query);
    for (int64_t i = 0; i < rows; ++i) {
      const float total = sum(total_[i]);
      const float factor = total > 0 ? 1.0f / total : 0.0f;
      rescale(i, factor);
      normaliser[2 * i] = top_[i] == -kInfinity ? 0.0f : top_[i];
      normaliser[2 * i + 1] = factor;
    }
    write_rows(p_.output, p_.dtype, task.batch, head, query, rows, p_.value_dim, 1.0f, output_.data(), values_.ld());
  }

  const Problem& p_;
  Visible visible_;
  Blocks size_;
  Packed keys_, values_;
  std::vector<bool> packed_;
  std::vector<float> key_norms_;
  Buffer query_, scores_, output_, factors_;
  MaskBlock mask_;
  std::vector<float> top_;   // the maximum that a row's sums are relative to; -inf for none (2^0)
  std::vector<Vec> total_;   // a row's sum of weights, lane by lane
};

}  // namespace ssa
