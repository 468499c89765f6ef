// SSA attention on the CPU: FlashAttention's structure on g(x) = n·sgn(x)·log2(1 + b|x|), in base 2.
//
// Nothing of size query_length × key_length is ever stored: queries and keys go through in blocks, and the backward
// pass recomputes the weights from the saved normalisers. All arithmetic is float32, whatever the tensors' type. Results
// depend on the number of threads, never on their timing.

#include <ATen/Parallel.h>

#include "backward.h"

using namespace ssa;

namespace {

// Run all tasks, each thread with a Worker (its buffers) of its own.
template <class Worker, class Run>
void run_tasks(const Problem& p, Run run) {
  at::parallel_for(0, p.batch * p.groups * p.splits, 1, [&](int64_t begin, int64_t end) {
    if (begin == end) return;
    Worker worker(p);
    for (int64_t index = begin; index < end; ++index) run(worker, task_of(p, index), index);
  });
}

}  // namespace

extern "C" int64_t ssa_problem_size() { return sizeof(Problem); }

extern "C" void ssa_forward(const Problem* p) {
  run_tasks<Forward>(*p, [](Forward& worker, Task task, int64_t) { worker.run(task); });
}

extern "C" void ssa_backward(const Problem* p) {
  const int64_t size = Backward::sums_size(*p);
  if (p->splits == 1) {
    struct Worker : Backward {
      explicit Worker(const Problem& problem) : Backward(problem), sums(sums_size(problem)) {}
      Buffer sums;
    };
    run_tasks<Worker>(*p, [&](Worker& worker, Task task, int64_t) {
      worker.run(task, worker.sums.data());
      Backward::write(*p, task, worker.sums.data(), 1);
    });
    return;
  }
  Buffer sums(p->batch * p->groups * p->splits * size);
  run_tasks<Backward>(*p, [&](Backward& worker, Task task, int64_t index) {
    worker.run(task, sums.data() + index * size);
  });
  at::parallel_for(0, p->batch * p->groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit)
      Backward::write(*p, {unit / p->groups, unit % p->groups, 0}, sums.data() + unit * p->splits * size, p->splits);
  });
}
