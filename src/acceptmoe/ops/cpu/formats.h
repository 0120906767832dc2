// How weights of each type are multiplied: what is loaded of them at once, which activations they
// meet, and where in memory these have to lie for it.
//
// Weights are read in place. Most become vectors of floats in registers: bfloat16 by a shift, float16
// by conversion. Where the processor multiplies pairs of bfloat16 (AVX512-BF16) and the activations
// are bfloat16 too, both are taken as they are, at twice the speed; sums are in fp32 either way.
#pragma once

#include "vectors.h"

namespace acceptmoe {

// bfloat16 weights that are multiplied with bfloat16 activations.
struct PairedBFloat16 {
  uint16_t bits;
};

// For weights W. kPair of them are loaded as kParts vectors, and so are kPair activations, packed so
// that each is at the `position` of its weight: no weight needs a shuffle. Of weights [K, N] one
// product takes kDepth rows.
template <class W>
struct Format;

// What all weights that become floats have in common.
struct FloatFormat {
  typedef float Packed;  // an activation
  typedef Floats Vector;
  static constexpr int kParts = 2;
  static constexpr int kDepth = 1;

  template <int Part>
  static Floats load_activations(const float* activations) {
    return acceptmoe::load<Floats>(activations + Part * kLanes);
  }
  static Floats splat_activation(const float* activation) { return splat(*activation); }
  static void add_product(Floats& sum, Floats weights, Floats activations) {
    sum += activations * weights;
  }
};

template <>
struct Format<float> : FloatFormat {
  template <int Part>
  static Floats load(const float* weights) {
    return acceptmoe::load<Floats>(weights + Part * kLanes);
  }
  static int position(int index) { return index; }
};

template <>
struct Format<BFloat16> : FloatFormat {
  template <int Part>
  static Floats load(const BFloat16* weights) {
    const Words raw = acceptmoe::load<Words>(weights);  // two to a word, the even one below
    return bit_cast<Floats>(Part == 0 ? raw << 16 : raw & 0xffff0000u);
  }
  static int position(int index) { return index % 2 * kLanes + index / 2; }
};

template <>
struct Format<Float16> : FloatFormat {
  template <int Part>
  static Floats load(const Float16* weights) {
    const Float16* half = weights + Part * kLanes;
#if defined(__F16C__) && defined(__AVX512F__)
    return bit_cast<Floats>(_mm512_cvtph_ps(acceptmoe::load<__m256i>(half)));
#elif defined(__F16C__) && defined(__AVX2__)
    return bit_cast<Floats>(_mm256_cvtph_ps(acceptmoe::load<__m128i>(half)));
#else
    const Words bits = __builtin_convertvector(acceptmoe::load<Shorts>(half), Words);
    const Words magnitude = (bits & 0x7fffu) << 13;
    const Words scaled = bit_cast<Words>(bit_cast<Floats>(magnitude) * 0x1p112f);
    const Words finite_or_not = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : scaled;
    return bit_cast<Floats>(finite_or_not | (bits & 0x8000u) << 16);
#endif
  }
  static int position(int index) { return index; }
};

#if defined(__AVX512BF16__)
template <>
struct Format<PairedBFloat16> {
  typedef BFloat16 Packed;
  typedef __m512bh Vector;
  static constexpr int kParts = 1;
  static constexpr int kDepth = 2;

  template <int Part>
  static Vector load(const PairedBFloat16* weights) {
    return acceptmoe::load<Vector>(weights);
  }
  template <int Part>
  static Vector load_activations(const BFloat16* activations) {
    return acceptmoe::load<Vector>(activations);
  }
  // Products are exact in fp32, numbers too small for a normal float count as 0.
  static void add_product(Floats& sum, Vector weights, Vector activations) {
    sum = bit_cast<Floats>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), weights, activations));
  }
  static Vector splat_activation(const BFloat16* activations) {  // one pair
    return bit_cast<Vector>(_mm512_set1_epi32(acceptmoe::load<int32_t>(activations)));
  }
  static int position(int index) { return index; }
};
#endif

// kPair columns of kDepth rows of weights [K, N], as two vectors; `below` is the second row.
template <class W>
inline void load_columns(const W* row, const W* /* below */, typename Format<W>::Vector& first,
                         typename Format<W>::Vector& second) {
  first = Format<W>::template load<0>(row);
  second = Format<W>::template load<1>(row);
}

// Where output `index` of kPair comes to lie in these vectors.
template <class W>
inline int output_position(int index) {
  return Format<W>::position(index);
}

#if defined(__AVX512BF16__)
template <>
inline void load_columns(const PairedBFloat16* row, const PairedBFloat16* below, __m512bh& first,
                         __m512bh& second) {
  const __m512i upper = load<__m512i>(row), lower = load<__m512i>(below);
  first = bit_cast<__m512bh>(_mm512_unpacklo_epi16(upper, lower));
  second = bit_cast<__m512bh>(_mm512_unpackhi_epi16(upper, lower));
}

template <>
inline int output_position<PairedBFloat16>(int index) {
  return index / 4 % 2 * kLanes + index / 8 * 4 + index % 4;
}
#endif

}  // namespace acceptmoe
