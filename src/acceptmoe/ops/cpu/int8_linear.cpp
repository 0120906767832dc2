// acceptmoe::int8_linears: input [T, K] times weights of 8 bits [N, K], transposed, plus bias [N], for
// one weight or several side by side: a small layer takes less time than waking the threads for it.
//
// Weights and activations are integers times a scale for every kGroup along K; products of a group
// are summed as integers, exactly, and groups in fp32, in order. So a row's result depends neither on
// the other rows nor on the threads, bit for bit, nor on which instructions multiplied.
//
// Weights are bytes without a sign, 128 above their value, because processors multiply unsigned with
// signed bytes; what the 128 adds is the same for all outputs and is taken off again, group by group.
// They lie as [N / kOutputs, K / 4, kOutputs, 4]: one task reads one stretch of memory from end to
// end, and a vector of weights meets four activations of one row, which are splat.
#include <cmath>
#include <vector>

#include "parallel.h"
#include "tensors.h"

using namespace acceptmoe;

constexpr int kOutputs = 64;    // of a block of weights; `BLOCK_OUTPUTS` in ops/int8_linear.py
constexpr int kGroup = 128;     // values of K with one scale; `GROUP` there
constexpr int kQuad = 4;        // values of K in one lane
constexpr int kWeightZero = 128;
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of outputs, in a tile: sums fit the registers

// The fields of `Matrix` and `Int8Linears` in ops/int8_linear.py, in the same order.
struct Matrix {
  const uint8_t* weight;  // [N / kOutputs, K / 4, kOutputs, 4], N and K rounded up
  const float* scales;    // [N / kOutputs, groups of K, kOutputs]
  const float* bias;      // [N] or null
  int64_t num_outputs;    // N
};

struct Int8LinearsArguments {
  const void* input;       // [T, K] of input_dtype
  const Matrix* matrices;  // [num_matrices]
  void* output;            // [T, sum of N] of input_dtype
  int64_t num_rows, depth, num_matrices;
  int64_t input_dtype, num_threads;
};

// A row of activations.
struct Quantized {
  int8_t* values;  // [K], zero up to a multiple of kQuad
  float* scales;   // [groups]
  int32_t* excess;  // [groups]: what the zero of the weights adds to a sum
};

static void quantize_row(const void* data, int64_t dtype, int64_t row, int64_t depth,
                         Quantized out) {
  for (int64_t first = 0, group = 0; first < depth; first += kGroup, ++group) {
    const int64_t count = std::min<int64_t>(kGroup, depth - first);
    float values[kGroup];
    with_dtype(dtype, [&](auto zero) {
      const auto* source = static_cast<const decltype(zero)*>(data) + row * depth + first;
      for (int64_t i = 0; i < count; ++i) values[i] = to_float(source[i]);
    });
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < count; ++i) {
      largest = std::max(largest, std::abs(values[i]));
      is_finite = is_finite && std::isfinite(values[i]);
    }
    const float scale = largest / 127;
    // Below that the reciprocal is no number; the products are nothing then.
    const float inverse = scale > 1e-37f ? 1 / scale : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t value = is_finite ? int32_t(std::lrintf(values[i] * inverse)) : 0;
      out.values[first + i] = int8_t(value);
      sum += value;
    }
    out.scales[group] = is_finite ? scale : NAN;  // not a number must stay one
    out.excess[group] = kWeightZero * sum;
  }
  for (int64_t i = depth; i < round_up(depth, kQuad); ++i) out.values[i] = 0;
}

// Weights and activations as `add_products` takes them: four bytes a lane, or where the processor has
// no products of bytes, two vectors of 16-bit numbers, of bytes 0 and 2 and of bytes 1 and 3.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
struct Bytes {
  Ints all;
};
static inline Bytes weight_bytes(Ints weights) { return {weights}; }
static inline Bytes activation_bytes(int32_t quad) { return {Ints{} + quad}; }
#else
typedef int16_t Halves __attribute__((vector_size(kLanes * 4)));
struct Bytes {
  Halves even, odd;
};
static inline Bytes weight_bytes(Ints weights) {
  return {bit_cast<Halves>(weights & 0x00ff00ff), bit_cast<Halves>(weights >> 8 & 0x00ff00ff)};
}
static inline Bytes activation_bytes(int32_t quad) {
  const Halves all = bit_cast<Halves>(Ints{} + quad);
  return {all << 8 >> 8, all >> 8};
}
static inline Ints add_pairs(Halves left, Halves right) {
#if defined(__AVX512BW__)
  return bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(left), bit_cast<__m512i>(right)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(left), bit_cast<__m256i>(right)));
