// A register of floats, and the base-2 logarithm and exponential on it.
//
// GCC's and Clang's vector extensions are explicit SIMD on every machine that they compile for:
// 16 floats with AVX-512, 8 with AVX2, 4 elsewhere (SSE, NEON).
#pragma once

#include <cstdint>
#include <cstring>

namespace ssa {

#if defined(__AVX512F__)
constexpr int kVector = 16;
constexpr int kAccumulators = 24;  // registers that a matrix product may fill with sums
#elif defined(__AVX2__)
constexpr int kVector = 8;
constexpr int kAccumulators = 12;
#else
constexpr int kVector = 4;
constexpr int kAccumulators = 16;
#endif

typedef float Vec __attribute__((vector_size(kVector * sizeof(float))));
typedef int32_t IVec __attribute__((vector_size(kVector * sizeof(int32_t))));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec splat(float x) { return Vec{} + x; }
inline Vec abs(Vec v) { return (Vec)((IVec)v & 0x7fffffff); }
// |magnitude| must have no sign bit.
inline Vec with_sign_of(Vec magnitude, Vec sign) {
  return (Vec)((IVec)magnitude | ((IVec)sign & (int32_t)0x80000000));
}
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < kVector; ++i) total += v[i];
  return total;
}
inline float max(Vec v) {
  float top = v[0];
  for (int i = 1; i < kVector; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

// log2(v) for v >= 1, infinity included (gives 128). The mantissa m is brought to [sqrt(1/2), sqrt(2));
// log2(m) / (m - 1) is a minimax polynomial with relative error 4e-9.
inline Vec log2(Vec v) {
  const IVec bits = (IVec)v;
  const IVec exponent = (bits - 0x3f3504f3) >> 23;
  const Vec f = (Vec)(bits - (exponent << 23)) - 1.0f;
  Vec p = splat(-0.10994941741228104f);
  p = p * f + 0.1861748844385147f;
  p = p * f - 0.1910627782344818f;
  p = p * f + 0.20460063219070435f;
  p = p * f - 0.23961740732192993f;
  p = p * f + 0.2885673940181732f;
  p = p * f - 0.3606966435909271f;
  p = p * f + 0.4808982312679291f;
  p = p * f - 0.7213473320007324f;
  p = p * f + 1.4426950216293335f;
  return p * f + __builtin_convertvector(exponent, Vec);
}

// 2^v for v <= 127; 0 below 2^-126. The fraction in [-1/2, 1/2] goes through a minimax polynomial with
// relative error 2e-9, the integer part into the exponent bits.
inline Vec exp2(Vec v) {
  v = max(v, splat(-127.0f));
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec shifted = v + magic;
  const Vec f = v - (shifted - magic);
  Vec p = splat(0.00015345810970757157f);
  p = p * f + 0.0013399930903688073f;
  p = p * f + 0.009618489071726799f;
  p = p * f + 0.05550328642129898f;
  p = p * f + 0.24022646248340607f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  // The bits of magic end in 22 zeros after shifting: only the integer is left, plus the bias.
  return p * (Vec)(((IVec)shifted + 127) << 23);
}

}  // namespace ssa
