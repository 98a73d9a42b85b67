// The work of a CTA of decode attention. A unit is a share of a row's items (row_items.h), a task
// some units of a row. One warp, the finder, looks up the CTA's tasks and their pages well ahead of
// the warps that use them, because a look-up is a chain of reads of device memory. What it finds
// goes through queues in shared memory, pages in chunks of up to one for each lane.
//
//   finder: -> tasks, chunks     senders: chunks -> tiles (decode_tiles.cuh)
//                                consumers: tasks, tiles -> results (attend_decode.cu)
#pragma once

#include "kernels/attention/page_pipeline.cuh"

namespace kvasir::kernels {

struct DecodeParams : AttendLaunch {
  DecodeScratch memory;
  int heads_of_part = 0;
  // By a row's number of units, less one: how many of them are a task.
  uint8_t units_at_once[kDecodeUnitsOfSequence] = {};
};

// Units of a row that a CTA takes one after another. Either they have no more items together than a
// warp has lanes, or it is one unit.
struct Task {
  int row = 0;
  int first_row = 0;  // of the row's tile
  int first_unit = 0;
  int num_units = 0;
  int row_units = 0;   // the row's number of units
  int row_tasks = 0;   // and of tasks
  int unit_items = 0;  // of the row's longest unit

  __device__ bool exists() const { return num_units > 0; }
  // The lanes that have the items of the task's unit `i`.
  __device__ unsigned LanesOf(int i) const {
    return num_units == 1 ? kAllLanes : ((1u << unit_items) - 1) << (i * unit_items);
  }
};

__device__ inline int MostTasks(const DecodeParams& p) {
  return static_cast<int>(p.num_rows * MaxDecodeUnits(p.kv.layout.num_kv_heads));
}

// Returns task `id`. The first tasks of all rows have consecutive numbers, so they are spread over
// the GPU.
__device__ inline Task FindTask(const DecodeParams& p, int id) {
  const int rows = static_cast<int>(p.num_rows);
  const int place = id / rows;  // among the row's tasks
  Task task = {.row = id - place * rows};
  const PageRun row = WholeRow(p, task.row);
  const int items = static_cast<int>(row.end);
  task.first_row = static_cast<int>(row.tile.first_row);
  task.row_units = static_cast<int>(NumDecodeUnits(items, p.kv.layout.num_kv_heads));
  task.unit_items = (items + task.row_units - 1) / task.row_units;
  const int most = kWarpThreads / max(1, task.unit_items);
  const int at_once = max(1, min(most, static_cast<int>(p.units_at_once[task.row_units - 1])));
  task.row_tasks = (task.row_units + at_once - 1) / at_once;
  task.first_unit = place * at_once;
  task.num_units = max(0, min(at_once, task.row_units - task.first_unit));
  return task;
}

struct ChunkFlags {
  bool begins = false;      // the task's first chunk
  bool ends = false;        // the task's last chunk
  bool has_pages = false;   // pages to be sent whole
  bool has_tokens = false;  // pages to be gathered from; a task of several chunks has these apart
};

template <Placement kPlacement>
struct Chunk {
  Task task;
  ChunkFlags flags;
  PageSource<kPlacement> pages[kWarpThreads];
};

// A queue in shared memory, from one warp to all readers.
template <typename Item>
struct Queue {
  static constexpr int kEntries = 2;

  Item items[kEntries];
  uint64_t full[kEntries];
  uint64_t empty[kEntries];

  // Called by one thread, before a __syncthreads. `readers` is the number of warps that read.
  __device__ void Init(uint32_t readers) {
    for (int i = 0; i < kEntries; ++i) {
      hopper::BarrierInit(&full[i], 1);
      hopper::BarrierInit(&empty[i], readers);
    }
  }
};

// A place in the queue, of the writer or a reader. Used by whole warps.
template <typename Item>
class QueuePlace {
 public:
  __device__ explicit QueuePlace(Queue<Item>& queue) : queue_(queue) {}

  // Waits until the item can be read.
  __device__ const Item& Await() {
    hopper::BarrierWait(&queue_.full[at_.stage], at_.parity);
    return queue_.items[at_.stage];
  }
  // Gives the item back and goes to the next one.
  __device__ void Release() { Next(queue_.empty); }

  // Waits until an item can be written.
  __device__ Item& AwaitEmpty() {
    hopper::BarrierWait(&queue_.empty[at_.stage], at_.parity ^ 1);
    return queue_.items[at_.stage];
  }
  // Gives the item to the readers and goes to the next one.
  __device__ void Publish() { Next(queue_.full); }