#else
  const Ints a = bit_cast<Ints>(left), b = bit_cast<Ints>(right);
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}
#endif

// Four products of each lane, weights without a sign and activations with one, added to `sums`.
static inline __attribute__((always_inline)) void add_products(Ints& sums, Bytes weights,
                                                               Bytes activations) {
#if defined(__AVX512VNNI__)
  sums = bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sums),
                                            bit_cast<__m512i>(weights.all),
                                            bit_cast<__m512i>(activations.all)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  sums = bit_cast<Ints>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(sums),
                                                bit_cast<__m256i>(weights.all),
                                                bit_cast<__m256i>(activations.all)));
#else
  sums += add_pairs(weights.even, activations.even) + add_pairs(weights.odd, activations.odd);
#endif
}

// sums [R, kVectors]: whole numbers of one group, `begin` to `end` along K, for kVectors * kLanes
// outputs. Not inlined, every loop over R and kVectors unrolled: or compilers keep sums in memory.
template <int R>
static __attribute__((noinline)) void sum_group(const Quantized* rows, const uint8_t* weight,
                                                int64_t begin, int64_t end, Prefetch& prefetch,
                                                Ints* out) {
  Ints sums[R][kVectors] = {};
  const int8_t* activations[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) activations[r] = rows[r].values;
  Prefetch ahead = prefetch;
  for (int64_t k = begin; k < end; k += kQuad) {
    const uint8_t* quad = weight + k * kOutputs;
    Bytes loaded[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      loaded[v] = weight_bytes(load<Ints>(quad + v * kLanes * kQuad));
      if (v * kLanes * kQuad % kCacheLine == 0) ahead.advance();
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Bytes activation = activation_bytes(load<int32_t>(activations[r] + k));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        add_products(sums[r][v], loaded[v], activation);
        keep_in_register(sums[r][v]);
      }
    }
  }
  prefetch = ahead;
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + r * kVectors + v, sums[r][v]);
}

