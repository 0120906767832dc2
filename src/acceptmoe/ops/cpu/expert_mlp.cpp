// acceptmoe::expert_mlp: the gated experts of a few rows, each expert of the union read once.
//
// Rows are sorted by expert. Then there are two sweeps over the union, which all threads share:
//   1. blocks of (expert, units): gate and up products, activation -> activated [pairs, I]
//   2. blocks of output columns: the down products of every expert of the union in ascending order,
//      times the routing weight, summed in fp32 and written once
// Blocks are small enough that one row with eight experts keeps every thread busy.
#include <vector>

#include "activations.h"
#include "parallel.h"
#include "tensors.h"

using namespace acceptmoe;

// The fields of `ExpertMlp` in ops/expert_mlp.py, in the same order.
struct ExpertMlpArguments {
  const void* hidden;        // [T, H] of hidden_dtype
  const int64_t* ids;        // [T, K]; below 0: no expert
  const float* routing;      // [T, K]
  const void* gate_up;       // [E, 2I, H], or [E, H, 2I] if is_transposed; of weight_dtype
  const void* gate_up_bias;  // [E, 2I], or null
  const void* down;          // [E, H, I], or [E, I, H] if is_transposed
  const void* down_bias;     // [E, H], or null
  void* output;              // [T, H] of hidden_dtype
  int64_t num_rows, experts_per_row, num_experts, hidden_size, inner_size;
  int64_t hidden_dtype, weight_dtype, activation, is_transposed, is_interleaved, num_threads;
  float limit, alpha;
};

namespace {

struct Expert {
  int64_t id;
  int64_t first, last;  // its pairs, in the order of sorting
};

// Every pair of a row and an expert, by expert, rows ascending.
struct Routing {
  std::vector<Expert> experts;
  std::vector<int64_t> rows;
  std::vector<float> weights;
  bool is_valid = true;
};

Routing sort_by_expert(const ExpertMlpArguments& a) {
  Routing routing;
  const int64_t num_pairs = a.num_rows * a.experts_per_row;
  std::vector<int64_t> place(a.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t id = a.ids[pair];
    if (id >= a.num_experts) routing.is_valid = false;
    if (id >= 0 && id < a.num_experts) ++place[id + 1];
  }
  for (int64_t id = 0; id < a.num_experts; ++id) {
    place[id + 1] += place[id];
    if (place[id + 1] > place[id]) routing.experts.push_back({id, place[id], place[id + 1]});
  }
  routing.rows.resize(place[a.num_experts]);
  routing.weights.resize(place[a.num_experts]);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t id = a.ids[pair];
    if (id < 0 || id >= a.num_experts) continue;
    routing.rows[place[id]] = pair / a.experts_per_row;
    routing.weights[place[id]++] = a.routing[pair];
  }
  return routing;
}

template <class W>
class ExpertMlp {
 public:
  explicit ExpertMlp(const ExpertMlpArguments& arguments)
      : a(arguments),
        routing(sort_by_expert(arguments)),
        num_pairs(int64_t(routing.rows.size())),
        hidden_padded(row_stride<W>(a.hidden_size)),
        inner_padded(row_stride<W>(a.inner_size)),
        units(block_of(a.inner_size, a.is_transposed ? 256 : largest_block<W>(a.hidden_size),
                       int64_t(routing.experts.size()))),
        columns(
            block_of(a.hidden_size, a.is_transposed ? 512 : largest_block<W>(a.inner_size), 1)),
        num_unit_blocks(num_blocks(a.inner_size, units)),
        num_first_tasks(int64_t(routing.experts.size()) * num_unit_blocks),
        num_second_tasks(num_blocks(a.hidden_size, columns)) {}

  bool is_valid() const { return routing.is_valid; }

  void run() {
    Workspace memory(num_bytes());
    packed_ = memory.take<Packed<W>>(a.num_rows * hidden_padded);
    activated_ = memory.take<Packed<W>>(num_pairs * inner_padded);
    for (int64_t t = 0; t < a.num_threads; ++t) {
      scratch_.push_back(memory.take<float>(scratch_size()));
      totals_.push_back(memory.take<float>(a.num_rows * columns));
    }
    TaskQueue packing, first_sweep, second_sweep;
    in_parallel(int(a.num_threads), [&](Team team) {
      packing.run(a.num_rows, [&](int64_t row) {
        pack_row<W>(a.hidden, a.hidden_dtype, row, a.hidden_size, hidden_padded, a.is_transposed,
                    packed_ + row * hidden_padded);
      });
      team.wait();
      first_sweep.run_looking_ahead(num_first_tasks, [&](int64_t task, int64_t next) {
        gate_and_up(task, next, scratch_[team.thread]);
      });
      team.wait();
      second_sweep.run_looking_ahead(num_second_tasks, [&](int64_t task, int64_t next) {
        down(task, next, scratch_[team.thread], totals_[team.thread]);
      });
    });
  }

