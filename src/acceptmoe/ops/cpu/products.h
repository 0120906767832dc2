// Products of a few rows of activations with a block of weights: the inner loops of every op here.
//
// out[r][n] = sum over k of activations[r][k] * weights(n, k), in fp32, for up to kMaxRows rows.
// Weights lie either [N, K] (a dot product along each row of weights) or transposed, [K, N] (each
// row of weights is multiplied by one activation and added along the outputs).
//
// Every output is summed in one order, which depends on K alone: not on the other rows, not on the
// block, not on the threads. A row's result is therefore the same bits alone and among many.
//
// Registers: kMaxRows x 2 accumulators, two weights and an activation fit the 16 of AVX2, kMaxRows x
// 4 and four weights the 32 of AVX-512.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "formats.h"

namespace acceptmoe {

constexpr int kMaxRows = 6;
constexpr int kCacheLine = 64;
constexpr int64_t kBlockBytes = 1 << 17;  // of weights: two blocks leave room in the second cache
constexpr int64_t kMaxOutputs = 128;  // in one call of `multiply` with weights [N, K]

template <class W>
using Packed = typename Format<W>::Packed;

// Whether activations and weights are both multiplied as 16 bits: see formats.h.
template <class W>
constexpr bool kIsPaired = std::is_same_v<W, PairedBFloat16>;

// Elements in one step of a dot product: whole cache lines, so that each is prefetched once.
template <class W>
constexpr int kStep = std::max<int>(kCacheLine / sizeof(W), kPair);

// Elements of a reduction at a time: 2 KB of fp32 for each of kMaxRows rows, less than half the first
// cache, or 4 KB of bfloat16.
template <class W>
constexpr int64_t kReduction = kIsPaired<W> ? 2048 : 512;

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Elements from one row of activations to the next. Rows a power of two apart would all want the same
// few sets of the first cache; these are spread over them.
template <class W>
inline int64_t row_stride(int64_t depth) {
  const int64_t line = kCacheLine / sizeof(Packed<W>);
  const int64_t padded = round_up(round_up(depth, kStep<W>), line);
  if (depth < 512) return padded;
  return padded + (21 - padded / line % 64 + 64) % 64 * line;
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

// The most outputs of weights [N, K] that one task takes.
template <class W>
inline int64_t largest_block(int64_t depth) {
  return std::clamp<int64_t>(kBlockBytes / (depth * int64_t(sizeof(W))), kPair, 64);
}

// What is prefetched while a block of weights is multiplied: a share of the block that comes next, so
// that memory is read all the while, evenly, whatever the groups of rows that take turns with the
// block. The hardware's own prefetchers stop at the end of every 4 KB page.
struct Prefetch {
  const char* next;  // advances
  int64_t pace;      // bytes for each cache line of weights that is multiplied

  // Share `share` of `num_shares` of `block`, which is as large as the one before it; null: of none.
  template <class W>
  static Prefetch of(Weights<W> block, int64_t num_outputs, int64_t share, int64_t num_shares) {
    const int64_t num_bytes = num_outputs * block.stride * int64_t(sizeof(W));
    const char* data = reinterpret_cast<const char*>(block.data);
    if (data == nullptr) return {};
    return {data + num_bytes * share / num_shares, (kCacheLine + num_shares - 1) / num_shares};
  }

  // Into the second cache: the first one is full of activations.
  void advance() {
    __builtin_prefetch(next, 0, 2);
    next += pace;
  }
};

// One vector of each of N rows of weights times one of each of R rows of activations.
template <class W, int R, int N, int Part>
inline __attribute__((always_inline)) void add_part(const Packed<W>* const* activations,
                                                    int64_t k, const W* const* weights, int step,
                                                    Floats (&sums)[R][N]) {
  typename Format<W>::Vector loaded[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    loaded[n] = Format<W>::template load<Part>(weights[n] + step);
    keep_in_register(loaded[n]);
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    auto activation = Format<W>::template load_activations<Part>(activations[r] + k);
    if (N > 1) keep_in_register(activation);  // compilers would load it N times
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Format<W>::add_product(sums[r][n], loaded[n], activation);
      keep_in_register(sums[r][n]);  // or parts are mixed, registers run out, and a sum spills
    }
  }
}

// One step of N dot products for each of R rows.
template <class W, int R, int N>
inline __attribute__((always_inline)) void add_step(const Packed<W>* const* activations,
                                                    int64_t k, const W* const* weights,
                                                    Floats (&sums)[R][N]) {
#pragma GCC unroll 4
  for (int step = 0; step < kStep<W>; step += kPair) {
    add_part<W, R, N, 0>(activations, k + step, weights, step, sums);
    if constexpr (Format<W>::kParts == 2)
      add_part<W, R, N, 1>(activations, k + step, weights, step, sums);
  }
}

// The sums over the lanes of R x N vectors.
template <int R, int N>
inline __attribute__((always_inline)) void sum_all_lanes(const Floats (&sums)[R][N], float* out,
                                                         int64_t out_stride) {
  constexpr int kCount = R * N, kWhole = kCount / 4 * 4;
  float totals[kCount];
#pragma GCC unroll 6
  for (int i = 0; i < kWhole; i += 4)
    sum_lanes_of_four(sums[i / N][i % N], sums[(i + 1) / N][(i + 1) % N],
                      sums[(i + 2) / N][(i + 2) % N], sums[(i + 3) / N][(i + 3) % N], totals + i);
#pragma GCC unroll 4
  for (int i = kWhole; i < kCount; ++i) totals[i] = sum_lanes(sums[i / N][i % N]);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) std::memcpy(out + r * out_stride, totals + r * N, N * sizeof(float));
}

