// How queries and keys are cut into blocks: packed keys, visible ranges, masks, dropout.
#pragma once

#include "gemm.h"
#include "problem.h"

namespace ssa {

constexpr int64_t kStripWidth = kStrip * kVector;
// Rows handled together where each row sees a different number of keys: a multiple of every tile's rows.
constexpr int64_t kRowGroup = 12;

// Keys or values of one head, read once, block by block when first needed.
// Transposed, as the right side of query·keyᵀ: strips of kStripWidth keys, each [dim][kStripWidth].
// Plain, as the right side of weights·value: [key][ld].
class Packed {
 public:
  Packed(int64_t length, int64_t dim, int64_t block, bool transposed, bool plain)
      : dim_(dim), block_(block), ld_(round_up(dim, kVector)),
        transposed_(transposed ? round_up(length, block) * dim : 0), plain_(plain ? round_up(length, block) * ld_ : 0),
        rows_(transposed && !plain ? block * ld_ : 0), has_transposed_(transposed), has_plain_(plain) {}

  // Returns the rows as they were read, [rows][ld].
  const float* read(const Tensor4& t, int64_t dtype, int64_t batch, int64_t head, int64_t first, int64_t rows) {
    float* plain = has_plain_ ? plain_.data() + first * ld_ : rows_.data();
    read_rows(t, dtype, batch, head, first, rows, dim_, 1.0f, plain, ld_);
    if (!has_transposed_) return plain;
    // Whole vectors of keys are read: pad the last one with zeros.
    const int64_t padded = round_up(rows, kVector);
    std::memset(plain + rows * ld_, 0, (padded - rows) * ld_ * sizeof(float));
    for (int64_t strip = 0; strip < padded; strip += kStripWidth) {
      float* to = transposed_.data() + (first + strip) * dim_;
      const float* from = plain + strip * ld_;
      const int64_t width = std::min(kStripWidth, padded - strip);
      for (int64_t j = 0; j < width; j += kVector)
        for (int64_t d = 0; d < dim_; ++d)
          for (int64_t lane = 0; lane < kVector; ++lane)
            to[d * kStripWidth + j + lane] = from[(j + lane) * ld_ + d];
    }
    return plain;
  }

  const float* transposed(int64_t first) const { return transposed_.data() + first * dim_; }
  const float* plain(int64_t first) const { return plain_.data() + first * ld_; }
  int64_t ld() const { return ld_; }
  int64_t dim() const { return dim_; }

 private:
  int64_t dim_, block_, ld_;
  Buffer transposed_, plain_, rows_;
  bool has_transposed_, has_plain_;
};

// scores[rows][width] = left · packedᵀ for the keys from `first` on.
inline void times_transposed(Left left, const Packed& packed, int64_t first, float* scores, int64_t ld, int64_t rows,
                             int64_t width) {
  gemm<false>(left, packed.transposed(first), kStripWidth, packed.dim() * kStripWidth, scores, ld, rows, width,
              packed.dim());
}

// One key/value head, with all query heads that share it, or a share (`split`) of their query blocks.
struct Task {
  int64_t batch, group, split;
};

inline Task task_of(const Problem& p, int64_t index) {
  return {index / p.splits / p.groups, index / p.splits % p.groups, index % p.splits};
}

struct Blocks {
  int64_t queries, keys;
};

// Blocks of scores stay in the second-level cache, the right sides of the products in the first.
inline Blocks blocks_of(const Problem& p) {
  const int64_t widest = std::max(p.dim, p.value_dim);
  const int64_t keys = widest <= 32 ? 256 : widest <= 96 ? 128 : 64;
  return {p.q_len <= 256 ? 48 : 96, std::min(keys, round_up(std::max<int64_t>(p.k_len, 1), kStripWidth))};
}

// Which keys a query sees by causality and window: [low, high).
struct Visible {
  const Problem& p;
  int64_t high(int64_t query) const {
    return p.causal ? std::clamp<int64_t>(query + p.k_len - p.q_len + 1, 0, p.k_len) : p.k_len;
  }
  int64_t low(int64_t query) const {
    return p.window ? std::clamp<int64_t>(query + p.k_len - p.q_len + 1 - p.window, 0, p.k_len) : 0;
  }
};

enum class Mask { kNothingSeen, kAllSeen, kMixed };

// The explicit mask of a block of queries and keys, and their documents, as summands of the scores, -inf where masked.
class MaskBlock {
 public:
  MaskBlock(int64_t rows, int64_t width) : values_(rows * width), width_(width) {}

