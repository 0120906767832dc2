// Sorts row-expert pairs by expert: which experts a block touches, and which pairs are whose. One
// block.
//
// Pair p = row * K + slot has the expert ids[p]; an id below 0 (padding) is skipped. One beyond E is a
// mistake that nobody can raise for here: its pair gets the place BAD_ID, which makes its row NaN.
// The sort is stable, so pairs of one expert stay in the order of their rows. Counting is in
// integers: equal input gives equal output.
#include "acceptmoe.cuh"

namespace {

constexpr int MAX_EXPERTS = 512;
constexpr int MAX_WARPS = 8;
constexpr int NO_EXPERT = -1;

struct Shared {
  // Pairs of each expert in each warp's part of the list; later, where the warp's next one goes.
  int places[MAX_WARPS][MAX_EXPERTS];
  int begin[MAX_EXPERTS];        // where the expert's pairs begin
  int union_index[MAX_EXPERTS];  // its place in the union
  int num_sorted, num_union;
};

// The pair's expert, NO_EXPERT or BAD_ID.
__device__ int expert_of(const int64* ids, int pair, int num_pairs, int num_experts) {
  if (pair >= num_pairs || ids[pair] < 0) return NO_EXPERT;
  return ids[pair] < num_experts ? static_cast<int>(ids[pair]) : BAD_ID;
}

// Sum over the lanes up to and with one's own.
__device__ int warp_prefix_sum(int value) {
  for (int step = 1; step < WARP; step *= 2) {
    const int below = __shfl_up_sync(ALL_LANES, value, step);
    if (lane_id() >= step) value += below;
  }
  return value;
}

// Each warp counts its own part of the pairs.
__device__ void count_pairs(Shared& shared, const int64* ids, int begin, int end, int num_pairs,
                            int num_experts) {
  for (int first = begin; first < end; first += WARP) {
    const int expert = expert_of(ids, first + lane_id(), num_pairs, num_experts);
    if (expert >= 0) atomicAdd(&shared.places[warp_id()][expert], 1);
  }
}

// The first warp: 32 experts at a time, from counts to places.
__device__ void sum_counts(Shared& shared, int num_experts) {
  int num_sorted = 0, num_union = 0;
  for (int first = 0; first < num_experts; first += WARP) {
    const int expert = first + lane_id();
    int count = 0;
    if (expert < num_experts) {
      for (int warp = 0; warp < num_warps(); ++warp) count += shared.places[warp][expert];
    }
    const int sum = warp_prefix_sum(count);
    const unsigned touched = __ballot_sync(ALL_LANES, count > 0);
    if (expert < num_experts) {
      int place = num_sorted + sum - count;
      shared.begin[expert] = place;
      shared.union_index[expert] =
          count > 0 ? num_union + __popc(touched & ((1u << lane_id()) - 1u)) : -1;
      for (int warp = 0; warp < num_warps(); ++warp) {
        const int pairs = shared.places[warp][expert];
        shared.places[warp][expert] = place;
        place += pairs;
      }
    }
    num_sorted += __shfl_sync(ALL_LANES, sum, WARP - 1);
    num_union += __popc(touched);
  }
  if (lane_id() == 0) {
    shared.num_sorted = num_sorted;
    shared.num_union = num_union;
  }
}

// Each warp walks its part again, 32 pairs at a time; of lanes with one expert the lower goes first.
__device__ void place_pairs(Shared& shared, const int64* ids, int begin, int end, int num_pairs,
                            int num_experts, int* sorted_pairs, int* pair_places) {
  int* next = shared.places[warp_id()];
  for (int first = begin; first < end; first += WARP) {
    const int pair = first + lane_id();
    const int expert = expert_of(ids, pair, num_pairs, num_experts);
    const unsigned alike = __match_any_sync(ALL_LANES, expert);
    const int place =
        expert < 0 ? expert : next[expert] + __popc(alike & ((1u << lane_id()) - 1u));
    __syncwarp();  // all lanes have read their place
    if (expert >= 0 && lane_id() == __ffs(static_cast<int>(alike)) - 1) {
      next[expert] += __popc(alike);
    }
    __syncwarp();
    if (pair >= num_pairs) continue;
    pair_places[pair] = place;
    if (place >= 0) sorted_pairs[place] = pair;
  }
}

}  // namespace

// Writes, with P = num_pairs and U = min(E, P):
//   sorted_pairs [P]      the pairs, those of the union's first expert first; beyond the last: -1
//   pair_places [P]       the reverse: where each pair is in `sorted_pairs`, or -1 or BAD_ID
//   union_experts [U]     the touched experts in ascending order; beyond the last: -1
//   union_offsets [U + 1] where the pairs of each begin; beyond the last: the number of pairs
//   num_union [1]
extern "C" __global__ void __launch_bounds__(256) route_rows(
    const int64* ids, int num_pairs, int num_experts, int* sorted_pairs, int* pair_places,
    int* union_experts, int* union_offsets, int* num_union) {
  __shared__ Shared shared;
  // Whole steps of a warp, so that no step belongs to two warps.
  const int steps = (num_pairs + WARP - 1) / WARP;
  const int steps_per_warp = (steps + num_warps() - 1) / num_warps();
  const int begin = min(warp_id() * steps_per_warp, steps) * WARP;
  const int end = min((warp_id() + 1) * steps_per_warp, steps) * WARP;
  BLOCK_LOOP(expert, num_experts) {
    for (int warp = 0; warp < num_warps(); ++warp) shared.places[warp][expert] = 0;
  }
  __syncthreads();
  count_pairs(shared, ids, begin, end, num_pairs, num_experts);
  __syncthreads();
  if (warp_id() == 0) sum_counts(shared, num_experts);
  __syncthreads();
  place_pairs(shared, ids, begin, end, num_pairs, num_experts, sorted_pairs, pair_places);
  BLOCK_LOOP(expert, num_experts) {
    const int index = shared.union_index[expert];
    if (index < 0) continue;
    union_experts[index] = expert;
    union_offsets[index] = shared.begin[expert];
  }
  const int union_size = min(num_experts, num_pairs);
  BLOCK_LOOP(index, union_size + 1) {
    if (index < shared.num_union) continue;
    union_offsets[index] = shared.num_sorted;
    if (index < union_size) union_experts[index] = -1;
  }
  BLOCK_LOOP(place, num_pairs) {
    if (place >= shared.num_sorted) sorted_pairs[place] = -1;
  }
  if (threadIdx.x == 0) *num_union = shared.num_union;
}