// N dot products for each of R rows, over k in [begin, end) of `depth`. Parts of a reduction leave
// their sums, lane by lane, in `partial` [R, N]; the last one adds up the lanes. Not inlined: among
// other code compilers keep the sums in memory.
template <class W, int R, int N>
__attribute__((noinline)) void dot_tile(const Packed<W>* const* activations, const W* weights,
                                        int64_t stride, int64_t begin, int64_t end, int64_t depth,
                                        Prefetch& prefetch, Floats* partial, float* out,
                                        int64_t out_stride) {
  Prefetch ahead = prefetch;
  Floats sums[R][N];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = begin > 0 ? partial[r * N + n] : Floats{};
  int64_t k = begin;
  for (; k + kStep<W> <= end; k += kStep<W>) {
    const W* rows[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      rows[n] = weights + n * stride + k;
      for (int line = 0; line < kStep<W> * int(sizeof(W)); line += kCacheLine) ahead.advance();
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
  prefetch = ahead;
  if (end < depth) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) partial[r * N + n] = sums[r][n];
  } else {
    sum_all_lanes(sums, out, out_stride);
  }
}

// The activations of all rows stay in the first cache, a part of K at a time, while the block of
// weights passes by: the first time from memory, if nothing has prefetched it, then from the second
// cache.
template <class W, int R>
void dot_rows(const Packed<W>* const* activations, Weights<W> weights, int64_t num_outputs,
              Prefetch prefetch, float* out, int64_t out_stride) {
  constexpr int N = kIsPaired<W> || R <= 3 ? 4 : 2;
  const int64_t depth = weights.depth, stride = weights.stride, tiles = num_outputs / N;
  Floats partial[kMaxOutputs / N][R * N];
  for (int64_t begin = 0; begin < depth; begin += kReduction<W>) {
    const int64_t end = std::min(begin + kReduction<W>, depth);
    for (int64_t tile = 0; tile < tiles; ++tile)
      dot_tile<W, R, N>(activations, weights.data + tile * N * stride, stride, begin, end, depth,
                        prefetch, partial[tile], out + tile * N, out_stride);
  }
  for (int64_t n = tiles * N; n < num_outputs; ++n)
    dot_tile<W, R, 1>(activations, weights.data + n * stride, stride, 0, depth, depth, prefetch,
                      nullptr, out + n, out_stride);
}

