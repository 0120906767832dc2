// What the kernels share: 16-bit floats, warp and block reductions, ids.
//
// No header of CUDA or C is included: NVRTC compiles a kernel with nothing but this folder, so a
// machine needs no CUDA toolkit, and a C++17 compiler builds the same text behind tests/cuda/host.
#pragma once

using int64 = long long;

constexpr int WARP = 32;
constexpr int BAD_ID = -2;  // the place of a row-expert pair whose expert does not exist
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

struct bf16 {
  unsigned short bits;
};

struct fp16 {
  unsigned short bits;
};

__device__ inline float float_of_bits(unsigned bits) {
  union {
    unsigned bits;
    float value;
  } both = {bits};
  return both.value;
}

__device__ inline unsigned bits_of_float(float value) {
  union {
    float value;
    unsigned bits;
  } both = {value};
  return both.bits;
}

__device__ inline float not_a_number() { return float_of_bits(0x7fc00000u); }
__device__ inline float negative_infinity() { return float_of_bits(0xff800000u); }

__device__ inline float to_float(float value) { return value; }

__device__ inline float to_float(bf16 value) {
  return float_of_bits(static_cast<unsigned>(value.bits) << 16);
}

__device__ inline float to_float(fp16 value) {
  const unsigned sign = (value.bits & 0x8000u) << 16;
  const unsigned magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  // Read as fp32 the exponent is 112 too small; the product is exact, for subnormals too.
  const float scaled = float_of_bits(magnitude << 13) * 0x1p112f;
  return float_of_bits(sign | bits_of_float(scaled));
}

template <typename T>
__device__ T from_float(float value);

template <>
__device__ inline float from_float<float>(float value) {
  return value;
}

// Rounds to nearest, ties to even, as torch does.
template <>
__device__ inline bf16 from_float<bf16>(float value) {
  const unsigned bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
__device__ inline fp16 from_float<fp16>(float value) {
  const unsigned bits = bits_of_float(value);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 fp16 has steps of 2^-24; those are the steps of fp32 at 0.5, so adding rounds.
    half = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | half)};
}

// `value` as it is after a round trip through T.
template <typename T>
__device__ inline float rounded(float value) {
  return to_float(from_float<T>(value));
}

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % WARP; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / WARP; }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x) / WARP; }

// Keeps the loop behind it one turn long. Mostly such loops have few turns, and copies of a large body
// cost more in instructions than they save.
#define NOT_UNROLLED _Pragma("unroll 1")

// The items below `count` of each thread of the block, each warp of the block, each lane of the warp.
#define BLOCK_LOOP(item, count) \
  NOT_UNROLLED for (int item = threadIdx.x; item < (count); item += blockDim.x)
#define WARP_LOOP(item, count) \
  NOT_UNROLLED for (int item = warp_id(); item < (count); item += num_warps())
#define LANE_LOOP(item, count) \
  NOT_UNROLLED for (int item = lane_id(); item < (count); item += WARP)

// The exchange has the same pattern in every lane, so all lanes get the same bits.
__device__ inline float warp_sum(float value) {
  for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
  return value;
}

__device__ inline float warp_max(float value) {
  for (int step = WARP / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, step));
  }
  return value;
}

// The sum over the block, in every thread; `per_warp` is shared and has a place for each warp. All
// threads must call it. The order depends on nothing but the block size.
__device__ inline float block_sum(float value, float* per_warp) {
  value = warp_sum(value);
  if (lane_id() == 0) per_warp[warp_id()] = value;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < num_warps(); ++warp) total += per_warp[warp];
  __syncthreads();  // the next call writes `per_warp` again
  return total;
}
