// One layer's selection and constrained routing in one launch of one block.
//
// Axes: T rows (row 0 is the root), E experts, K experts per row; every array is contiguous.
// LOGIT and WEIGHT, given to the compiler, are the types of the logits and of the routing weights.
// Sums run in an order that depends on the block size alone, so equal input gives equal bits. Of
// equals the lower expert id is the better one.
#include "acceptmoe.cuh"

namespace {

constexpr int MAX_ROWS = 256;
constexpr int MAX_EXPERTS = 512;
constexpr int MAX_GROUPS = 32;
constexpr int MAX_WARPS = 32;
constexpr int ROW_WORDS = MAX_ROWS / 32;
// In fp32 exp(entropy) of n equal demands can land just above n, and ceil would make it n + 1.
constexpr float RANK_TOLERANCE = 1e-3f;
// The mass of n equal demands out of m can land just below n / m, and one more would enter.
constexpr float MASS_TOLERANCE = 1e-6f;
constexpr float SIGMOID_EPSILON = 1e-20f;  // Transformers adds it to the sum of the kept weights

enum Scoring { SOFTMAX_TOPK = 0, TOPK_SOFTMAX = 1, SIGMOID_BIAS_GROUP = 2 };
enum Sizing { EFFECTIVE_RANK = 0, MASS = 1 };
enum Combine { ROUTER = 0, NATURAL = 1 };

struct Layer {
  const LOGIT* logits;             // [T, E]
  const WEIGHT* natural_weights;   // [T, K]
  const int64* natural_ids;        // [T, K]
  const float* row_weights;        // [T]
  const int* num_anchored;         // [T]
  const float* path_commitment;    // [T]
  const bool* is_real;             // [T]
  const float* correction_bias;    // [E] or null
  const bool* resident;            // [E] or null: all are
  int num_rows, num_experts, experts_per_row;
  int scoring, renormalize;
  float scale;
  int num_groups, groups_per_row;
  int sizing;
  float size_parameter;
  int combine;

