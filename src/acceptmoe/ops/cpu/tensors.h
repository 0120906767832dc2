// What every op here needs of tensors: their dtypes, rows as floats and back, working memory.
#pragma once

#include <cstdlib>
#include <new>

#include "products.h"

namespace acceptmoe {

enum DType : int64_t { kFloat32, kBFloat16, kFloat16 };
enum Status : int { kOk = 0, kBadId = 1, kNoMemory = 2 };

// Calls `body(W{})` with the element type of `dtype`.
template <class Body>
inline auto with_dtype(int64_t dtype, Body body) {
  switch (dtype) {
    case kBFloat16: return body(BFloat16{});
    case kFloat16: return body(Float16{});
    default: return body(float{});
  }
}

// Calls `body(W{})` with the type as which weights of `weight_dtype` meet activations of `dtype`.
template <class Body>
inline auto with_weights(int64_t weight_dtype, int64_t dtype, Body body) {
#if defined(__AVX512BF16__)
  if (weight_dtype == kBFloat16 && dtype == kBFloat16) return body(PairedBFloat16{});
#endif
  return with_dtype(weight_dtype, body);
}

inline float to_float(PairedBFloat16 value) { return to_float(BFloat16{value.bits}); }

inline float read_float(const void* data, int64_t dtype, int64_t index) {
  return with_dtype(dtype, [&](auto zero) {
    return to_float(static_cast<const decltype(zero)*>(data)[index]);
  });
}

// Row `row` of a contiguous [rows, width] tensor as activations, in the order that weights of type W
// are loaded in (or plain), zero from `width` to `padded`.
template <class W>
void pack_row(const void* data, int64_t dtype, int64_t row, int64_t width, int64_t padded,
              bool is_plain, Packed<W>* out) {
  std::fill(out + width / kPair * kPair, out + padded, Packed<W>{});
  with_dtype(dtype, [&](auto zero) {
    const auto* values = static_cast<const decltype(zero)*>(data) + row * width;
    for (int64_t i = 0; i < width; ++i)
      from_float(to_float(values[i]), &out[is_plain ? i : packed_index<W>(i)]);
  });
}

inline void write_floats(const float* values, int64_t count, int64_t dtype, void* data,
                         int64_t first) {
  with_dtype(dtype, [&](auto zero) {
    auto* out = static_cast<decltype(zero)*>(data) + first;
    for (int64_t i = 0; i < count; ++i) from_float(values[i], out + i);
  });
}

// Working memory of the calling thread. It is kept from call to call, because fresh pages cost more
// than the work on them; beyond `kKept` bytes, a long prompt's, it is given back.
class Workspace {
 public:
  explicit Workspace(int64_t num_bytes) {
    Buffer& buffer = own();
    if (buffer.size < num_bytes) {
      buffer.release();
      buffer.data = static_cast<char*>(std::aligned_alloc(kCacheLine, round_up(num_bytes, 4096)));
      if (buffer.data == nullptr) throw std::bad_alloc();
      buffer.size = num_bytes;
    }
    next_ = buffer.data;
  }
  ~Workspace() {
    if (own().size > kKept) own().release();
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  static int64_t size_of(int64_t num_bytes) { return round_up(num_bytes, kCacheLine); }

  template <class T>
  T* take(int64_t count) {
    char* taken = next_;
    next_ += size_of(count * int64_t(sizeof(T)));
    return reinterpret_cast<T*>(taken);
  }

 private:
  static constexpr int64_t kKept = int64_t{64} << 20;
  struct Buffer {
    char* data = nullptr;
    int64_t size = 0;
    void release() {
      std::free(data);
      data = nullptr;
      size = 0;
    }
    ~Buffer() { release(); }
  };
  static Buffer& own() {
    static thread_local Buffer buffer;
    return buffer;
  }
  char* next_;
};

}  // namespace acceptmoe
