// Small matrix products in registers: C (+)= A·B with B in rows of whole vectors.
#pragma once

#include "vector.h"

namespace ssa {

// A[i][k] = data[i * row + k * column]: either stride may be 1, so A can be read transposed.
struct Left {
  const float* data;
  int64_t row, column;
};

template <int kRows, int kColumns, bool kAccumulate>
inline void tile(Left a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Vec acc[kRows][kColumns];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) acc[i][j] = kAccumulate ? load(c + i * ldc + j * kVector) : Vec{};
  const float* left = a.data;
  for (int64_t k = 0; k < depth; ++k, left += a.column, b += ldb) {
    Vec right[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) right[j] = load(b + j * kVector);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const Vec x = splat(left[i * a.row]);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) acc[i][j] += x * right[j];
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) store(c + i * ldc + j * kVector, acc[i][j]);
}

// All rows of a strip that is kColumns vectors wide: as many at once as registers allow, then half as many.
template <int kRows, int kColumns, bool kAccumulate>
inline void strip(Left a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t depth) {
  while (rows >= kRows) {
    tile<kRows, kColumns, kAccumulate>(a, b, ldb, c, ldc, depth);
    a.data += kRows * a.row;
    c += kRows * ldc;
    rows -= kRows;
  }
  if constexpr (kRows > 1) {
    if (rows > 0) strip<kRows / 2, kColumns, kAccumulate>(a, b, ldb, c, ldc, rows, depth);
  }
}

constexpr int rows_for(int columns) {
  const int rows = kAccumulators / columns;
  return rows > 12 ? 12 : rows;
}

// Vectors in the widest strip.
constexpr int kStrip = kVector == 8 ? 2 : 4;

template <bool kAccumulate>
inline void columns(Left a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t width,
                    int64_t depth) {
  switch (width / kVector) {
    case 1: return strip<rows_for(1), 1, kAccumulate>(a, b, ldb, c, ldc, rows, depth);
    case 2: return strip<rows_for(2), 2, kAccumulate>(a, b, ldb, c, ldc, rows, depth);
    case 3: return strip<rows_for(kStrip < 3 ? 1 : 3), kStrip < 3 ? 1 : 3, kAccumulate>(a, b, ldb, c, ldc, rows, depth);
    default: return strip<rows_for(kStrip), kStrip, kAccumulate>(a, b, ldb, c, ldc, rows, depth);
  }
}

// C[rows][width] (+)= A[rows][depth] · B[depth][width]; width is a multiple of kVector. Strips of B that are
// kStrip vectors wide follow each other at a distance of strip_step floats.
template <bool kAccumulate>
inline void gemm(Left a, const float* b, int64_t ldb, int64_t strip_step, float* c, int64_t ldc, int64_t rows,
                 int64_t width, int64_t depth) {
  constexpr int64_t wide = kStrip * kVector;
  for (int64_t j = 0; j < width; j += wide, b += strip_step, c += wide)
    columns<kAccumulate>(a, b, ldb, c, ldc, rows, width - j < wide ? width - j : wide, depth);
}

}  // namespace ssa
