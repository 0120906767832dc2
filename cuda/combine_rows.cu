// Adds up each row's experts: output[t] = sum over slots of weights[t, slot] * its expert's result,
// in the order of the slots and in fp32, without atomics. Grid: rows times `blocks_per_row`.
//
// VALUE and WEIGHT, given to the compiler, are the types of the output and of the weights.
#include "acceptmoe.cuh"

// `results` [P, H] fp32 lie in the order of `sorted_pairs`; `pair_places` [T * K] says where, -1 for a
// pair that adds nothing, BAD_ID for one that makes the row NaN. `weights` [T, K], `output` [T, H] with H = row_size.
extern "C" __global__ void __launch_bounds__(256) combine_rows(
    const float* results, const WEIGHT* weights, const int* pair_places, int blocks_per_row,
    int pairs_per_row, int row_size, VALUE* output) {
  const int row = static_cast<int>(blockIdx.x) / blocks_per_row;
  const int stride = blocks_per_row * static_cast<int>(blockDim.x);
  const int first = static_cast<int>(blockIdx.x) % blocks_per_row * static_cast<int>(blockDim.x);
  for (int column = first + static_cast<int>(threadIdx.x); column < row_size; column += stride) {
    float sum = 0.0f;
    for (int pair = row * pairs_per_row; pair < (row + 1) * pairs_per_row; ++pair) {
      const int64 place = pair_places[pair];
      if (place >= 0) sum += to_float(weights[pair]) * results[place * row_size + column];
      if (place == BAD_ID) sum = not_a_number();
    }
    output[static_cast<int64>(row) * row_size + column] = from_float<VALUE>(sum);
  }
}
