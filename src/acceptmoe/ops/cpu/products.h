// Products of a few rows of activations with a block of weights: the inner loops of every op here.
//
// out[r][n] = sum over k of activations[r][k] * weights(n, k), in fp32, for up to kMaxRows rows.
// Weights lie either [N, K] (a dot product along each row of weights) or transposed, [K, N] (each
// row of weights is multiplied by one activation and added along the outputs).
//
// Every output is summed in one order, which depends on K alone: not on the other rows, not on the
// block, not on the threads. A row's result is therefore the same bits alone and among many.
//
// Registers: kMaxRows x 2 accumulators, two weights and an activation fit the 16 of AVX2.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace acceptmoe {

constexpr int kMaxRows = 6;
constexpr int kCacheLine = 64;
constexpr int64_t kReduction = 1024;  // of fp32, times kMaxRows: what the first cache holds

// Elements in one step of a dot product: whole cache lines, so that each is prefetched once.
template <class W>
constexpr int kStep = std::max<int>(kCacheLine / sizeof(W), kPair);

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Where `index` of a row of activations lies in the order in which weights [N, K] are loaded.
template <class W>
inline int64_t packed_index(int64_t index) {
  return index / kPair * kPair + Format<W>::position(int(index % kPair));
}

// The weights of one product: `num_outputs` x `depth`, the first at `data`, rows `stride` apart.
template <class W>
struct Weights {
  const W* data;
  int64_t stride;
  int64_t depth;
  bool is_transposed;

  // The same matrix from output `first` on.
  Weights from(int64_t first) const {
    return {data + (is_transposed ? first : first * stride), stride, depth, is_transposed};
  }
};

// One step of N dot products for each of R rows.
template <class W, int R, int N>
inline __attribute__((always_inline)) void add_step(const float* const* activations, int64_t k,
                                                    const W* const* weights,
                                                    Floats (&sums)[R][N]) {
#pragma GCC unroll 4
  for (int step = 0; step < kStep<W>; step += kPair) {
    Floats first[N], second[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) Format<W>::load(weights[n] + step, first[n], second[n]);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats activation = load<Floats>(activations[r] + k + step);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] += activation * first[n];
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats activation = load<Floats>(activations[r] + k + step + kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] += activation * second[n];
    }
  }
}

// Adds (or, for the first part of the reduction, assigns) the products of k in [begin, end).
// `ahead` is what comes next in memory order; its rows are prefetched in the same rhythm, because
// the hardware's own prefetchers stop at the end of every 4 KB page.
template <class W, int R, int N>
void dot_tile(const float* const* activations, const W* weights, int64_t stride, int64_t begin,
              int64_t end, const W* ahead, float* out, int64_t out_stride) {
  Floats sums[R][N] = {};
  int64_t k = begin;
  for (; k + kStep<W> <= end; k += kStep<W>) {
    const W* rows[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      rows[n] = weights + n * stride + k;
      for (int line = 0; line < kStep<W>; line += kCacheLine / int(sizeof(W)))
        __builtin_prefetch(ahead + n * stride + (k - begin) + line);
    }
    add_step<W, R, N>(activations, k, rows, sums);
  }
  if (k < end) {  // behind the last weight of a row there may be anything, NaN or no memory at all
    W rest[N][kStep<W>] = {};
    const W* rows[N];
    for (int n = 0; n < N; ++n) {
      std::memcpy(rest[n], weights + n * stride + k, (end - k) * sizeof(W));
      rows[n] = rest[n];
    }
    add_step<W, R, N>(activations, k, rows, sums);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float* result = out + r * out_stride + n;
      *result = begin == 0 ? sum_lanes(sums[r][n]) : *result + sum_lanes(sums[r][n]);
    }
}

// Few rows wait for memory: whole rows of weights, four at a time, in the order they lie in. Many
// rows wait for arithmetic: their activations stay in the first cache, a part of K at a time.
template <class W, int R>
void dot_rows(const float* const* activations, Weights<W> weights, int64_t num_outputs,
              const W* following, float* out, int64_t out_stride) {
  constexpr int N = R <= 3 ? 4 : 2;
  const int64_t depth = weights.depth, stride = weights.stride;
  const int64_t tiled = num_outputs / N * N;
  const auto part = [&](int64_t n, int64_t begin, const W* ahead) {
    const int64_t end = std::min(begin + kReduction, depth);
    const W* rows = weights.data + n * stride;
    if (n < tiled)
      dot_tile<W, R, N>(activations, rows, stride, begin, end, ahead, out + n, out_stride);
    else
      dot_tile<W, R, 1>(activations, rows, stride, begin, end, ahead, out + n, out_stride);
  };
  const auto step = [&](int64_t n) { return n < tiled ? N : 1; };
  if (R <= 3) {
    for (int64_t n = 0; n < num_outputs; n += step(n))
      for (int64_t begin = 0; begin < depth; begin += kReduction) {
        const bool is_last = begin + kReduction >= depth;
        const int64_t next = n + step(n);
        const W* ahead = !is_last             ? weights.data + n * stride + begin + kReduction
                         : next < num_outputs ? weights.data + next * stride
                                              : following;
        part(n, begin, ahead);
      }
  } else {
    for (int64_t begin = 0; begin < depth; begin += kReduction)
      for (int64_t n = 0; n < num_outputs; n += step(n)) {
        const int64_t next = n + step(n);
        const W* ahead = next < num_outputs           ? weights.data + next * stride + begin
                         : begin + kReduction < depth ? weights.data + begin + kReduction
                                                      : following;
        part(n, begin, ahead);
      }
  }
}

