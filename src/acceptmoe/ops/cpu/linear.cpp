// acceptmoe::linear: input [T, K] times weight [N, K], transposed, plus bias [N], for few rows.
//
// The weight is read once, in blocks of output rows that the threads share; see products.h.
#include <vector>

#include "parallel.h"
#include "tensors.h"

using namespace acceptmoe;

// The fields of `Linear` in ops/linear.py, in the same order.
struct LinearArguments {
  const void* input;   // [T, K] of input_dtype
  const void* weight;  // [N, K] of weight_dtype
  const void* bias;    // [N] of weight_dtype, or null
  void* output;        // [T, N] of input_dtype
  int64_t num_rows, depth, num_outputs;
  int64_t input_dtype, weight_dtype, num_threads;
};

template <class W>
static void linear(const LinearArguments& a) {
  const int64_t padded = row_stride<W>(a.depth);
  const int64_t share = a.num_outputs / (4 * a.num_threads);
  const int64_t block =
      round_up(std::clamp<int64_t>(share, kPair, largest_block<W>(a.depth)), kPair);
  const int64_t num_blocks = (a.num_outputs + block - 1) / block;
  Workspace memory(Workspace::size_of(a.num_rows * padded * sizeof(Packed<W>)) +
                   a.num_threads * Workspace::size_of(kMaxRows * block * 4));
  auto* packed = memory.take<Packed<W>>(a.num_rows * padded);
  std::vector<float*> scratch;
  for (int64_t t = 0; t < a.num_threads; ++t)
    scratch.push_back(memory.take<float>(kMaxRows * block));
  const Weights<W> weights{static_cast<const W*>(a.weight), a.depth, a.depth, false};

  TaskQueue packing, blocks;
  in_parallel(int(a.num_threads), [&](Team team) {
    packing.run(a.num_rows, [&](int64_t row) {
      pack_row<W>(a.input, a.input_dtype, row, a.depth, padded, false, packed + row * padded);
    });
    team.wait();
    float* out = scratch[team.thread];
    blocks.run_looking_ahead(num_blocks, [&](int64_t task, int64_t next) {
      const int64_t first = task * block, count = std::min(block, a.num_outputs - first);
      const Weights<W> next_block = next < num_blocks ? weights.from(next * block) : Weights<W>{};
      for_row_groups(a.num_rows, [&](int64_t row, int size, int64_t group, int64_t num_groups) {
        const Packed<W>* rows[kMaxRows];
        for (int r = 0; r < size; ++r) rows[r] = packed + (row + r) * padded;
        const auto prefetch = Prefetch::of(next_block, count, group, num_groups);
        multiply(size, rows, weights.from(first), count, prefetch, out, block);
        for (int r = 0; r < size; ++r) {
          float* result = out + r * block;
          if (a.bias != nullptr)
            for (int64_t n = 0; n < count; ++n)
              result[n] += to_float(static_cast<const W*>(a.bias)[first + n]);
          write_floats(result, count, a.input_dtype, a.output,
                       (row + r) * a.num_outputs + first);
        }
      });
    });
  });
}

extern "C" int acceptmoe_linear(const LinearArguments* arguments) {
  try {
    with_weights(arguments->weight_dtype, arguments->input_dtype,
                 [&](auto zero) { linear<decltype(zero)>(*arguments); });
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kOk;
}
