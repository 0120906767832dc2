// Copies the rows of a block into the order of `sorted_pairs`, so that the rows of one expert lie
// together. One block a pair.
//
// A row has `row_bytes` bytes, whatever its type; the kernel copies 16 at a time where rows and
// addresses allow it, else 2. Places beyond the last pair are left as they are: nobody reads them.
#include "acceptmoe.cuh"

namespace {

template <typename Word>
__device__ void copy(const void* from, void* to, int64 num_bytes) {
  const Word* source = static_cast<const Word*>(from);
  Word* target = static_cast<Word*>(to);
  const int num_words = static_cast<int>(num_bytes / static_cast<int64>(sizeof(Word)));
  BLOCK_LOOP(word, num_words) target[word] = source[word];
}

__device__ bool is_multiple(const void* pointer, int64 row_bytes, int64 size) {
  return (reinterpret_cast<int64>(pointer) | row_bytes) % size == 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) gather_rows(
    const char* rows, const int* sorted_pairs, int num_pairs, int pairs_per_row, int64 row_bytes,
    char* sorted_rows) {
  const int place = static_cast<int>(blockIdx.x);
  if (place >= num_pairs || sorted_pairs[place] < 0) return;
  const char* source = rows + sorted_pairs[place] / pairs_per_row * row_bytes;
  char* target = sorted_rows + place * row_bytes;
  if (is_multiple(rows, row_bytes, 16) && is_multiple(sorted_rows, row_bytes, 16)) {
    copy<uint4>(source, target, row_bytes);
  } else {
    copy<unsigned short>(source, target, row_bytes);
  }
}
