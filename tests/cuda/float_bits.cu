// For the tests: every conversion of `acceptmoe.cuh`, value by value.
#include "acceptmoe.cuh"

extern "C" __global__ void float_bits(const float* values, int count, TYPE* narrow, float* wide) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    narrow[i] = from_float<TYPE>(values[i]);
    wide[i] = to_float(narrow[i]);
  }
}
