// Vectors of floats as wide as the processor has them, and numbers of 16 bits as floats.
//
// GCC's and Clang's vector extensions, so that AVX-512, AVX2, SSE and ARM compile from one source;
// what they have no words for is left to intrinsics, where there are some.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace acceptmoe {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kPair = 2 * kLanes;  // 16-bit numbers in a vector, or floats in two

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class V>
inline V load(const void* address) {
  V value;  // rows of odd width are not aligned
  std::memcpy(&value, address, sizeof(V));
  return value;
}

template <class V>
inline void store(void* address, V value) {
  std::memcpy(address, &value, sizeof(V));
}

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline Floats splat(float value) { return value - Floats{}; }  // minus: 0 + -0 would lose the sign

// Keeps the compiler from computing or loading `value` again at every use.
template <class V>
inline void keep_in_register(V& value) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(value));
#elif defined(__SSE2__)
  __asm__("" : "+x"(value));
#elif defined(__aarch64__)
  __asm__("" : "+w"(value));
#else
  (void)value;
#endif
}

// Sum of all lanes by halving; always in the same order.
inline float sum_lanes(Floats value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// The same sums, bit for bit, of four vectors at once: a quarter of the instructions.
inline void sum_lanes_of_four(Floats a, Floats b, Floats c, Floats d, float* sums) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const auto halved = [](Floats value) {
    const __m512 all = bit_cast<__m512>(value);
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(all), 1);
    return _mm256_add_ps(_mm512_castps512_ps256(all), _mm256_castpd_ps(upper));
  };
#else
  const auto halved = [](Floats value) { return bit_cast<__m256>(value); };
#endif
  // Four lanes of one vector beside four of another: lanes 0-3 plus lanes 4-7.
  const auto side_by_side = [](__m256 left, __m256 right) {
    return _mm256_add_ps(_mm256_permute2f128_ps(left, right, 0x20),
                         _mm256_permute2f128_ps(left, right, 0x31));
  };
  const __m256 ac = side_by_side(halved(a), halved(c)), bd = side_by_side(halved(b), halved(d));
  const __m256 twos =  // a, b; c, d: two lanes each
      _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
  const __m128 ab = _mm256_castps256_ps128(twos), cd = _mm256_extractf128_ps(twos, 1);
  _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
#else
  const Floats values[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) sums[i] = sum_lanes(values[i]);
#endif
}

// exp by 2^n * p(r), |r| <= ln(2) / 2, p its Taylor polynomial of degree 7: within 2 units in the
// last place (tests compare). Overflows to infinity, underflows to 0 below 2^-126, keeps NaN.
inline Floats exponential(Floats x) {
  const Floats capped = x > 88.8f ? splat(88.8f) : x;
  const Floats bounded = capped < -87.3f ? splat(-87.3f) : capped;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats rounded = (bounded * 1.44269504088896341f + magic) - magic;
  const Floats r = (bounded - rounded * 0.693359375f) - rounded * -2.12194440e-4f;
  Floats p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Two factors: 2^128 has no float, and e^88.7 needs it. A NaN becomes some integer; p keeps it.
  const Ints n = __builtin_convertvector(x == x ? rounded : Floats{}, Ints);
  const Ints half = n >> 1;
  const Floats result =
      p * bit_cast<Floats>((half + 127) << 23) * bit_cast<Floats>((n - half + 127) << 23);
  return x < -87.3f ? Floats{} : result;
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

// Exact for every half, subnormals, infinities and NaN included.
inline float to_float(Float16 value) {
  const uint32_t magnitude = uint32_t{value.bits & 0x7fffu} << 13;
  float result = bit_cast<float>(magnitude) * 0x1p112f;  // the exponents' biases differ by 112
  if (magnitude >= 0x0f800000u) result = bit_cast<float>(magnitude | 0x7f800000u);
  return bit_cast<float>(bit_cast<uint32_t>(result) | uint32_t{value.bits & 0x8000u} << 16);
}

inline void from_float(float value, float* result) { *result = value; }

inline void from_float(float value, BFloat16* result) {  // to nearest, ties to even
  const uint32_t bits = bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  result->bits = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float value, Float16* result) {  // to nearest, ties to even
  const uint32_t bits = bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // rounds beyond 65504
    half = 0x7c00;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns and rounds the fraction
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  result->bits = uint16_t(half | (bits & 0x80000000u) >> 16);
}

}  // namespace acceptmoe