 private:
  static int64_t num_blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

  // Outputs in a task: at most `largest`, fewer when there would not be some for every thread.
  int64_t block_of(int64_t size, int64_t largest, int64_t num_matrices) const {
    const int64_t share = size * num_matrices / (4 * a.num_threads);
    return round_up(std::clamp<int64_t>(share, kPair, std::max<int64_t>(largest, kPair)), kPair);
  }

  int64_t scratch_size() const { return kMaxRows * std::max(2 * units, columns); }

  int64_t num_bytes() const {
    return Workspace::size_of(a.num_rows * hidden_padded * sizeof(Packed<W>)) +
           Workspace::size_of(num_pairs * inner_padded * sizeof(Packed<W>)) +
           a.num_threads * (Workspace::size_of(scratch_size() * 4) +
                            Workspace::size_of(a.num_rows * columns * 4));
  }

  Weights<W> gate_up_of(int64_t id) const {
    const W* data = static_cast<const W*>(a.gate_up) + id * 2 * a.inner_size * a.hidden_size;
    const int64_t stride = a.is_transposed ? 2 * a.inner_size : a.hidden_size;
    return {data, stride, a.hidden_size, a.is_transposed != 0};
  }

  // The gates of a task of the first sweep; with the ups between them, if they are interleaved.
  Weights<W> gates_of(int64_t task) const {
    if (task == num_first_tasks) return {};
    const int64_t first = task % num_unit_blocks * units;
    const Weights<W> weights = gate_up_of(routing.experts[task / num_unit_blocks].id);
    return weights.from(a.is_interleaved ? 2 * first : first);
  }

  Weights<W> ups_of(int64_t task) const {
    return task == num_first_tasks ? Weights<W>{} : gates_of(task).from(a.inner_size);
  }

  // The columns of a task of the second sweep, of the expert `index` of the union.
  Weights<W> columns_of(int64_t task, size_t index) const {
    if (task == num_second_tasks) return {};
    const W* data = static_cast<const W*>(a.down);
    data += routing.experts[index].id * a.inner_size * a.hidden_size;
    const int64_t stride = a.is_transposed ? a.hidden_size : a.inner_size;
    return Weights<W>{data, stride, a.inner_size, a.is_transposed != 0}.from(task * columns);
  }

  // Some units of one expert, for all of its rows.
  void gate_and_up(int64_t task, int64_t next, float* scratch) {
    const Expert& expert = routing.experts[task / num_unit_blocks];
    const int64_t first = task % num_unit_blocks * units, stride = 2 * units;
    const int64_t count = std::min(units, a.inner_size - first);
    for_row_groups(expert.last - expert.first, [&](int64_t row, int size, int64_t group,
                                                   int64_t num_groups) {
      const int64_t pair = expert.first + row;
      const Packed<W>* rows[kMaxRows];
      for (int r = 0; r < size; ++r) rows[r] = packed_ + routing.rows[pair + r] * hidden_padded;
      const auto multiply_block = [&](Weights<W> block, Weights<W> next_block, int64_t num_outputs,
                                      float* out) {
        const auto prefetch = Prefetch::of(next_block, num_outputs, group, num_groups);
        multiply(size, rows, block, num_outputs, prefetch, out, stride);
      };
      if (a.is_interleaved) {
        multiply_block(gates_of(task), gates_of(next), 2 * count, scratch);
      } else {
        multiply_block(gates_of(task), gates_of(next), count, scratch);
        multiply_block(ups_of(task), ups_of(next), count, scratch + units);
      }
      for (int r = 0; r < size; ++r)
        activate_row(expert.id, first, count, scratch + r * stride,
                     activated_ + (pair + r) * inner_padded);
    });
  }

