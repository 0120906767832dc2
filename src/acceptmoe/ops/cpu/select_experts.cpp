// acceptmoe::select_experts: selection and constrained routing of one layer in one pass.
//
// The steps and their names are those of selection.py and routing.py, which are what is correct:
// natural top-k, demand, anchors, size, eligible set, pruning, group floor, constrained routing.
// One thread: at T = 32 rows and E = 128 experts all of it takes less than waking a second one.
// Demand is summed in double precision, so that the order of the rows does not matter; rows are
// ranked by what the router ranks, and of equals the lower expert id is the better one.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ranking.h"
#include "tensors.h"

using namespace acceptmoe;

namespace {

enum Scoring : int64_t { kSoftmaxTopK, kTopKSoftmax, kSigmoidBiasGroup };
enum Sizing : int64_t { kEffectiveRank, kMass };
enum Combine : int64_t { kRouter, kNatural };

constexpr double kRankTolerance = 1e-3;  // RANK_TOLERANCE and MASS_TOLERANCE of selection.py
constexpr double kMassTolerance = 1e-6;
constexpr float kSigmoidEpsilon = 1e-20f;  // EPSILON of routing.py
constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

// The fields of `ARGUMENTS` in ops/select_experts.py, in the same order; eight bytes each.
struct SelectExpertsArguments {
  const void* logits;            // [T, E] of logits_dtype
  const void* natural_weights;   // [T, K] of weights_dtype
  const int64_t* natural_ids;    // [T, K]
  const float* row_weights;      // [T]
  const int32_t* num_anchored;   // [T]
  const float* path_commitment;  // [T]
  const bool* is_real;           // [T]
  const float* correction_bias;  // [E], or null
  const bool* resident;          // [E], or null: all are
  const bool* is_enabled;        // one value
  void* weights;                 // [T, K] of weights_dtype
  int64_t* ids;                  // [T, K]
  bool* eligible;                // [E]
  float* counts;                 // [5]
  int64_t num_rows, num_experts, experts_per_row, logits_dtype, weights_dtype;
  int64_t scoring, renormalize, num_groups, groups_per_row, sizing, combine;
  double scale, size_parameter;
};

namespace {

// Logit is the type of the logits, Weight that of the routing weights.
template <class Logit, class Weight>
class Layer {
 public:
  explicit Layer(const SelectExpertsArguments& arguments)
      : a(arguments),
        stride_(round_up(a.num_experts, kLanes)),
        memory_(num_bytes()),
        choice_(memory_.take<float>(a.num_rows * stride_)),
        scores_(memory_.take<float>(a.num_rows * stride_)),
        sums_(memory_.take<float>(a.num_rows)),
        demand_(memory_.take<double>(a.num_experts)),
        mass_(memory_.take<double>(a.num_experts)),
        assigned_(memory_.take<int64_t>(a.num_experts)),
        members_(memory_.take<int64_t>(a.num_experts)),
        order_(memory_.take<Ranked>(a.num_experts)),
        best_(memory_.take<Ranked>(a.num_experts)),
        is_anchored_(memory_.take<bool>(a.num_experts)),
        is_used_(memory_.take<bool>(a.num_experts)),
        is_chosen_(memory_.take<bool>(a.num_experts)) {}

  Status run() {
    if (!has_valid_ids()) return kBadId;
    collect_wanted();
    if (*a.is_enabled) {
      for (int64_t row = 0; row < a.num_rows; ++row)
        if (a.is_real[row] || row == 0) score_row(row);
      collect_anchors();
      collect_demand();
      select_eligible();
      if (a.resident != nullptr) prune_nonresident();
      if (is_grouped()) complete_groups();
    } else {
      std::fill_n(a.eligible, a.num_experts, true);
    }
    list_members();
    std::fill_n(is_used_, a.num_experts, false);
    for (int64_t row = 0; row < a.num_rows; ++row) route_row(row);
    count();
    return kOk;
  }

 private:
  int64_t num_bytes() const {
    const int64_t per_expert = 2 * sizeof(double) + 2 * sizeof(int64_t) + 2 * sizeof(Ranked) + 3;
    return 2 * Workspace::size_of(a.num_rows * stride_ * sizeof(float)) +
           Workspace::size_of(a.num_rows * sizeof(float)) + per_expert * a.num_experts +
           9 * kCacheLine;
  }

  bool is_grouped() const { return a.groups_per_row < a.num_groups; }
  int64_t group_size() const { return a.num_experts / a.num_groups; }
  const int64_t* natural_ids(int64_t row) const { return a.natural_ids + row * a.experts_per_row; }
  const float* choice(int64_t row) const { return choice_ + row * stride_; }

