// A register of floats, and the base-2 logarithm and exponential on it.
//
// GCC's and Clang's vector extensions are explicit SIMD on every machine that they compile for:
// 16 floats with AVX-512, 8 with AVX2, 4 elsewhere (SSE, NEON).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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
inline Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, -0 included: no arithmetic is left
inline Vec abs(Vec v) { return (Vec)((IVec)v & 0x7fffffff); }
inline Vec times_sign_of(Vec v, Vec sign) { return (Vec)((IVec)v ^ ((IVec)sign & (int32_t)0x80000000)); }
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

// log2 and exp2 below are good to 2e-7 relative in log2(1 + u) for u that is exact in 1 + u, and in 2^v for
// |v| < 8; beyond, the rounding of v itself dominates. Their polynomials are minimax, with errors below 4e-9.
#if defined(__AVX512F__)

// log2(v) for v >= 1. The upper four bits of the mantissa m in [1, 2) choose 1/c and log2(c), c amid each sixteenth,
// but 1 in the first and 2 in the last: so log2 stays exact relative to itself around 1. f = m/c - 1 is in
// [-1/32, 1/16].
inline Vec log2(Vec v) {
  struct Tables {
    alignas(64) float inverse[16], log[16];
    Tables() {
      for (int i = 0; i < 16; ++i) {
        inverse[i] = i == 0 ? 1.0f : i == 15 ? 0.5f : float(1 / (1 + (i + 0.5) / 16));
        log[i] = float(-std::log2(double(inverse[i])));
      }
    }
  };
  static const Tables tables;
  const __m512 m = _mm512_getmant_ps((__m512)v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  const __m512i sixteenth = _mm512_srli_epi32((__m512i)m, 19);
  const Vec inverse = (Vec)_mm512_permutexvar_ps(sixteenth, _mm512_load_ps(tables.inverse));
  const Vec log = (Vec)_mm512_permutexvar_ps(sixteenth, _mm512_load_ps(tables.log));
  const Vec f = (Vec)m * inverse - 1.0f;
  Vec p = f * 0.2710866928100586f - 0.3607654869556427f;
  p = p * f + 0.4809187352657318f;
  p = p * f - 0.7213475704193115f;
  p = p * f + 1.4426950216293335f;
  return p * f + ((Vec)_mm512_getexp_ps((__m512)v) + log);
}

// 2^v; 0 for v = -inf.
inline Vec exp2(Vec v) {
  const Vec f = (Vec)_mm512_reduce_ps((__m512)v, 0);  // v less the nearest integer
  Vec p = f * 0.00015345810970757157f + 0.0013399930903688073f;
  p = p * f + 0.009618489071726799f;
  p = p * f + 0.05550328642129898f;
  p = p * f + 0.24022646248340607f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)(v - f));
}

#else

// log2(v) for v >= 1. The mantissa is brought to [sqrt(1/2), sqrt(2)).
inline Vec log2(Vec v) {
  const IVec bits = (IVec)v;
  const IVec exponent = (bits - 0x3f3504f3) >> 23;
  const Vec f = (Vec)(bits - (exponent << 23)) - 1.0f;
  Vec p = f * -0.10994941741228104f + 0.1861748844385147f;
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

// 2^v for v <= 127; 0 below -126.5.
inline Vec exp2(Vec v) {
  v = max(v, splat(-127.0f));
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const Vec shifted = v + magic;
  const Vec f = v - (shifted - magic);
  Vec p = f * 0.00015345810970757157f + 0.0013399930903688073f;
  p = p * f + 0.009618489071726799f;
  p = p * f + 0.05550328642129898f;
  p = p * f + 0.24022646248340607f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  // magic's own bits are shifted out: the integer is left, plus the bias of the exponent.
  return p * (Vec)(((IVec)shifted + 127) << 23);
}

#endif

}  // namespace ssa
