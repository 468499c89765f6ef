// What Python hands over (library.py mirrors Problem), and access to its tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>

#include "vector.h"

namespace ssa {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum MaskKind : int64_t { kNoMask = 0, kBoolean = 1, kAdditive = 2 };

// A 4-D tensor; strides count elements, and are 0 where a mask is broadcast.
struct Tensor4 {
  void* data;
  int64_t stride[4];
};

// Shapes: query, grad_query (batch, heads, q_len, dim); key, grad_key (batch, groups, k_len, dim);
// value, grad_value (batch, groups, k_len, value_dim); output, grad_output (batch, heads, q_len, value_dim).
struct Problem {
  int64_t batch, heads, groups, q_len, k_len, dim, value_dim;
  int64_t dtype;                // of all tensors but the mask
  int64_t causal, window;       // window: keys that a query sees, itself included; 0 is no limit
  int64_t splits;               // tasks that share the queries of one key/value head
  int64_t seed;                 // of dropout
  double scale, dropout;
  Tensor4 query, key, value, mask, output, grad_output, grad_query, grad_key, grad_value;
  int64_t mask_kind;            // a boolean mask is uint8, an additive one float32 with -inf where it masks
  const float *b, *n;           // (heads)
  const int32_t* documents;     // (batch, k_len), or null: each position's document, which its query sees alone
  float* normaliser;            // (batch, heads, q_len, 2): a normalised weight is 2^(g - [0]) * [1]
  double *grad_b, *grad_n;      // (batch, splits, heads): summands
};

inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Uninitialised, cache-line aligned floats.
class Buffer {
 public:
  explicit Buffer(int64_t size) : data_(static_cast<float*>(std::aligned_alloc(64, round_up(size, 16) * 4 + 64))) {
    if (!data_) std::abort();
  }
  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  BFloat16() = default;
  explicit BFloat16(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    bits = f != f ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // to nearest even
  }
};

// In integer arithmetic: compilers know _Float16 on x86 only since GCC 12.
struct Float16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits & 0x7fff) << 13;
    float f;
    std::memcpy(&f, &wide, 4);
    f *= 0x1p112f;
    std::memcpy(&wide, &f, 4);
    if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;
    wide |= uint32_t(bits & 0x8000) << 16;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  Float16() = default;
  explicit Float16(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    const uint16_t sign = (wide >> 16) & 0x8000;
    wide &= 0x7fffffff;
    if (wide >= 0x47800000) {  // 65536 and above
      bits = wide > 0x7f800000 ? 0x7e00 : 0x7c00;
    } else if (wide < 0x38800000) {  // below 2^-14: adding 1/2 leaves the subnormal in the low bits, rounded
      std::memcpy(&f, &wide, 4);
      f += 0.5f;
      std::memcpy(&wide, &f, 4);
      bits = wide - 0x3f000000;
    } else {
      bits = (wide + 0xc8000fff + ((wide >> 13) & 1)) >> 13;  // to nearest even
    }
    bits |= sign;
  }
};

template <class Function>
inline void with_type(int64_t dtype, Function function) {
  switch (dtype) {
    case kBFloat16: return function(BFloat16{});
    case kFloat16: return function(Float16{});
    default: return function(float{});
  }
}

// Rows [first, first + rows) of one head, as floats times factor; columns are padded with zeros to ld.
inline void read_rows(const Tensor4& t, int64_t dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                      int64_t columns, float factor, float* to, int64_t ld) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(t.data) + batch * t.stride[0] + head * t.stride[1] + first * t.stride[2];
    const int64_t step = t.stride[3];
    for (int64_t i = 0; i < rows; ++i, from += t.stride[2], to += ld) {
      int64_t j = 0;
      if constexpr (std::is_same_v<T, float>)
        if (step == 1)
          for (; j + kVector <= columns; j += kVector) store(to + j, load(from + j) * factor);
      if (step == 1)
        for (; j < columns; ++j) to[j] = float(from[j]) * factor;
      else
        for (; j < columns; ++j) to[j] = float(from[j * step]) * factor;
      for (; j < ld; ++j) to[j] = 0;
    }
  });
}

// The inverse of read_rows; the target's last stride is 1.
inline void write_rows(const Tensor4& t, int64_t dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                       int64_t columns, float factor, const float* from, int64_t ld) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    T* to = static_cast<T*>(t.data) + batch * t.stride[0] + head * t.stride[1] + first * t.stride[2];
    for (int64_t i = 0; i < rows; ++i, from += ld, to += t.stride[2]) {
      int64_t j = 0;
      if constexpr (std::is_same_v<T, float>)
        for (; j + kVector <= columns; j += kVector) store(to + j, load(from + j) * factor);
      for (; j < columns; ++j) to[j] = T(from[j] * factor);
    }
  });
}

}  // namespace ssa