  bool has_valid_ids() const {
    const uint64_t limit = uint64_t(a.num_experts);
    return std::all_of(a.natural_ids, a.natural_ids + a.num_rows * a.experts_per_row,
                       [limit](int64_t id) { return uint64_t(id) < limit; });
  }

  // What the row's router ranks, and its scores with their sum; the vectors' ends are padded.
  void score_row(int64_t row) {
    const Logit* logits = static_cast<const Logit*>(a.logits) + row * a.num_experts;
    float* choice = choice_ + row * stride_;
    float* scores = scores_ + row * stride_;
    for (int64_t e = 0; e < a.num_experts; ++e) choice[e] = to_float(logits[e]);
    std::fill(choice + a.num_experts, choice + stride_, -kInfinity);
    const bool is_sigmoid = a.scoring == kSigmoidBiasGroup;
    const float largest = is_sigmoid ? 0.0f : largest_of(choice);
    Floats sum{};
    for (int64_t e = 0; e < stride_; e += kLanes) {
      const Floats x = load<Floats>(choice + e);
      const Floats score = is_sigmoid ? 1.0f / (1.0f + exponential(-x)) : exponential(x - largest);
      store(scores + e, score);
      sum += score;
    }
    sums_[row] = sum_lanes(sum);
    if (!is_sigmoid) return;
    for (int64_t e = 0; e < a.num_experts; ++e)
      choice[e] = as_router_has(scores[e]) + (a.correction_bias ? a.correction_bias[e] : 0.0f);
  }

  float largest_of(const float* padded) const {
    Floats largest = splat(-kInfinity);
    for (int64_t e = 0; e < stride_; e += kLanes) {
      const Floats x = load<Floats>(padded + e);
      largest = x > largest ? x : largest;
    }
    float lanes[kLanes];
    store(lanes, largest);
    return *std::max_element(lanes, lanes + kLanes);
  }

  // A sigmoid score as the router computes it, in the type of its logits.
  static float as_router_has(float score) {
    Logit rounded;
    from_float(score, &rounded);
    return to_float(rounded);
  }

  float gate(int64_t row, int64_t expert) const {
    const float sum = std::max(sums_[row], std::numeric_limits<float>::min());
    return scores_[row * stride_ + expert] / sum;
  }

  // How many real rows want each expert.
  void collect_wanted() {
    std::fill_n(assigned_, a.num_experts, int64_t{0});
    for (int64_t row = 0; row < a.num_rows; ++row) {
      if (!a.is_real[row]) continue;
      for (int64_t k = 0; k < a.experts_per_row; ++k) ++assigned_[natural_ids(row)[k]];
    }
  }

  // The root's own experts, and of the other rows' the best few each.
  void collect_anchors() {
    std::fill_n(is_anchored_, a.num_experts, false);
    for (int64_t row = 0; row < a.num_rows; ++row) {
      const int64_t num_kept = row == 0 ? a.experts_per_row : a.num_anchored[row];
      if (!a.is_real[row] || num_kept <= 0) continue;
      const bool are_all_kept = num_kept >= a.experts_per_row;
      for (int64_t k = 0; k < a.experts_per_row; ++k)
        if (are_all_kept || place_in_row(row, k) < num_kept) is_anchored_[natural_ids(row)[k]] = true;
    }
  }

  // How many of the row's own experts its router ranks before the one in slot `k`.
  int64_t place_in_row(int64_t row, int64_t k) const {
    const int64_t* ids = natural_ids(row);
    const auto ranked = [&](int64_t slot) { return Ranked{choice(row)[ids[slot]], ids[slot]}; };
    const Ranked own = ranked(k);
    int64_t place = 0;
    for (int64_t slot = 0; slot < a.experts_per_row; ++slot) place += is_before(ranked(slot), own);
    return place;
  }

  void collect_demand() {
    std::fill_n(demand_, a.num_experts, 0.0);
    std::fill_n(mass_, a.num_experts, 0.0);
    for (int64_t row = 0; row < a.num_rows; ++row) {
      if (!a.is_real[row]) continue;
      for (int64_t k = 0; k < a.experts_per_row; ++k) {
        const int64_t id = natural_ids(row)[k];
        demand_[id] += gate(row, id) * a.row_weights[row];
        mass_[id] += gate(row, id) * a.path_commitment[row];
      }
    }
    // The pure functions round the sums to fp32 before they compare them.
    for (int64_t e = 0; e < a.num_experts; ++e) {
      demand_[e] = float(demand_[e]);
      mass_[e] = float(mass_[e]);
    }
  }