// kVectors * kLanes outputs of R rows, from `weight` on: [K / 4, kOutputs, 4] and [groups, kOutputs].
template <int R>
static void multiply_tile(const Quantized* rows, const uint8_t* weight, const float* scales,
                          int64_t depth, Prefetch& prefetch, float* out) {
  Floats totals[R][kVectors] = {};
  for (int64_t first = 0, group = 0; first < depth; first += kGroup, ++group) {
    Ints sums[R][kVectors];
    sum_group<R>(rows, weight, first, std::min<int64_t>(first + kGroup, depth), prefetch, sums[0]);
    for (int v = 0; v < kVectors; ++v) {
      const Floats scale = load<Floats>(scales + group * kOutputs + v * kLanes);
      for (int r = 0; r < R; ++r) {
        const Ints exact = sums[r][v] - rows[r].excess[group];
        totals[r][v] += __builtin_convertvector(exact, Floats) * (scale * rows[r].scales[group]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(out + r * kOutputs + v * kLanes, totals[r][v]);
}

// One block of kOutputs outputs of R rows.
template <int R>
static void multiply_block(const Quantized* rows, const uint8_t* weight, const float* scales,
                           int64_t depth, Prefetch prefetch, float* out) {
  for (int first = 0; first < kOutputs; first += kVectors * kLanes)
    multiply_tile<R>(rows, weight + first * kQuad, scales + first, depth, prefetch, out + first);
}

static void multiply_rows(int num_rows, const Quantized* rows, const uint8_t* weight,
                          const float* scales, int64_t depth, Prefetch prefetch, float* out) {
  switch (num_rows) {
    case 1: return multiply_block<1>(rows, weight, scales, depth, prefetch, out);
    case 2: return multiply_block<2>(rows, weight, scales, depth, prefetch, out);
    case 3: return multiply_block<3>(rows, weight, scales, depth, prefetch, out);
    case 4: return multiply_block<4>(rows, weight, scales, depth, prefetch, out);
    case 5: return multiply_block<5>(rows, weight, scales, depth, prefetch, out);
    case 6: return multiply_block<6>(rows, weight, scales, depth, prefetch, out);
  }
}

// kOutputs outputs of one matrix, or what is left of them: a task.
struct Block {
  const Matrix* matrix;
  int64_t number;        // in its matrix
  int64_t first_column;  // of the output
};

static std::vector<Block> blocks_of(const Int8LinearsArguments& a, int64_t& num_columns) {
  std::vector<Block> blocks;
  num_columns = 0;
  for (int64_t m = 0; m < a.num_matrices; ++m) {
    const Matrix& matrix = a.matrices[m];
    for (int64_t block = 0; block * kOutputs < matrix.num_outputs; ++block)
      blocks.push_back({&matrix, block, num_columns + block * kOutputs});
    num_columns += matrix.num_outputs;
  }
  return blocks;
}

static void int8_linears(const Int8LinearsArguments& a) {
  int64_t num_columns;
  const std::vector<Block> blocks = blocks_of(a, num_columns);
  const int64_t num_blocks = int64_t(blocks.size());
  const int64_t padded = round_up(a.depth, kCacheLine), num_groups = (a.depth + kGroup - 1) / kGroup;
  const int64_t block_bytes = round_up(a.depth, kQuad) * kOutputs;
  Workspace memory(Workspace::size_of(a.num_rows * padded) +
                   2 * Workspace::size_of(a.num_rows * num_groups * 4) +
                   a.num_threads * Workspace::size_of(kMaxRows * kOutputs * 4));
  auto* values = memory.take<int8_t>(a.num_rows * padded);
  auto* scales = memory.take<float>(a.num_rows * num_groups);
  auto* excess = memory.take<int32_t>(a.num_rows * num_groups);
  std::vector<Quantized> rows;
  for (int64_t row = 0; row < a.num_rows; ++row)
    rows.push_back({values + row * padded, scales + row * num_groups, excess + row * num_groups});
  std::vector<float*> scratch;
  for (int64_t t = 0; t < a.num_threads; ++t)
    scratch.push_back(memory.take<float>(kMaxRows * kOutputs));
  const auto weight_of = [&](int64_t block) {
    return blocks[block].matrix->weight + blocks[block].number * block_bytes;
  };

  TaskQueue packing, products;
  in_parallel(int(a.num_threads), [&](Team team) {
    packing.run(a.num_rows, [&](int64_t row) {
      quantize_row(a.input, a.input_dtype, row, a.depth, rows[row]);
    });
    team.wait();
    float* out = scratch[team.thread];
    products.run_looking_ahead(num_blocks, [&](int64_t task, int64_t next) {
      const Block& block = blocks[task];
      const Matrix& matrix = *block.matrix;
      const int64_t first = block.number * kOutputs;
      const int64_t count = std::min<int64_t>(kOutputs, matrix.num_outputs - first);
      for_row_groups(a.num_rows, [&](int64_t row, int size, int64_t group, int64_t num_row_groups) {
        Prefetch prefetch{};
        if (next < num_blocks) {
          const auto* data = reinterpret_cast<const char*>(weight_of(next));
          prefetch = {data + block_bytes * group / num_row_groups,
                      (kCacheLine + num_row_groups - 1) / num_row_groups};
        }
        multiply_rows(size, rows.data() + row, weight_of(task),
                      matrix.scales + block.number * num_groups * kOutputs, a.depth, prefetch, out);
        for (int r = 0; r < size; ++r) {
          float* result = out + r * kOutputs;
          if (matrix.bias != nullptr)
            for (int64_t n = 0; n < count; ++n) result[n] += matrix.bias[first + n];
          write_floats(result, count, a.input_dtype, a.output,
                       (row + r) * num_columns + block.first_column);
        }
      });
    });
  });
}

extern "C" int acceptmoe_int8_linears(const Int8LinearsArguments* arguments) {
  try {
    int8_linears(*arguments);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kOk;
}
