// Activations of gated experts, on vectors of floats.
#pragma once

#include <cmath>

#include "vectors.h"

namespace acceptmoe {

enum Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kClampedSwiglu };

// sigmoid(x): e^-x overflows to infinity where the result is 0.
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

inline Floats gelu_erf(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
  return load<Floats>(lanes);
}

// 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
inline Floats gelu_tanh(Floats x) {
  return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both clamped; comparisons that keep NaN.
inline Floats clamped_swiglu(Floats gate, Floats up, float limit, float alpha) {
  gate = gate > limit ? splat(limit) : gate;
  up = up > limit ? splat(limit) : up;
  up = up < -limit ? splat(-limit) : up;
  return (up + 1.0f) * gate * sigmoid(alpha * gate);
}

inline Floats activate(Activation kind, Floats gate, Floats up, float limit, float alpha) {
  switch (kind) {
    case kSilu: return gate * sigmoid(gate) * up;
    case kGelu: return gelu_erf(gate) * up;
    case kGeluTanh: return gelu_tanh(gate) * up;
    case kRelu: return (gate < 0.0f ? Floats{} : gate) * up;
    case kClampedSwiglu: return clamped_swiglu(gate, up, limit, alpha);
  }
  return gate;
}

}  // namespace acceptmoe