  // The anchors, and of the others those in most demand.
  void select_eligible() {
    std::copy_n(is_anchored_, a.num_experts, a.eligible);
    int64_t count = 0;
    double total = 0.0;
    for (int64_t e = 0; e < a.num_experts; ++e) {
      if (is_anchored_[e] || !(demand_[e] > 0.0)) continue;
      order_[count++] = {float(demand_[e]), e};
      total += demand_[e];
    }
    std::sort(order_, order_ + count, is_before);
    const double rank = a.size_parameter * effective_rank(count, total) - kRankTolerance;
    const double share = (a.size_parameter - kMassTolerance) * total;
    double before = 0.0;
    for (int64_t place = 0; place < count; ++place) {
      if (!(a.sizing == kMass ? before < share : double(place) < rank)) break;
      a.eligible[order_[place].id] = true;
      before += order_[place].value;
    }
  }

  double effective_rank(int64_t count, double total) const {
    double entropy = 0.0;
    if (a.sizing != kEffectiveRank) return entropy;
    for (int64_t place = 0; place < count; ++place) {
      const double share = order_[place].value / total;
      entropy -= share * std::log(share);
    }
    return std::exp(entropy);
  }

  // Drops the least wanted experts that would have to be fetched, the higher id first among equals,
  // while the assignments so displaced do not exceed those displaced already and K experts stay.
  void prune_nonresident() {
    int64_t budget = 0, num_eligible = 0, count = 0;
    for (int64_t e = 0; e < a.num_experts; ++e) {
      num_eligible += a.eligible[e];
      budget += a.eligible[e] ? 0 : assigned_[e];
      if (a.eligible[e] && !is_anchored_[e] && !a.resident[e])
        order_[count++] = {float(demand_[e]), e};
    }
    std::sort(order_, order_ + count, is_before);
    for (; count > 0 && num_eligible > a.experts_per_row; --count, --num_eligible) {
      const int64_t id = order_[count - 1].id;
      budget -= assigned_[id];
      if (budget < 0) return;
      a.eligible[id] = false;
    }
  }

  // The best groups of a row by the sum of their two best experts among those offered.
  template <class IsOffered>
  BestFew best_groups(int64_t row, IsOffered is_offered) {
    BestFew groups(best_ + 2, a.groups_per_row);
    for (int64_t group = 0; group < a.num_groups; ++group) {
      const BestFew two = best_two(row, group, is_offered);
      const bool is_choosable = two.is_full();
      groups.offer(is_choosable ? two[0].value + two[1].value : -kInfinity, group);
    }
    return groups;
  }

  template <class IsOffered>
  BestFew best_two(int64_t row, int64_t group, IsOffered is_offered) {
    BestFew two(best_, 2);
    for (int64_t e = group * group_size(); e < (group + 1) * group_size(); ++e)
      if (is_offered(e)) two.offer(choice(row)[e], e);
    return two;
  }

  // Enlarges the set so that a group-limited row never needs an expert outside it.
  void complete_groups() {
    const auto every = [](int64_t) { return true; };
    const BestFew chosen = best_groups(0, every);
    for (int64_t place = 0; place < a.groups_per_row; ++place) {
      const BestFew two = best_two(0, chosen[place].id, every);
      a.eligible[two[0].id] = a.eligible[two[1].id] = true;
    }
    if (!is_starved()) return;
    const int64_t needed = (a.experts_per_row + a.groups_per_row - 1) / a.groups_per_row;
    for (int64_t group = 0; group < a.num_groups; ++group)
      if (members_[group] >= 2) fill_group(group, needed - members_[group]);
  }

  // Whether the poorest choosable groups together hold fewer than K; leaves the sizes in `members_`.
  bool is_starved() {
    int64_t* sizes = members_ + a.num_groups;  // two of them fit: a group has two or more experts
    for (int64_t group = 0; group < a.num_groups; ++group) {
      const bool* eligible = a.eligible + group * group_size();
      members_[group] = std::count(eligible, eligible + group_size(), true);
      sizes[group] = members_[group] >= 2 ? members_[group] : a.num_experts;
    }
    std::partial_sort(sizes, sizes + a.groups_per_row, sizes + a.num_groups);
    int64_t held = 0;
    for (int64_t place = 0; place < a.groups_per_row; ++place) held += sizes[place];
    return held < a.experts_per_row;
  }

  void fill_group(int64_t group, int64_t num_missing) {
    if (num_missing <= 0) return;
    int64_t count = 0;
    for (int64_t e = group * group_size(); e < (group + 1) * group_size(); ++e)
      if (!a.eligible[e]) order_[count++] = {float(mass_[e]), e};
    std::sort(order_, order_ + count, is_before);
    for (int64_t place = 0; place < std::min(num_missing, count); ++place)
      a.eligible[order_[place].id] = true;
  }

  void list_members() {
    num_members_ = 0;
    for (int64_t e = 0; e < a.num_experts; ++e)
      if (a.eligible[e]) members_[num_members_++] = e;
  }

