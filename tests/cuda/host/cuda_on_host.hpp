// Builds a .cu file of ours unchanged as C++17 and runs it: the threads of a block are fibers of one
// system thread, blocks run one after another.
//
// ThreadSanitizer takes each fiber for a thread (its fiber interface) and gets told of every
// __syncthreads and __syncwarp, and of nothing else. So it judges the order that the barriers
// enforce, not the one that happened: a missing barrier is found in the first run, each time.
// Shuffles exchange values and order no memory, as on a device. A fiber runs until its next barrier,
// so without sanitizer too a value that another thread has yet to write is missing.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
}
#define HOST_UNWATCHED __attribute__((no_sanitize_thread, noinline))
#else
#define HOST_UNWATCHED
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
}
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // no guard zones in a section of its own
#else
#define __shared__ static __attribute__((section("cuda_shared")))
extern "C" char __start_cuda_shared[] __attribute__((weak));
extern "C" char __stop_cuda_shared[] __attribute__((weak));
#endif

using std::max;
using std::min;

struct uint4 {
  unsigned x, y, z, w;
};

namespace host {

constexpr int WARP_SIZE = 32;
constexpr size_t STACK_BYTES = 256 * 1024;

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "kernel on the host: %s\n", what);
  std::exit(3);
}

// A place where `size` threads wait for each other. Twice the slots: a thread can be one exchange
// ahead of another, never two.
struct Barrier {
  int size = 0, arrived = 0;
  unsigned generation = 0;
  int operation = 0;  // what those waiting are in; 0: nobody waits
  uint64_t slots[2][WARP_SIZE];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int thread = 0;
  bool is_done = false;
  Barrier* waits_for = nullptr;
  unsigned seen_generation = 0;
  void* tsan = nullptr;
  void* fake_stack = nullptr;
};

struct Machine {
  ucontext_t main_context;
  void* main_tsan = nullptr;
  void* main_fake_stack = nullptr;
  const void* main_stack_bottom = nullptr;
  size_t main_stack_size = 0;
  std::vector<Fiber> fibers;
  Barrier block;
  std::vector<Barrier> warps;
  Fiber* current = nullptr;
  unsigned block_index = 0, num_blocks = 0;
  void (*body)(void*) = nullptr;
  void* body_argument = nullptr;
};

inline Machine machine;

HOST_UNWATCHED inline Dim3 thread_index() {
  return {static_cast<unsigned>(machine.current->thread), 0, 0};
}
HOST_UNWATCHED inline Dim3 block_index() { return {machine.block_index, 0, 0}; }
HOST_UNWATCHED inline Dim3 block_size() { return {static_cast<unsigned>(machine.block.size), 1, 1}; }
HOST_UNWATCHED inline Dim3 grid_size() { return {machine.num_blocks, 1, 1}; }

HOST_UNWATCHED inline void switch_to_main(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fiber.is_done ? nullptr : &fiber.fake_stack,
                                 machine.main_stack_bottom, machine.main_stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(machine.main_tsan, 1);  // 1: the switch itself orders nothing
#endif
  swapcontext(&fiber.context, &machine.main_context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
}

// Returns once all threads of `barrier` have arrived at the same operation.
HOST_UNWATCHED inline void wait_for_all(Barrier& barrier, int operation) {
  if (barrier.operation != 0 && barrier.operation != operation) {
    fail("threads of one warp or block are in different collective operations");
  }
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    barrier.operation = 0;
    ++barrier.generation;
    return;
  }
  barrier.operation = operation;
  Fiber& fiber = *machine.current;
  fiber.waits_for = &barrier;
  fiber.seen_generation = generation;
  while (barrier.generation == generation) switch_to_main(fiber);
}

HOST_UNWATCHED inline Barrier& own_warp() {
  return machine.warps[machine.current->thread / WARP_SIZE];
}

// Everything before a barrier in any thread comes before everything after it in any other. One token
// for even and one for odd generations: a thread that is already at the next barrier must not seem
// to be ordered before those that have yet to leave this one.
HOST_UNWATCHED inline void synchronize(Barrier& barrier, int operation) {
  [[maybe_unused]] void* token = barrier.slots[barrier.generation % 2];
#if defined(__SANITIZE_THREAD__)
  __tsan_release(token);
#endif
  wait_for_all(barrier, operation);
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(token);
#endif
}