// Columns [c, c + C * kPair) of weights [K, N] for k in [begin, end), added to the sums in `out`,
// which are in the order of loading.
template <class W, int R, int C>
void outer_tile(const Packed<W>* const* activations, const W* weights, int64_t stride,
                int64_t begin, int64_t end, int64_t depth, float* out, int64_t out_stride) {
  static const W kNoRow[C * kPair] = {};  // below the last of an odd number of rows
  Floats sums[R][C][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int half = 0; half < 2; ++half)
        sums[r][c][half] =
            begin == 0 ? Floats{}
                       : load<Floats>(out + r * out_stride + c * kPair + half * kLanes);
  const int64_t distance = (end - begin) * stride;
  for (int64_t k = begin; k < end; k += Format<W>::kDepth) {
    const W* row = weights + k * stride;
    const W* below = k + 1 < depth ? row + stride : kNoRow;
    const W* ahead = k + (end - begin) < depth ? row + distance : row;
    typename Format<W>::Vector first[C], second[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      for (int d = 0; d < Format<W>::kDepth; ++d)
        __builtin_prefetch(ahead + d * stride + c * kPair);
      load_columns(row + c * kPair, below + c * kPair, first[c], second[c]);
      keep_in_register(first[c]);
      keep_in_register(second[c]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const auto activation = Format<W>::splat_activation(activations[r] + k);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        Format<W>::add_product(sums[r][c][0], first[c], activation);
        Format<W>::add_product(sums[r][c][1], second[c], activation);
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
void outer_rest(const Packed<W>* const* activations, const W* weights, int64_t stride,
                int64_t begin, int64_t end, int64_t depth, int64_t count, float* out,
                int64_t out_stride) {
  for (int64_t k = begin; k < end; k += Format<W>::kDepth) {
    W rest[2][kPair] = {};
    std::memcpy(rest[0], weights + k * stride, count * sizeof(W));
    if (Format<W>::kDepth == 2 && k + 1 < depth)
      std::memcpy(rest[1], weights + (k + 1) * stride, count * sizeof(W));
    typename Format<W>::Vector first, second;
    load_columns(rest[0], rest[1], first, second);
    for (int r = 0; r < R; ++r) {
      float* result = out + r * out_stride;
      const auto activation = Format<W>::splat_activation(activations[r] + k);
      Floats low = k == 0 ? Floats{} : load<Floats>(result);
      Floats high = k == 0 ? Floats{} : load<Floats>(result + kLanes);
      Format<W>::add_product(low, first, activation);
      Format<W>::add_product(high, second, activation);
      store(result, low);
      store(result + kLanes, high);
    }
  }
}

template <class W, int R>
void outer_rows(const Packed<W>* const* activations, Weights<W> weights, int64_t num_outputs,
                float* out, int64_t out_stride) {
  constexpr int C = R <= 2 || kIsPaired<W> ? 2 : 1;
  // Rows of weights at a time, all columns of the block: so many long runs of memory. More of them
  // would save loads and stores of sums, but lie in the same few sets of the first cache.
  constexpr int64_t kRows = R <= 2 ? 8 : 16;
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
      outer_rest<W, R>(activations, weights.data + c, stride, begin, end, depth, num_outputs - c,
                       out + c, out_stride);
  }
  for (int r = 0; r < R; ++r)  // back from the order of loading
    for (int64_t c = 0; c < num_outputs; c += kPair) {
      float* pair = out + r * out_stride + c;
      float ordered[kPair];
      for (int i = 0; i < kPair; ++i) ordered[i] = pair[output_position<W>(i)];
      std::memcpy(pair, ordered, sizeof(ordered));
    }
}

template <class W, int R>
void multiply_rows(const Packed<W>* const* activations, Weights<W> weights, int64_t num_outputs,
                   Prefetch prefetch, float* out, int64_t out_stride) {
  if (weights.is_transposed)
    outer_rows<W, R>(activations, weights, num_outputs, out, out_stride);
  else
    dot_rows<W, R>(activations, weights, num_outputs, prefetch, out, out_stride);
}

// out [num_rows, num_outputs] of rows `out_stride` apart, which has room for multiples of kPair.
// Activations are packed for weights [N, K] and in plain order for weights [K, N]; either way they
// are zero up to a multiple of kStep. `prefetch` is for weights [N, K] alone.
template <class W>
void multiply(int num_rows, const Packed<W>* const* activations, Weights<W> weights,
              int64_t num_outputs, Prefetch prefetch, float* out, int64_t out_stride) {
  switch (num_rows) {
    case 1: return multiply_rows<W, 1>(activations, weights, num_outputs, prefetch, out, out_stride);
    case 2: return multiply_rows<W, 2>(activations, weights, num_outputs, prefetch, out, out_stride);
    case 3: return multiply_rows<W, 3>(activations, weights, num_outputs, prefetch, out, out_stride);
    case 4: return multiply_rows<W, 4>(activations, weights, num_outputs, prefetch, out, out_stride);
    case 5: return multiply_rows<W, 5>(activations, weights, num_outputs, prefetch, out, out_stride);
    case 6: return multiply_rows<W, 6>(activations, weights, num_outputs, prefetch, out, out_stride);
  }
}

// Calls `group(first, count, g, num_groups)` for rows 0 .. num_rows - 1 in as few groups as kMaxRows
// allows, of nearly equal size: 7 rows are 4 + 3.
template <class Group>
void for_row_groups(int64_t num_rows, Group group) {
  const int64_t num_groups = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = num_rows * g / num_groups, last = num_rows * (g + 1) / num_groups;
    group(first, int(last - first), g, num_groups);
  }
}

}  // namespace acceptmoe