 private:
  __device__ void Next(uint64_t* barriers) {
    __syncwarp();
    if (threadIdx.x % kWarpThreads == 0) hopper::BarrierArrive(&barriers[at_.stage]);
    at_.Next();
  }

  Queue<Item>& queue_;
  RingPosition<Queue<Item>::kEntries> at_;
};

// Pages with at most this many attended tokens are gathered.
inline constexpr int kMostGathered = static_cast<int>(kPageTokens) / 2;

template <Placement kPlacement>
__device__ bool IsGathered(const PageSource<kPlacement>& page) {
  return page.mask != 0 && CountBits(page.mask) <= kMostGathered;
}

template <Placement kPlacement>
class TaskFinder {
  using Page = ResolvedPage<kPlacement>;

 public:
  __device__ TaskFinder(const DecodeParams& p, const KvTensorMaps& maps, Queue<Task>& tasks,
                        Queue<Chunk<kPlacement>>& chunks)
      : p_(p),
        maps_(maps),
        tasks_(tasks),
        chunks_(chunks),
        lane_(static_cast<int>(threadIdx.x) % kWarpThreads) {}

  // Puts all tasks of the CTA into the queues, and one without units after them. Called by one
  // warp.
  __device__ void Run() {
    const int stride = static_cast<int>(gridDim.x);
    for (int id = static_cast<int>(blockIdx.x); id < MostTasks(p_);) {
      const Task task = FindTask(p_, id);
      if (task.exists()) {
        PutTask(task);
        PutChunks(task);
        id += stride;
      } else {
        id = NextTask(id + stride);
      }
    }
    PutTask(Task());
    PutChunk(Task(), Page(), {});
  }

 private:
  // Returns the first number from `id` on that is a task of the CTA, or one past all. With short
  // rows most numbers are none, so each lane tests one.
  __device__ int NextTask(int id) const {
    const int stride = static_cast<int>(gridDim.x);
    for (; id < MostTasks(p_); id += kWarpThreads * stride) {
      const int own = id + lane_ * stride;
      const bool is_task = own < MostTasks(p_) && FindTask(p_, own).exists();
      const unsigned found = __ballot_sync(kAllLanes, is_task);
      if (found != 0) return id + (__ffs(static_cast<int>(found)) - 1) * stride;
    }
    return id;
  }

  __device__ void PutTask(const Task& task) {
    Task& to = tasks_.AwaitEmpty();
    if (lane_ == 0) to = task;
    tasks_.Publish();
  }

  __device__ void PutChunks(const Task& task) {
    const PageRun run = WholeRow(p_, task.row);
    const bool is_single = task.unit_items <= kWarpThreads;
    bool gathers = false;
    int first = 0;
    for (bool is_last = false; !is_last; first += kWarpThreads) {
      is_last = first + kWarpThreads >= task.unit_items;
      Page page = Resolve(task, run, first);
      Page sent = page;
      if (sent.tier == PageTier::kAbsent) sent.mask = 0;
      gathers = gathers || __any_sync(kAllLanes, IsGathered(sent));
      PutChunk(task, sent,
               {.begins = first == 0,
                .ends = is_last && (is_single || !gathers),
                .has_pages = true,
                .has_tokens = is_single});
      ClaimPage(p_, run, page, IsGathered(page) ? CountBits(page.mask) : CopiedTokens(page.mask));
    }
    if (is_single || !gathers) return;
    for (first = 0; first < task.unit_items; first += kWarpThreads) {
      Page page = Resolve(task, run, first);
      if (page.tier == PageTier::kAbsent) page.mask = 0;
      PutChunk(task, page, {.ends = first + kWarpThreads >= task.unit_items, .has_tokens = true});
    }
  }

  // Looks up the lane's item, from number `first` of its unit on.
  __device__ Page Resolve(const Task& task, const PageRun& run, int first) const {
    const int unit = task.num_units == 1 ? 0 : lane_ / task.unit_items;
    const int number = first + lane_ - unit * task.unit_items;
    const int64_t item = task.first_unit + unit + int64_t{number} * task.row_units;
    return ResolveItem<kPlacement>(p_, maps_, run, unit < task.num_units ? item : run.end);
  }

  __device__ void PutChunk(const Task& task, const Page& page, const ChunkFlags& flags) {
    Chunk<kPlacement>& chunk = chunks_.AwaitEmpty();
    chunk.pages[lane_] = page;
    if (lane_ == 0) {
      chunk.task = task;
      chunk.flags = flags;
    }
    chunks_.Publish();
  }

  const DecodeParams& p_;
  const KvTensorMaps& maps_;
  QueuePlace<Task> tasks_;
  QueuePlace<Chunk<kPlacement>> chunks_;
  const int lane_;
};

}  // namespace kvasir::kernels