// Every lane's `value`, as raw bits; `all` has a place for each lane.
HOST_UNWATCHED inline void exchange(uint64_t value, int operation, uint64_t* all) {
  Barrier& warp = own_warp();
  uint64_t* slots = warp.slots[warp.generation % 2];
  slots[machine.current->thread % WARP_SIZE] = value;
  wait_for_all(warp, operation);
  for (int lane = 0; lane < WARP_SIZE; ++lane) all[lane] = slots[lane];
}

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T of_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
T shuffle(unsigned mask, T value, int source, int operation) {
  if (mask != 0xffffffffu) fail("a collective operation of a part of a warp is not supported");
  uint64_t all[WARP_SIZE];
  exchange(to_bits(value), operation, all);
  return of_bits<T>(all[source % WARP_SIZE]);
}

inline int lane() { return static_cast<int>(thread_index().x) % WARP_SIZE; }

enum Operation { SYNC_THREADS = 1, SYNC_WARP, SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, BALLOT, MATCH };

}  // namespace host

#define threadIdx (host::thread_index())
#define blockIdx (host::block_index())
#define blockDim (host::block_size())
#define gridDim (host::grid_size())

inline void __syncthreads() { host::synchronize(host::machine.block, host::SYNC_THREADS); }
inline void __syncwarp(unsigned = 0xffffffffu) {
  host::synchronize(host::own_warp(), host::SYNC_WARP);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return host::shuffle(mask, value, source, host::SHUFFLE);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  return host::shuffle(mask, value, host::lane() ^ step, host::SHUFFLE_XOR);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int source = host::lane() - step;
  return host::shuffle(mask, value, source < 0 ? host::lane() : source, host::SHUFFLE_UP);
}

