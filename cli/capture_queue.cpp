#include "cli/capture_queue.hpp"

#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <memory>

#include "datasets/capture_file.hpp"
#include "datasets/error.hpp"
#include "datasets/interrupt.hpp"

namespace bitattn::cli {

namespace {

/// From so many elements of q or k on a capture has work for many cores by itself: 32 tiles of 128 rows at
/// head size 128.
constexpr std::size_t kLarge = 32UL * 128 * 128;

struct Item {
  std::size_t n = 0;
  bool finished = false;
  std::string error;
  Capture capture;
};

/// What goes wrong elsewhere cuts no work short in the middle, as cancelled loops would just return; and a
/// thread that waits here takes up no other capture.
void by_itself(const std::function<void()>& function) {
  tbb::this_task_arena::isolate([&] {
    tbb::task_group_context context(tbb::task_group_context::isolated);
    tbb::task_group group(context);
    group.run_and_wait(function);
  });
}

void work_on(Item& item, const CaptureWork& work) {
  try {
    work.work(item.n, item.capture);
  } catch (const InputError& error) {
    item.error = error.what();
  }
  item.capture = {};
  item.finished = true;
}

void read(Item& item, const std::string& name, const CaptureWork& work) {
  throw_if_interrupted();
  item.finished = work.skip(item.n);
  if (item.finished) return;
  try {
    item.capture = read_capture(name);
  } catch (const InputError& error) {
    item.error = error.what();
    item.finished = true;
  }
}

}  // namespace

void work_through(const std::vector<std::string>& names, bool at_once, const CaptureWork& work) {
  if (!at_once) {
    for (std::size_t n = 0; n < names.size(); ++n) {
      Item item;
      item.n = n;
      read(item, names[n], work);
      if (!item.finished) work_on(item, work);
      work.finish(n, item.error);
    }
    return;
  }
  using ItemPointer = std::shared_ptr<Item>;
  std::size_t next = 0;
  const auto take = [&](tbb::flow_control& flow) {
    if (next == names.size()) {
      flow.stop();
      return ItemPointer();
    }
    auto item = std::make_shared<Item>();
    item->n = next++;
    read(*item, names[item->n], work);
    // While this step is busy no further capture is read.
    const std::size_t elements =
        std::max(item->capture.problem.q.data.size(), item->capture.problem.k.data.size());
    if (!item->finished && elements >= kLarge) by_itself([&] { work_on(*item, work); });
    return item;
  };
  const auto go_on = [&](const ItemPointer& item) {
    if (!item->finished) by_itself([&] { work_on(*item, work); });
    return item;
  };
  const auto finish = [&](const ItemPointer& item) { work.finish(item->n, item->error); };
  const auto in_flight = static_cast<std::size_t>(tbb::this_task_arena::max_concurrency());
  tbb::parallel_pipeline(in_flight,
                         tbb::make_filter<void, ItemPointer>(tbb::filter_mode::serial_in_order, take) &
                             tbb::make_filter<ItemPointer, ItemPointer>(tbb::filter_mode::parallel, go_on) &
                             tbb::make_filter<ItemPointer, void>(tbb::filter_mode::serial_in_order, finish));
}

}  // namespace bitattn::cli