// Columns [c, c + C * kPair) of weights [K, N] for k in [begin, end), added to the sums in `out`,
// which are in the order of loading.
template <class W, int R, int C>
void outer_tile(const float* const* activations, const W* weights, int64_t stride, int64_t begin,
                int64_t end, int64_t depth, float* out, int64_t out_stride) {
  Floats sums[R][C][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int half = 0; half < 2; ++half)
        sums[r][c][half] =
            begin == 0 ? Floats{}
                       : load<Floats>(out + r * out_stride + c * kPair + half * kLanes);
  const int64_t distance = (end - begin) * stride;
  for (int64_t k = begin; k < end; ++k) {
    const W* row = weights + k * stride;
    const W* ahead = k + (end - begin) < depth ? row + distance : row;
    Floats first[C], second[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      __builtin_prefetch(ahead + c * kPair);
      Format<W>::load(row + c * kPair, first[c], second[c]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats activation = splat(activations[r][k]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        sums[r][c][0] += activation * first[c];
        sums[r][c][1] += activation * second[c];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int half = 0; half < 2; ++half)
        store(out + r * out_stride + c * kPair + half * kLanes, sums[r][c][half]);
}

// The last columns, fewer than kPair, from a copy that ends where the weights do.
template <class W, int R>
void outer_rest(const float* const* activations, const W* weights, int64_t stride, int64_t begin,
                int64_t end, int64_t count, float* out, int64_t out_stride) {
  for (int64_t k = begin; k < end; ++k) {
    W rest[kPair] = {};
    std::memcpy(rest, weights + k * stride, count * sizeof(W));
    Floats first, second;
    Format<W>::load(rest, first, second);
    for (int r = 0; r < R; ++r) {
      float* result = out + r * out_stride;
      const Floats activation = splat(activations[r][k]);
      Floats low = k == 0 ? Floats{} : load<Floats>(result);
      Floats high = k == 0 ? Floats{} : load<Floats>(result + kLanes);
      low += activation * first;
      high += activation * second;
      store(result, low);
      store(result + kLanes, high);
    }
  }
}

template <class W, int R>
void outer_rows(const float* const* activations, Weights<W> weights, int64_t num_outputs,
                float* out, int64_t out_stride) {
  constexpr int C = R <= 2 ? 2 : 1;
  constexpr int64_t kRows = 64;  // of weights at a time: a few cache lines of each
  const int64_t depth = weights.depth, stride = weights.stride;
  const int64_t whole = num_outputs / kPair * kPair;
  for (int64_t begin = 0; begin < depth; begin += kRows) {
    const int64_t end = std::min(begin + kRows, depth);
    int64_t c = 0;
    for (; c + C * kPair <= whole; c += C * kPair)
      outer_tile<W, R, C>(activations, weights.data + c, stride, begin, end, depth, out + c,
                          out_stride);
    for (; c < whole; c += kPair)
      outer_tile<W, R, 1>(activations, weights.data + c, stride, begin, end, depth, out + c,
                          out_stride);
    if (c < num_outputs)
      outer_rest<W, R>(activations, weights.data + c, stride, begin, end, num_outputs - c, out + c,
                       out_stride);
  }
  for (int r = 0; r < R; ++r)  // back from the order of loading
    for (int64_t c = 0; c < num_outputs; c += kPair) {
      float* pair = out + r * out_stride + c;
      float ordered[kPair];
      for (int i = 0; i < kPair; ++i) ordered[i] = pair[Format<W>::position(i)];
      std::memcpy(pair, ordered, sizeof(ordered));
    }
}

template <class W, int R>
void multiply_rows(const float* const* activations, Weights<W> weights, int64_t num_outputs,
                   const W* following, float* out, int64_t out_stride) {
  if (weights.is_transposed)
    outer_rows<W, R>(activations, weights, num_outputs, out, out_stride);
  else
    dot_rows<W, R>(activations, weights, num_outputs, following, out, out_stride);
}

// out [num_rows, num_outputs] of rows `out_stride` apart, which has room for multiples of kPair.
// Activations are packed for weights [N, K] and in plain order for weights [K, N]; either way they
// are zero up to a multiple of kStep. `following` is what will be read next, for the prefetch.
template <class W>
void multiply(int num_rows, const float* const* activations, Weights<W> weights,
              int64_t num_outputs, const W* following, float* out, int64_t out_stride) {
  switch (num_rows) {
    case 1: return multiply_rows<W, 1>(activations, weights, num_outputs, following, out, out_stride);
    case 2: return multiply_rows<W, 2>(activations, weights, num_outputs, following, out, out_stride);
    case 3: return multiply_rows<W, 3>(activations, weights, num_outputs, following, out, out_stride);
    case 4: return multiply_rows<W, 4>(activations, weights, num_outputs, following, out, out_stride);
    case 5: return multiply_rows<W, 5>(activations, weights, num_outputs, following, out, out_stride);
    case 6: return multiply_rows<W, 6>(activations, weights, num_outputs, following, out, out_stride);
  }
}

// Calls `group(first, count)` for rows 0 .. num_rows - 1 in as few groups as kMaxRows allows, of
// nearly equal size: 7 rows are 4 + 3.
template <class Group>
void for_row_groups(int64_t num_rows, Group group) {
  const int64_t num_groups = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = num_rows * g / num_groups, last = num_rows * (g + 1) / num_groups;
    group(first, int(last - first));
  }
}

}  // namespace acceptmoe