template <typename T>
unsigned lanes_where(T value, T wanted, host::Operation operation) {
  uint64_t all[host::WARP_SIZE];
  host::exchange(host::to_bits(value), operation, all);
  unsigned lanes = 0;
  for (int lane = 0; lane < host::WARP_SIZE; ++lane) {
    lanes |= static_cast<unsigned>(all[lane] == host::to_bits(wanted)) << lane;
  }
  return lanes;
}
inline unsigned __ballot_sync(unsigned, bool is_true) {
  return lanes_where(is_true, true, host::BALLOT);
}
inline int __all_sync(unsigned mask, bool is_true) {
  return __ballot_sync(mask, is_true) == 0xffffffffu;
}
inline int __any_sync(unsigned mask, bool is_true) { return __ballot_sync(mask, is_true) != 0; }
inline unsigned __match_any_sync(unsigned, int value) {
  return lanes_where(value, value, host::MATCH);
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Relaxed, as on a device: atomic, but ordering nothing.
inline unsigned atomicOr(unsigned* place, unsigned bits) {
  return __atomic_fetch_or(place, bits, __ATOMIC_RELAXED);
}
inline int atomicAdd(int* place, int value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

namespace host {

HOST_UNWATCHED inline void poison_shared() {
#if !defined(__SANITIZE_ADDRESS__)
  // Shared memory starts as garbage; static memory would start as zeros.
  for (char* byte = __start_cuda_shared; byte < __stop_cuda_shared; ++byte) {
    *reinterpret_cast<volatile char*>(byte) = static_cast<char>(0xcd);
  }
#endif
}

HOST_UNWATCHED inline void run_fiber() {
  Fiber& fiber = *machine.current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine.main_stack_bottom, &machine.main_stack_size);
#endif
  for (unsigned block = 0; block < machine.num_blocks; ++block) {
    machine.body(machine.body_argument);
    __syncthreads();
    // All are past the kernel's end. The last to arrive runs first, and prepares the next block.
    if (machine.block_index == block) {
      machine.block_index = block + 1;
      poison_shared();
    }
    __syncthreads();
  }
  fiber.is_done = true;
  switch_to_main(fiber);
}

HOST_UNWATCHED inline void resume(Fiber& fiber) {
  machine.current = &fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&machine.main_fake_stack, fiber.stack.get(), STACK_BYTES);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.tsan, 1);
#endif
  swapcontext(&machine.main_context, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(machine.main_fake_stack, nullptr, nullptr);
#endif
}

// In turns, forwards and backwards, so that no order among the threads is the usual one.
HOST_UNWATCHED inline void run_all() {
  const int num_threads = machine.block.size;
  for (bool is_forward = true;; is_forward = !is_forward) {
    bool is_any_left = false, has_progress = false;
    for (int i = 0; i < num_threads; ++i) {
      Fiber& fiber = machine.fibers[is_forward ? i : num_threads - 1 - i];
      if (fiber.is_done) continue;
      is_any_left = true;
      if (fiber.waits_for != nullptr && fiber.waits_for->generation == fiber.seen_generation) {
        continue;
      }
      fiber.waits_for = nullptr;
      has_progress = true;
      resume(fiber);
    }
    if (!is_any_left) return;
    if (!has_progress) fail("deadlock: not all threads reach the same barrier");
  }
}

HOST_UNWATCHED inline void launch(int num_blocks, int num_threads, void (*body)(void*),
                                  void* argument) {
  if (num_threads < 1 || num_threads > 1024 || num_threads % WARP_SIZE != 0) {
    fail("a block needs whole warps, 1024 threads at most");
  }
  machine.num_blocks = static_cast<unsigned>(num_blocks);
  machine.body = body;
  machine.body_argument = argument;
  machine.block.size = num_threads;
  machine.warps = std::vector<Barrier>(num_threads / WARP_SIZE);
  for (Barrier& warp : machine.warps) warp.size = WARP_SIZE;
  machine.fibers = std::vector<Fiber>(num_threads);
#if defined(__SANITIZE_THREAD__)
  machine.main_tsan = __tsan_get_current_fiber();
#endif
  poison_shared();
  for (int thread = 0; thread < num_threads; ++thread) {
    Fiber& fiber = machine.fibers[thread];
    fiber.thread = thread;
    fiber.stack.reset(new char[STACK_BYTES]);
#if defined(__SANITIZE_THREAD__)
    fiber.tsan = __tsan_create_fiber(0);
#endif
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  run_all();
#if defined(__SANITIZE_THREAD__)
  for (uint64_t(&token)[WARP_SIZE] : machine.block.slots) __tsan_acquire(token);  // the host waits for the end
#endif
}

// One argument of a kernel: a number, or a buffer of exactly its size, so that AddressSanitizer
// sees the first byte beyond it.
struct Argument {
  bool is_buffer = false;
  std::unique_ptr<char[]> bytes;  // null for a null pointer
  uint64_t size = 0;
  char* pointer = nullptr;

  template <typename T>
  T as() const {
    if (is_buffer != std::is_pointer<T>::value) fail("a pointer was given a number or the reverse");
    T value;
    if (is_buffer) {
      std::memcpy(&value, &pointer, sizeof(T));
      return value;
    }
    if (size != sizeof(T)) fail("a number has another size than the kernel's parameter");
    std::memcpy(&value, bytes.get(), sizeof(T));
    return value;
  }
};

inline void read_exactly(void* to, size_t size, std::FILE* file) {
  if (size != 0 && std::fread(to, 1, size, file) != size) fail("the call file ends too early");
}

template <typename T>
T read_number(std::FILE* file) {
  T value;
  read_exactly(&value, sizeof(T), file);
  return value;
}

inline Argument read_argument(std::FILE* file) {
  Argument argument;
  const uint32_t kind = read_number<uint32_t>(file);  // 0 number, 1 buffer, 2 null pointer
  argument.size = read_number<uint64_t>(file);
  argument.is_buffer = kind != 0;
  if (kind != 2) {
    argument.bytes.reset(new char[argument.size]);
    argument.pointer = argument.bytes.get();
    read_exactly(argument.pointer, argument.size, file);
  }
  return argument;
}

template <typename... Parameters, size_t... Places>
void call(void (*kernel)(Parameters...), const std::vector<Argument>& arguments, int num_blocks,
          int num_threads, std::index_sequence<Places...>) {
  if (arguments.size() != sizeof...(Parameters)) fail("the kernel takes another number of arguments");
  auto body = [&] { kernel(arguments[Places].template as<Parameters>()...); };
  launch(num_blocks, num_threads, [](void* it) { (*static_cast<decltype(body)*>(it))(); }, &body);
}

// PROGRAM CALL RESULT: reads a call, runs it, writes all buffers back.
template <typename... Parameters>
int run_call_file(void (*kernel)(Parameters...), const char* call_path, const char* result_path) {
  std::FILE* file = std::fopen(call_path, "rb");
  if (file == nullptr) fail("no call file");
  const int num_blocks = static_cast<int>(read_number<uint32_t>(file));
  const int num_threads = static_cast<int>(read_number<uint32_t>(file));
  std::vector<Argument> arguments(read_number<uint32_t>(file));
  for (Argument& argument : arguments) argument = read_argument(file);
  std::fclose(file);
  call(kernel, arguments, num_blocks, num_threads, std::index_sequence_for<Parameters...>());
  file = std::fopen(result_path, "wb");
  if (file == nullptr) fail("the result file cannot be written");
  for (const Argument& argument : arguments) {
    if (argument.pointer == nullptr || !argument.is_buffer) continue;
    std::fwrite(argument.pointer, 1, argument.size, file);
  }
  std::fclose(file);
  return 0;
}

}  // namespace host
