// Threads, from the OpenMP runtime that torch has already started.
//
// The runtime is called by its ABI instead of through pragmas: GCC's and Intel's and LLVM's
// libraries all export these names, so that whichever torch uses serves here too, whatever compiler
// builds this file. Two runtimes in one process would be two pools of threads on the same cores.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace acceptmoe {

// What one thread of a team knows: its number, and how to wait for the others.
struct Team {
  int thread;
  int num_threads;

  void wait() const {
    if (num_threads > 1) GOMP_barrier();
  }
};

// Calls `body(Team)` in `num_threads` threads at most. It must not throw.
template <class Body>
void in_parallel(int num_threads, Body body) {
  if (num_threads <= 1) {
    body(Team{0, 1});
    return;
  }
  GOMP_parallel(
      [](void* data) {
        (*static_cast<Body*>(data))(Team{omp_get_thread_num(), omp_get_num_threads()});
      },
      &body, unsigned(num_threads), 0);
}

// Tasks 0 .. count - 1, handed to whichever thread is free: other processes may hold one up. Every
// output belongs to one task and every task computes in a fixed order, so that the result does not
// depend on who takes which, nor on how many threads there are.
class TaskQueue {
 public:
  template <class Task>
  void run(int64_t count, Task task) {
    for (int64_t i; (i = take()) < count;) task(i);
  }

  // Calls `task(i, next)`: a thread takes its next task before it begins one, and can prefetch for
  // it. With a thread's last one, `next` is `count`.
  template <class Task>
  void run_looking_ahead(int64_t count, Task task) {
    for (int64_t i = take(), next; i < count; i = next) {
      next = take();
      task(i, std::min(next, count));
    }
  }

 private:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  std::atomic<int64_t> next_{0};
};

}  // namespace acceptmoe
