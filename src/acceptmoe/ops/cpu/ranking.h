// Experts in order: the larger value first, of equals the lower id.
#pragma once

#include <cstdint>

namespace acceptmoe {

struct Ranked {
  float value;
  int64_t id;
};

inline bool is_before(const Ranked& a, const Ranked& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// The best `capacity` of the experts that are offered in ascending order of their ids.
class BestFew {
 public:
  BestFew(Ranked* memory, int64_t capacity) : best_(memory), capacity_(capacity) {}

  void clear() { count_ = 0; }
  bool is_full() const { return count_ == capacity_; }
  const Ranked& operator[](int64_t place) const { return best_[place]; }

  void offer(float value, int64_t id) {
    if (is_full()) {
      if (!(value > best_[count_ - 1].value)) return;  // an equal one came first
      --count_;
    }
    int64_t place = count_++;
    for (; place > 0 && value > best_[place - 1].value; --place) best_[place] = best_[place - 1];
    best_[place] = {value, id};
  }

 private:
  Ranked* best_;
  int64_t capacity_;
  int64_t count_ = 0;
};

}  // namespace acceptmoe