  Mask read(const Problem& p, int64_t batch, int64_t head, int64_t query, int64_t rows, int64_t key, int64_t columns) {
    if (!p.mask_kind && !p.documents) return Mask::kAllSeen;
    const Tensor4& m = p.mask;
    step_ = m.stride[2] || p.documents ? width_ : 0;
    const int64_t offset = batch * m.stride[0] + head * m.stride[1] + query * m.stride[2] + key * m.stride[3];
    bool any_seen = false, any_changed = false;
    for (int64_t i = 0; i < (step_ ? rows : 1); ++i) {
      float* to = values_.data() + i * step_;
      const int64_t from = offset + i * m.stride[2];
      if (p.mask_kind == kBoolean) {
        const uint8_t* seen = static_cast<const uint8_t*>(m.data) + from;
        for (int64_t j = 0; j < columns; ++j) to[j] = seen[j * m.stride[3]] ? 0.0f : -kInfinity;
      } else if (p.mask_kind == kAdditive) {
        const float* bias = static_cast<const float*>(m.data) + from;
        for (int64_t j = 0; j < columns; ++j) to[j] = bias[j * m.stride[3]];
      } else {
        std::fill_n(to, columns, 0.0f);
      }
      if (p.documents) {
        const int32_t *ids = p.documents + batch * p.k_len, own = ids[query + i];
        for (int64_t j = 0; j < columns; ++j) to[j] = ids[key + j] == own ? to[j] : -kInfinity;
      }
      for (int64_t j = 0; j < columns; ++j) {
        any_seen |= to[j] != -kInfinity;
        any_changed |= to[j] != 0;
      }
      for (int64_t j = columns; j < width_; ++j) to[j] = -kInfinity;
    }
    return !any_seen ? Mask::kNothingSeen : any_changed ? Mask::kMixed : Mask::kAllSeen;
  }

  const float* row(int64_t i) const { return values_.data() + i * step_; }

 private:
  Buffer values_;
  int64_t width_, step_ = 0;
};

// 0 in the lanes [from, to), -inf in the others.
inline Vec lanes(int64_t from, int64_t to) {
  struct Table {
    float values[3 * kVector];
    Table() {
      for (int i = 0; i < 3 * kVector; ++i) values[i] = i / kVector == 1 ? 0.0f : -kInfinity;
    }
  };
  static const Table table;
  return load(table.values + kVector - std::max<int64_t>(from, 0)) +
         load(table.values + 2 * kVector - std::min<int64_t>(to, kVector));
}

// Call body(column, bias, masked) for the vectors that hold columns [low, high); `masked` (a constant) tells
// whether the bias is to be heeded: it holds the explicit mask's values, and -inf outside of [low, high).
template <class Body>
inline void for_vectors(int64_t low, int64_t high, const float* mask, Body body) {
  for (int64_t j = low / kVector * kVector; j < high; j += kVector) {
    const bool inside = j >= low && j + kVector <= high;
    if (inside && !mask)
      body(j, Vec{}, std::false_type{});
    else
      body(j, (inside ? Vec{} : lanes(low - j, high - j)) + (mask ? load(mask + j) : Vec{}), std::true_type{});
  }
}

inline void clear_outside(float* row, int64_t low, int64_t high, int64_t width) {
  const int64_t begin = low < high ? low / kVector * kVector : width, end = round_up(high, kVector);
  std::memset(row, 0, begin * sizeof(float));
  if (begin < width && end < width) std::memset(row + end, 0, (width - end) * sizeof(float));
}

// Factors of the weights under dropout, 0 or 1/(1-p), a function of (seed, batch, head, query, key) alone, so that
// the backward pass meets the same ones.
inline void dropout_row(const Problem& p, int64_t batch, int64_t head, int64_t query, int64_t key, int64_t columns,
                        float* factors) {
  uint64_t z = uint64_t(p.seed) + 0x9e3779b97f4a7c15u * (uint64_t((batch * p.heads + head) * p.q_len + query) + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;  // SplitMix64 for the row,
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  const uint32_t threshold = uint32_t(p.dropout * 16777216.0);
  const float kept = float(1.0 / (1.0 - p.dropout));
  for (int64_t j = 0; j < columns; ++j) {
    uint32_t h = uint32_t(z >> 32) + uint32_t(key + j) * 0x9e3779b9u;  // MurmurHash3's finaliser for the key
    h = (h ^ (h >> 16)) * 0x85ebca6bu + uint32_t(z);
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    h ^= h >> 16;
    factors[j] = (h >> 8) < threshold ? 0.0f : kept;
  }
}

}  // namespace ssa