  void route_row(int64_t row) {
    const int64_t first = row * a.experts_per_row;
    const int64_t* natural = natural_ids(row);
    Weight* weights = static_cast<Weight*>(a.weights) + first;
    int64_t* ids = a.ids + first;
    if (!a.is_real[row]) {
      std::fill_n(ids, a.experts_per_row, int64_t{-1});
      std::fill_n(weights, a.experts_per_row, Weight{});
      return;
    }
    const bool is_inside = std::all_of(natural, natural + a.experts_per_row,
                                       [this](int64_t id) { return a.eligible[id]; });
    if (is_inside || !move_row(row, ids, weights)) {
      std::copy_n(natural, a.experts_per_row, ids);
      std::copy_n(static_cast<const Weight*>(a.natural_weights) + first, a.experts_per_row, weights);
    }
    for (int64_t k = 0; k < a.experts_per_row; ++k) is_used_[ids[k]] = true;
  }

  // The row's best K inside the set; false where there are not as many.
  bool move_row(int64_t row, int64_t* ids, Weight* weights) {
    BestFew best(order_, a.experts_per_row);
    if (is_grouped()) choose_groups(row);
    for (int64_t i = 0; i < num_members_; ++i) {
      const int64_t id = members_[i];
      if (!is_grouped() || is_chosen_[id / group_size()]) best.offer(choice(row)[id], id);
    }
    if (!best.is_full()) return false;
    for (int64_t k = 0; k < a.experts_per_row; ++k) ids[k] = best[k].id;
    weigh_row(row, ids, weights);
    return true;
  }

  void choose_groups(int64_t row) {
    const BestFew chosen = best_groups(row, [this](int64_t id) { return a.eligible[id]; });
    std::fill_n(is_chosen_, a.num_groups, false);
    for (int64_t place = 0; place < a.groups_per_row; ++place) is_chosen_[chosen[place].id] = true;
  }

  // The router's own rule on the new experts; `kNatural` keeps the natural top-k's denominator.
  void weigh_row(int64_t row, const int64_t* ids, Weight* weights) const {
    const int64_t* kept = a.combine == kRouter ? ids : natural_ids(row);
    const bool is_softmax_of_few = a.scoring == kTopKSoftmax;
    float largest = -kInfinity, sum = 0.0f;
    for (int64_t k = 0; k < a.experts_per_row; ++k)
      largest = std::max(largest, choice(row)[kept[k]]);
    const auto score = [&](int64_t id) {
      if (is_softmax_of_few) return std::exp(choice(row)[id] - largest);
      if (a.scoring == kSoftmaxTopK) return gate(row, id);
      return as_router_has(scores_[row * stride_ + id]);
    };
    for (int64_t k = 0; k < a.experts_per_row; ++k) sum += score(kept[k]);
    if (a.scoring == kSigmoidBiasGroup) sum += kSigmoidEpsilon;
    for (int64_t k = 0; k < a.experts_per_row; ++k) {
      float weight = score(ids[k]);
      if (is_softmax_of_few || a.renormalize) weight /= sum;
      if (is_softmax_of_few && a.combine == kRouter) weight = as_router_has(weight);
      if (!is_softmax_of_few) weight *= float(a.scale);
      from_float(weight, weights + k);
    }
  }

  void count() const {
    const int64_t num_real = std::count(a.is_real, a.is_real + a.num_rows, true);
    double mass = 0.0, excluded = 0.0;
    for (int64_t e = 0; *a.is_enabled && e < a.num_experts; ++e) {
      mass += mass_[e];
      excluded += a.eligible[e] ? 0.0 : mass_[e];
    }
    a.counts[0] = float(a.num_experts - std::count(assigned_, assigned_ + a.num_experts, 0));
    a.counts[1] = float(num_members_);
    a.counts[2] = float(std::count(is_used_, is_used_ + a.num_experts, true));
    a.counts[3] = mass > 0.0 ? float(excluded / mass) : 0.0f;
    a.counts[4] = float(num_real * a.experts_per_row);
  }

  const SelectExpertsArguments& a;
  int64_t stride_;
  Workspace memory_;
  float *choice_, *scores_, *sums_;  // [T, stride_] twice, [T]
  double *demand_, *mass_;           // [E]: rows count by row_weights, by path_commitment
  int64_t *assigned_, *members_;     // [E]
  Ranked *order_, *best_;            // [E], working memory
  bool *is_anchored_, *is_used_, *is_chosen_;
  int64_t num_members_ = 0;
};

}  // namespace

extern "C" int acceptmoe_select_experts(const SelectExpertsArguments* arguments) {
  try {
    return with_dtype(arguments->logits_dtype, [&](auto logit) {
      return with_dtype(arguments->weights_dtype, [&](auto weight) {
        return Layer<decltype(logit), decltype(weight)>(*arguments).run();
      });
    });
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}