  // Gate and up products of one row, plus biases, into the row's activated units.
  void activate_row(int64_t id, int64_t first, int64_t count, const float* products,
                    Packed<W>* row) {
    for (int64_t base = 0; base < count; base += kLanes) {
      float gate[kLanes] = {}, up[kLanes] = {};
      const int lanes = int(std::min<int64_t>(kLanes, count - base));
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t unit = base + lane;
        gate[lane] = products[a.is_interleaved ? 2 * unit : unit];
        up[lane] = products[a.is_interleaved ? 2 * unit + 1 : units + unit];
        if (a.gate_up_bias == nullptr) continue;
        const W* bias = static_cast<const W*>(a.gate_up_bias) + id * 2 * a.inner_size;
        const int64_t u = first + unit;
        gate[lane] += to_float(bias[a.is_interleaved ? 2 * u : u]);
        up[lane] += to_float(bias[a.is_interleaved ? 2 * u + 1 : a.inner_size + u]);
      }
      float out[kLanes];
      store(out, activate(Activation(a.activation), load<Floats>(gate), load<Floats>(up), a.limit,
                          a.alpha));
      for (int lane = 0; lane < lanes; ++lane) {
        const int64_t unit = first + base + lane;
        from_float(out[lane], &row[a.is_transposed ? unit : packed_index<W>(unit)]);
      }
    }
    if (first + count == a.inner_size)  // what is between the last unit and the end of the row
      for (int64_t unit = a.inner_size; unit < inner_padded; ++unit)
        row[a.is_transposed ? unit : packed_index<W>(unit)] = {};
  }

  // Some columns of the output, of all rows.
  void down(int64_t task, int64_t next, float* scratch, float* totals) {
    const int64_t first = task * columns, count = std::min(columns, a.hidden_size - first);
    std::fill(totals, totals + a.num_rows * columns, 0.0f);
    for (size_t index = 0; index < routing.experts.size(); ++index) {
      const Expert& expert = routing.experts[index];
      const bool is_last = index + 1 == routing.experts.size();
      const Weights<W> block = columns_of(task, index);
      const Weights<W> next_block = is_last ? columns_of(next, 0) : columns_of(task, index + 1);
      for_row_groups(expert.last - expert.first, [&](int64_t row, int size, int64_t group,
                                                     int64_t num_groups) {
        const int64_t pair = expert.first + row;
        const Packed<W>* rows[kMaxRows];
        for (int r = 0; r < size; ++r) rows[r] = activated_ + (pair + r) * inner_padded;
        const auto prefetch = Prefetch::of(next_block, count, group, num_groups);
        multiply(size, rows, block, count, prefetch, scratch, columns);
        for (int r = 0; r < size; ++r)
          add_weighted(expert.id, first, count, routing.weights[pair + r], scratch + r * columns,
                       totals + routing.rows[pair + r] * columns);
      });
    }
    for (int64_t row = 0; row < a.num_rows; ++row)
      write_floats(totals + row * columns, count, a.hidden_dtype, a.output,
                   row * a.hidden_size + first);
  }

  void add_weighted(int64_t id, int64_t first, int64_t count, float weight, float* products,
                    float* total) const {
    if (a.down_bias != nullptr) {
      const W* bias = static_cast<const W*>(a.down_bias) + id * a.hidden_size + first;
      for (int64_t n = 0; n < count; ++n) products[n] += to_float(bias[n]);
    }
    for (int64_t n = 0; n < count; ++n) total[n] += weight * products[n];
  }

  const ExpertMlpArguments& a;
  const Routing routing;
  const int64_t num_pairs, hidden_padded, inner_padded;
  const int64_t units, columns;  // of one task of the first and of the second sweep
  const int64_t num_unit_blocks, num_first_tasks, num_second_tasks;
  Packed<W>* packed_ = nullptr;     // [T, hidden_padded]
  Packed<W>* activated_ = nullptr;  // [pairs, inner_padded]
  std::vector<float*> scratch_;  // for each thread: the products of a row group
  std::vector<float*> totals_;   // for each thread: [T, columns]
};

}  // namespace

extern "C" int acceptmoe_expert_mlp(const ExpertMlpArguments* arguments) {
  try {
    return with_weights(arguments->weight_dtype, arguments->hidden_dtype, [&](auto zero) {
      ExpertMlp<decltype(zero)> op(*arguments);
      if (!op.is_valid()) return int(kBadId);
      op.run();
      return int(kOk);
    });
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}