  __device__ bool is_grouped() const { return groups_per_row < num_groups; }
  __device__ int group_size() const { return num_experts / num_groups; }
  __device__ float logit(int row, int expert) const {
    return to_float(logits[row * num_experts + expert]);
  }
};

struct Shared {
  unsigned wanted[ROW_WORDS][MAX_EXPERTS];  // bit t: real row t has the expert in its own top-k
  float row_max[MAX_ROWS];  // of the logits
  float row_sum[MAX_ROWS];  // of exp(logit - row_max), or of the sigmoids
  float demand[MAX_EXPERTS];
  float mass[MAX_EXPERTS];  // demand where rows count by their path commitment
  int assigned[MAX_EXPERTS];
  bool eligible[MAX_EXPERTS];
  bool pruned[MAX_EXPERTS];
  unsigned anchored[MAX_EXPERTS / 32];  // bit e: expert e is always eligible
  unsigned used[MAX_EXPERTS / 32];      // bit e: a real row is routed to expert e
  int group_members[MAX_GROUPS];    // eligible experts of each group
  float per_warp[MAX_WARPS];
};

struct Ranked {
  float value;
  int expert;  // -1: none
};

__device__ bool is_before(Ranked a, Ranked b) {
  return a.value > b.value || (a.value == b.value && a.expert < b.expert);
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// What the router ranks: the logits, or the scores plus the bias.
__device__ float choice(const Layer& layer, int row, int expert) {
  const float logit = layer.logit(row, expert);
  if (layer.scoring != SIGMOID_BIAS_GROUP) return logit;
  return rounded<LOGIT>(sigmoid(logit)) + layer.correction_bias[expert];
}

// The row's score of an expert, normalised over all experts.
__device__ float gate(const Layer& layer, const Shared& shared, int row, int expert) {
  const float logit = layer.logit(row, expert);
  if (layer.scoring == SIGMOID_BIAS_GROUP) {
    return sigmoid(logit) / fmaxf(shared.row_sum[row], SMALLEST_NORMAL);
  }
  return expf(logit - shared.row_max[row]) / shared.row_sum[row];
}

__device__ void clear(const Layer& layer, Shared& shared) {
  BLOCK_LOOP(expert, layer.num_experts) {
    for (int word = 0; word < ROW_WORDS; ++word) shared.wanted[word][expert] = 0;
  }
  BLOCK_LOOP(word, MAX_EXPERTS / 32) shared.used[word] = shared.anchored[word] = 0;
}

__device__ void set_bit(unsigned* words, int bit) { atomicOr(&words[bit / 32], 1u << bit % 32); }
__device__ bool has_bit(const unsigned* words, int bit) { return words[bit / 32] >> bit % 32 & 1u; }

// Whether the slot's expert is among the best few of its row that are always eligible; all of the
// root's are.
__device__ bool is_anchor(const Layer& layer, int row, int expert) {
  const int num_kept = row == 0 ? layer.experts_per_row : layer.num_anchored[row];
  if (num_kept <= 0 || num_kept >= layer.experts_per_row) return num_kept > 0;
  const Ranked own = {choice(layer, row, expert), expert};
  int place = 0;
  NOT_UNROLLED for (int slot = 0; slot < layer.experts_per_row; ++slot) {
    const int64 other = layer.natural_ids[row * layer.experts_per_row + slot];
    if (other < 0 || other >= layer.num_experts) continue;
    place += is_before({choice(layer, row, static_cast<int>(other)), static_cast<int>(other)}, own);
  }
  return place < num_kept;
}

// Natural top-k of the real rows and the anchors, as bits: setting them in any order gives the same
// words.
__device__ void mark_wanted(const Layer& layer, Shared& shared) {
  const int num_pairs = layer.num_rows * layer.experts_per_row;
  BLOCK_LOOP(pair, num_pairs) {
    const int row = pair / layer.experts_per_row;
    const int64 expert = layer.natural_ids[pair];
    if (layer.is_real[row] && expert >= 0 && expert < layer.num_experts) {
      atomicOr(&shared.wanted[row / 32][expert], 1u << row % 32);
      if (is_anchor(layer, row, static_cast<int>(expert))) {
        set_bit(shared.anchored, static_cast<int>(expert));
      }
    }
  }
}

// A warp a row: what turns its logits into gates.
__device__ void normalize_rows(const Layer& layer, Shared& shared) {
  WARP_LOOP(row, layer.num_rows) {
    float largest = negative_infinity();
    LANE_LOOP(expert, layer.num_experts) {
      largest = fmaxf(largest, layer.logit(row, expert));
    }
    largest = warp_max(largest);
    float sum = 0.0f;
    LANE_LOOP(expert, layer.num_experts) {
      const float logit = layer.logit(row, expert);
      sum += layer.scoring == SIGMOID_BIAS_GROUP ? sigmoid(logit) : expf(logit - largest);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      shared.row_max[row] = largest;
      shared.row_sum[row] = sum;
    }
  }
}

// A thread an expert, rows in ascending order; in fp64, as the reference sums, so that the rounding of
// the order cannot break a tie.
__device__ void collect_demand(const Layer& layer, Shared& shared) {
  BLOCK_LOOP(expert, layer.num_experts) {
    double demand = 0.0, mass = 0.0;
    int assigned = 0;
    NOT_UNROLLED for (int word = 0; word < ROW_WORDS; ++word) {
      unsigned rows = shared.wanted[word][expert];
      assigned += __popc(rows);
      NOT_UNROLLED for (; rows != 0; rows &= rows - 1) {
        const int row = word * 32 + __ffs(static_cast<int>(rows)) - 1;
        const float score = gate(layer, shared, row, expert);
        demand += score * layer.row_weights[row];
        mass += score * layer.path_commitment[row];
      }
    }
    shared.demand[expert] = static_cast<float>(demand);
    shared.mass[expert] = static_cast<float>(mass);
    shared.assigned[expert] = assigned;
  }
}

__device__ float rest(const Shared& shared, int expert) {
  return has_bit(shared.anchored, expert) ? 0.0f : shared.demand[expert];
}

// How many experts enter beside the anchors: the exponential of the entropy of their demand.
__device__ float effective_rank(const Layer& layer, Shared& shared) {
  float total = 0.0f;
  BLOCK_LOOP(expert, layer.num_experts) {
    total += rest(shared, expert);
  }
  total = fmaxf(block_sum(total, shared.per_warp), SMALLEST_NORMAL);
  float entropy = 0.0f;
  BLOCK_LOOP(expert, layer.num_experts) {
    const float share = rest(shared, expert) / total;
    if (share > 0.0f) entropy -= share * logf(share);
  }
  return expf(block_sum(entropy, shared.per_warp));
}

// The anchors, and of the others those in most demand.
__device__ void select_eligible(const Layer& layer, Shared& shared) {
  float size = 0.0f;
  if (layer.sizing == EFFECTIVE_RANK) {
    size = ceilf(layer.size_parameter * effective_rank(layer, shared) - RANK_TOLERANCE);
  }
  BLOCK_LOOP(expert, layer.num_experts) {
    const Ranked own = {rest(shared, expert), expert};
    int place = 0;
    // In the order of ids, not of demand: fp32 sums of non-negative numbers in one fixed order grow
    // with the set, so an expert further down never has less before it.
    float mass_before = 0.0f, total = 0.0f;
    for (int other = 0; other < layer.num_experts; ++other) {
      const Ranked rival = {rest(shared, other), other};
      total += rival.value;
      if (is_before(rival, own)) {
        ++place;
        mass_before += rival.value;
      }
    }
    const bool fits = layer.sizing == EFFECTIVE_RANK
                          ? static_cast<float>(place) < size
                          : mass_before < (layer.size_parameter - MASS_TOLERANCE) * total;
    shared.eligible[expert] = has_bit(shared.anchored, expert) || (fits && own.value > 0.0f);
  }
}

__device__ bool is_candidate(const Layer& layer, const Shared& shared, int expert) {
  return shared.eligible[expert] && !has_bit(shared.anchored, expert) && !layer.resident[expert];
}

// Drops the least wanted experts that would have to be fetched, while the assignments so displaced
// do not exceed those displaced already and K experts stay.
__device__ void prune_nonresident(const Layer& layer, Shared& shared) {
  BLOCK_LOOP(expert, layer.num_experts) {
    int budget = 0, spent = 0, place = 0, num_eligible = 0;
    const Ranked own = {shared.demand[expert], expert};
    for (int other = 0; other < layer.num_experts; ++other) {
      const Ranked rival = {shared.demand[other], other};
      num_eligible += shared.eligible[other];
      budget += shared.eligible[other] ? 0 : shared.assigned[other];
      if (!is_candidate(layer, shared, other) || is_before(rival, own)) continue;
      spent += shared.assigned[other];  // itself included
      place += other != expert;
    }
    shared.pruned[expert] = is_candidate(layer, shared, expert) && spent <= budget &&
                            place < num_eligible - layer.experts_per_row;
  }
  __syncthreads();  // everybody has read `eligible`
  BLOCK_LOOP(expert, layer.num_experts) {
    if (shared.pruned[expert]) shared.eligible[expert] = false;
  }
}

// The best two of a group by the row's choice, among the eligible ones only if asked.
__device__ void best_two(const Layer& layer, const Shared& shared, int row, int group,
                         bool only_eligible, Ranked& first, Ranked& second) {
  first = second = {negative_infinity(), -1};
  const int begin = group * layer.group_size();
  NOT_UNROLLED for (int expert = begin; expert < begin + layer.group_size(); ++expert) {
    if (only_eligible && !shared.eligible[expert]) continue;
    const Ranked candidate = {choice(layer, row, expert), expert};
    if (first.expert < 0 || is_before(candidate, first)) {
      second = first;
      first = candidate;
    } else if (second.expert < 0 || is_before(candidate, second)) {
      second = candidate;
    }
  }
}

// Bit g: whether the row chooses group g, by the sum of its two best. A warp calls it together.
__device__ unsigned chosen_groups(const Layer& layer, const Shared& shared, int row,
                                  bool only_eligible) {
  Ranked first, second, own = {negative_infinity(), lane_id()};
  if (lane_id() < layer.num_groups) {
    best_two(layer, shared, row, lane_id(), only_eligible, first, second);
    own.value = first.value + second.value;
  }
  int place = 0;
  NOT_UNROLLED for (int group = 0; group < layer.num_groups; ++group) {
    const Ranked rival = {__shfl_sync(ALL_LANES, own.value, group), group};
    place += is_before(rival, own);
  }
  return __ballot_sync(ALL_LANES, lane_id() < layer.num_groups && place < layer.groups_per_row);
}

// The root's two best experts of each group it chose itself stay eligible, so that masking cannot
// move its choice of groups. Counts the groups' members after that: the first warp, a lane a group.
__device__ void keep_root_groups(const Layer& layer, Shared& shared) {
  if (warp_id() != 0) return;
  const unsigned chosen = chosen_groups(layer, shared, 0, false);
  if (lane_id() >= layer.num_groups) return;
  if (chosen >> lane_id() & 1u) {
    Ranked first, second;
    best_two(layer, shared, 0, lane_id(), false, first, second);
    if (first.expert >= 0) shared.eligible[first.expert] = true;
    if (second.expert >= 0) shared.eligible[second.expert] = true;
  }
  int members = 0;
  for (int place = 0; place < layer.group_size(); ++place) {
    members += shared.eligible[lane_id() * layer.group_size() + place];
  }
  shared.group_members[lane_id()] = members;
}

__device__ bool is_choosable(const Shared& shared, int group) {
  return shared.group_members[group] >= 2;  // a group has two experts or more
}

// Whether some choice of groups holds fewer than K eligible experts: whether the poorest does.
__device__ bool is_starved(const Layer& layer, const Shared& shared) {
  int poorest = 0;
  NOT_UNROLLED for (int group = 0; group < layer.num_groups; ++group) {
    const int members =
        is_choosable(shared, group) ? shared.group_members[group] : layer.num_experts;
    int place = 0;
    for (int other = 0; other < layer.num_groups; ++other) {
      const int others =
          is_choosable(shared, other) ? shared.group_members[other] : layer.num_experts;
      place += others < members || (others == members && other < group);
    }
    if (place < layer.groups_per_row) poorest += members;
  }
  return poorest < layer.experts_per_row;
}

// Enlarges the set so that a group-limited row never needs an expert outside it.
__device__ void complete_groups(const Layer& layer, Shared& shared) {
  keep_root_groups(layer, shared);
  __syncthreads();
  const bool starved = is_starved(layer, shared);
  const int needed = (layer.experts_per_row + layer.groups_per_row - 1) / layer.groups_per_row;
  BLOCK_LOOP(expert, layer.num_experts) {
    const int group = expert / layer.group_size();
    const Ranked own = {shared.mass[expert], expert};
    int place = shared.group_members[group];  // members come before all outsiders
    for (int other = group * layer.group_size(); other < (group + 1) * layer.group_size(); ++other) {
      const Ranked rival = {shared.mass[other], other};
      place += !shared.eligible[other] && is_before(rival, own);
    }
    shared.pruned[expert] = starved && !shared.eligible[expert] &&
                            is_choosable(shared, group) && place < needed;
  }
  __syncthreads();  // everybody has read `eligible`
  BLOCK_LOOP(expert, layer.num_experts) {
    if (shared.pruned[expert]) shared.eligible[expert] = true;
  }
}

// The best allowed expert of the row that comes after `last`; the same in every lane.
__device__ Ranked next_best(const Layer& layer, const Shared& shared, int row, unsigned groups,
                            Ranked last) {
  Ranked best = {negative_infinity(), -1};
  LANE_LOOP(expert, layer.num_experts) {
    if (!shared.eligible[expert]) continue;
    if (layer.is_grouped() && !(groups >> expert / layer.group_size() & 1u)) continue;
    const Ranked candidate = {choice(layer, row, expert), expert};
    if (last.expert >= 0 && !is_before(last, candidate)) continue;
    if (best.expert < 0 || is_before(candidate, best)) best = candidate;
  }
  for (int step = WARP / 2; step > 0; step /= 2) {
    const Ranked other = {__shfl_xor_sync(ALL_LANES, best.value, step),
                          __shfl_xor_sync(ALL_LANES, best.expert, step)};
    if (other.expert >= 0 && (best.expert < 0 || is_before(other, best))) best = other;
  }
  return best;
}

// The expert of slot `lane_id()`, -1 in lanes beyond K and where the row finds none.
__device__ int constrained_topk(const Layer& layer, const Shared& shared, int row) {
  const unsigned groups = layer.is_grouped() ? chosen_groups(layer, shared, row, true) : ALL_LANES;
  int own = -1;
  Ranked last = {0.0f, -1};
  NOT_UNROLLED for (int slot = 0; slot < layer.experts_per_row; ++slot) {
    last = next_best(layer, shared, row, groups, last);
    if (last.expert < 0) break;
    if (slot == lane_id()) own = last.expert;
  }
  return own;
}

// The router's own rule on the new experts; lanes below K hold a slot each. `natural` is the slot's
// natural expert: with `NATURAL` the denominator stays that of the natural top-k.
__device__ float routing_weight(const Layer& layer, const Shared& shared, int row, int expert,
                                int natural) {
  const bool has_slot = lane_id() < layer.experts_per_row;
  const int kept = layer.combine == ROUTER ? expert : natural;
  if (layer.scoring == TOPK_SOFTMAX) {
    const float largest = warp_max(has_slot ? layer.logit(row, kept) : negative_infinity());
    const float sum = warp_sum(has_slot ? expf(layer.logit(row, kept) - largest) : 0.0f);
    const float weight = has_slot ? expf(layer.logit(row, expert) - largest) / sum : 0.0f;
    return layer.combine == ROUTER ? rounded<LOGIT>(weight) : weight;
  }
  const bool is_sigmoid = layer.scoring == SIGMOID_BIAS_GROUP;
  float score = 0.0f, kept_score = 0.0f;
  if (has_slot && is_sigmoid) {
    score = rounded<LOGIT>(sigmoid(layer.logit(row, expert)));
    kept_score = rounded<LOGIT>(sigmoid(layer.logit(row, kept)));
  } else if (has_slot) {
    score = gate(layer, shared, row, expert);
    kept_score = gate(layer, shared, row, kept);
  }
  const float sum = warp_sum(kept_score) + (is_sigmoid ? SIGMOID_EPSILON : 0.0f);
  if (layer.renormalize) score /= sum;
  return score * layer.scale;
}

// A warp a row. Rows with all their own experts eligible keep the router's ids and weights; so does
// a row that finds fewer than K eligible experts. Padded rows get id -1 and weight 0.
__device__ void route_rows(const Layer& layer, Shared& shared, WEIGHT* weights, int64* ids) {
  const bool has_slot = lane_id() < layer.experts_per_row;
  WARP_LOOP(row, layer.num_rows) {
    const int pair = row * layer.experts_per_row + lane_id();
    int64 expert = has_slot ? layer.natural_ids[pair] : 0;
    WEIGHT weight = has_slot ? layer.natural_weights[pair] : from_float<WEIGHT>(0.0f);
    const bool is_known = expert >= 0 && expert < layer.num_experts;
    const bool is_inside = !has_slot || (is_known && shared.eligible[expert]);
    if (!layer.is_real[row]) {
      expert = -1;
      weight = from_float<WEIGHT>(0.0f);
    } else if (!__all_sync(ALL_LANES, is_inside)) {
      const int moved = constrained_topk(layer, shared, row);
      if (__all_sync(ALL_LANES, !has_slot || moved >= 0)) {
        const int natural = is_known ? static_cast<int>(expert) : moved;
        weight = from_float<WEIGHT>(routing_weight(layer, shared, row, moved, natural));
        expert = moved;
      }
    }
    if (!has_slot) continue;
    weights[pair] = weight;
    ids[pair] = expert;
    if (expert >= 0 && expert < layer.num_experts) {
      set_bit(shared.used, static_cast<int>(expert));
    }
  }
}

// natural_union, eligible, experts_used, excluded_mass, routed_pairs. Counts are below 2^24, so
// their sums are exact in fp32.
__device__ void count(const Layer& layer, Shared& shared, float* counts) {
  float natural_union = 0.0f, num_eligible = 0.0f, num_used = 0.0f, mass = 0.0f, excluded = 0.0f;
  BLOCK_LOOP(expert, layer.num_experts) {
    natural_union += shared.assigned[expert] > 0;
    num_eligible += shared.eligible[expert];
    num_used += has_bit(shared.used, expert);
    mass += shared.mass[expert];
    excluded += shared.eligible[expert] ? 0.0f : shared.mass[expert];
  }
  float num_real = 0.0f;
  BLOCK_LOOP(row, layer.num_rows) num_real += layer.is_real[row];
  natural_union = block_sum(natural_union, shared.per_warp);
  num_eligible = block_sum(num_eligible, shared.per_warp);
  num_used = block_sum(num_used, shared.per_warp);
  mass = block_sum(mass, shared.per_warp);
  excluded = block_sum(excluded, shared.per_warp);
  num_real = block_sum(num_real, shared.per_warp);
  if (threadIdx.x != 0) return;
  counts[0] = natural_union;
  counts[1] = num_eligible;
  counts[2] = num_used;
  counts[3] = mass > 0.0f ? excluded / mass : 0.0f;
  counts[4] = num_real * static_cast<float>(layer.experts_per_row);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512) select_experts(
    const LOGIT* logits, const WEIGHT* natural_weights, const int64* natural_ids,
    const float* row_weights, const int* num_anchored, const float* path_commitment,
    const bool* is_real, const float* correction_bias, const bool* resident,
    const bool* is_enabled, int num_rows, int num_experts, int experts_per_row, int scoring,
    int renormalize, float scale, int num_groups, int groups_per_row, int sizing,
    float size_parameter, int combine, WEIGHT* weights, int64* ids, bool* eligible, float* counts) {
  __shared__ Shared shared;
  const Layer layer = {logits,          natural_weights, natural_ids,    row_weights, num_anchored,
                       path_commitment, is_real,         correction_bias, resident,   num_rows,
                       num_experts,     experts_per_row, scoring,        renormalize, scale,
                       num_groups,      groups_per_row,  sizing,         size_parameter, combine};
  const bool enabled = *is_enabled;  // read on the device: a captured graph must see it change
  clear(layer, shared);
  __syncthreads();
  mark_wanted(layer, shared);
  normalize_rows(layer, shared);
  __syncthreads();
  collect_demand(layer, shared);
  __syncthreads();
  if (enabled) {
    select_eligible(layer, shared);
    __syncthreads();
    if (resident != nullptr) {
      prune_nonresident(layer, shared);
      __syncthreads();
    }
    if (layer.is_grouped()) {
      complete_groups(layer, shared);
      __syncthreads();
    }
  } else {
    BLOCK_LOOP(expert, num_experts) {
      shared.eligible[expert] = true;
    }
    __syncthreads();
  }
  route_rows(layer, shared, weights, ids);
  BLOCK_LOOP(expert, num_experts) {
    eligible[expert] = shared.eligible[expert];
  }
  __syncthreads();
  count(layer, shared, counts);
}
