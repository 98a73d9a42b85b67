// Ways along which the tests of invariance serve a request, and the journey of a request along one.
#pragma once

#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/iterations.h"
#include "tests/support/scratch_directory.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/rank_group.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"

namespace kvasir::worker {

inline constexpr int64_t kPromptTokens = 1500;
inline constexpr uint32_t kTailTokens = 20;
inline constexpr char kModel[] = "tests/model/needle-8k";
inline constexpr char kGolden[] = "tests/model/golden/needle-8k.safetensors";
inline constexpr uint32_t kAll = 0, kStreaming = 1, kQuest = 2, kTokenSelect = 4, kHip = 5,
                          kInfiniteHip = 6, kPruned = 7, kHipByInterval = 8,
                          kTokenSelectByCosine = 9, kInfiniteHipByBoth = 10,
                          kTokenSelectOfLayer = 11, kInfiniteHipOfLayer = 12, kTerminated = 13,
                          kTerminatedQuest = 14, kKeptDense = 15, kKeptWidened = 16;
inline constexpr uint32_t kPolicies[] = {kAll,
                                         kStreaming,
                                         kQuest,
                                         kTokenSelect,
                                         kHip,
                                         kInfiniteHip,
                                         kPruned,
                                         kHipByInterval,
                                         kTokenSelectByCosine,
                                         kInfiniteHipByBoth,
                                         kTokenSelectOfLayer,
                                         kInfiniteHipOfLayer,
                                         kTerminated,
                                         kTerminatedQuest,
                                         kKeptDense,
                                         kKeptWidened};

struct Way {
  const char* name;
  int64_t chunk = 128;      // tokens of the prompt in one step
  double device_part = 1;   // of the KV, that the device tier holds
  int64_t host_blocks = 0;  // in the host tier, half of them as single pages; 0: the whole KV
  bool cached = false;      // another request left the document's blocks
  bool disk = false;        // whose blocks were written to disk, dropped and read again
  bool restart = false;     // by another process
  bool preempted = false;   // half of the answer later, and resumed
  int others = 0;           // requests that run at the same time, with policies of their own
  int num_threads = 1;
  int ranks = 1;
  PositionExtension extension = PositionExtension::kNone;
  bool windows = false;                   // kLayerWindows
  std::optional<kernels::DType> kv = {};  // of cached keys and values; the model's dtype
};

inline constexpr Way kWays[] = {
    {.name = "Chunks512", .chunk = 512},
    {.name = "WholePrompt", .chunk = 4096},
    {.name = "DeviceHolds25Percent", .device_part = 0.25},
    {.name = "DeviceHolds10Percent", .device_part = 0.1},
    {.name = "PrefixCached", .cached = true},
    {.name = "DiskRoundTrip", .cached = true, .disk = true},
    {.name = "Restart", .cached = true, .disk = true, .restart = true},
    {.name = "Preempted", .device_part = 0.25, .preempted = true},
    {.name = "Among16", .others = 15},
    {.name = "TwoThreads", .num_threads = 2},
    {.name = "AllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 15,
     .num_threads = 2},
};
// Memory has room for less than a third of the blocks; the others lie on disk and are read page by
// page while the request runs.
inline constexpr Way kOnDemandWays[] = {
    {.name = "OnDemand", .device_part = 0.25, .host_blocks = 14},
    {.name = "OnDemandRestart",
     .device_part = 0.25,
     .host_blocks = 14,
     .cached = true,
     .disk = true,
     .restart = true},
};
inline constexpr Way kOnDemandAmongOthers[] = {
    {.name = "OnDemandAllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .host_blocks = 52,
     .cached = true,
     .others = 5,
     .num_threads = 2},
};
inline constexpr Way kOnDemandQuantized[] = {{.name = "Fp8OnDemand",
                                              .device_part = 0.25,
                                              .host_blocks = 26,
                                              .cached = true,
                                              .kv = kernels::DType::kFloat8E4M3},
                                             {.name = "Int8OnDemandRestart",
                                              .device_part = 0.25,
                                              .host_blocks = 26,
                                              .cached = true,
                                              .disk = true,
                                              .restart = true,
                                              .kv = kernels::DType::kInt8}};
inline constexpr Way kOnDemandGroup = {
    .name = "TwoRanksOnDemand", .host_blocks = 26, .cached = true, .ranks = 2};
// Keys are cached un-rotated and attended to at compact positions.
inline constexpr Way kExtendedWays[] = {
    {.name = "Chunks512", .chunk = 512, .extension = PositionExtension::kStreaming},
    {.name = "DeviceHolds10Percent",
     .device_part = 0.1,
     .extension = PositionExtension::kStreaming},
    {.name = "AllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 15,
     .num_threads = 2,
     .extension = PositionExtension::kStreaming},
};
// The model itself has windows in some of its layers, the first and the last included. No window is
// a multiple of a page or a query tile.
inline const std::vector<int64_t> kLayerWindows = {97, 0, 0, 333, 0, 97};
inline constexpr Way kWindowWays[] = {
    {.name = "WindowsChunks512", .chunk = 512, .windows = true},
    {.name = "WindowsDeviceHolds10Percent", .device_part = 0.1, .windows = true},
    {.name = "WindowsRestart", .cached = true, .disk = true, .restart = true, .windows = true},
    {.name = "WindowsAllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 15,
     .num_threads = 2,
     .windows = true},
    {.name = "WindowsExtended",
     .chunk = 512,
     .extension = PositionExtension::kStreaming,
     .windows = true},
};
// The same at grouped positions, which begin after a neighbourhood of a part of the prompt.
inline constexpr kernels::GroupedPositions kGrouped = {.group_size = 4, .window = 300};
inline constexpr Way kGroupedWays[] = {
    {.name = "GroupedChunks512", .chunk = 512, .extension = PositionExtension::kSelfExtend},
    {.name = "GroupedDeviceHolds10Percent",
     .device_part = 0.1,
     .extension = PositionExtension::kSelfExtend},
    {.name = "GroupedAllAtOnce",
     .chunk = 512,
     .device_part = 0.25,
     .cached = true,
     .others = 5,
     .num_threads = 2,
     .extension = PositionExtension::kSelfExtend},
};
// Keys and values of 8 bits, which a float32 model reads as the same numbers along every way.
inline constexpr kernels::DType kFp8 = kernels::DType::kFloat8E4M3, kInt8 = kernels::DType::kInt8;
inline constexpr Way kQuantizedAtOnce[] = {{.name = "Fp8AllAtOnce",
                                            .chunk = 512,
                                            .device_part = 0.25,
                                            .cached = true,
                                            .others = 15,
                                            .num_threads = 2,
                                            .kv = kFp8}};
inline constexpr Way kQuantizedWays[] = {
    {.name = "Fp8Restart", .cached = true, .disk = true, .restart = true, .kv = kFp8},
    {.name = "Int8Chunks512", .chunk = 512, .kv = kInt8},
    {.name = "Int8Preempted", .device_part = 0.25, .preempted = true, .kv = kInt8},
    {.name = "Fp8Extended", .chunk = 512, .extension = PositionExtension::kStreaming, .kv = kFp8},
    {.name = "Int8Windows", .chunk = 512, .windows = true, .kv = kInt8},
    {.name = "Fp8DeviceHolds10Percent", .device_part = 0.1, .kv = kFp8},
    {.name = "Int8DiskRoundTrip", .cached = true, .disk = true, .kv = kInt8},
};
inline constexpr Way kQuantizedGroups[] = {{.name = "Fp8TwoRanks", .ranks = 2, .kv = kFp8},
                                           {.name = "Int8FourRanks", .ranks = 4, .kv = kInt8}};
inline constexpr Way kExtendedGroups[] = {
    {.name = "TwoRanks", .ranks = 2, .extension = PositionExtension::kStreaming}};
inline constexpr Way kGroups[] = {{.name = "TwoRanks", .ranks = 2},
                                  {.name = "FourRanks", .ranks = 4}};
inline constexpr Way kWindowGroups[] = {{.name = "WindowsTwoRanks", .ranks = 2, .windows = true}};

struct Served {
  std::map<int64_t, TestWorker::Logits> logits;  // by the position that they follow
  std::vector<uint32_t> tokens;
  v1::RowAccounting accounting;
  kvstore::KvStoreStats stats;
};

inline const std::vector<uint32_t>& Text() {
  static const auto* const text = new std::vector(GoldenFile(kGolden).Run(8000).tokens);
  return *text;
}

// Budgets are so small that most of the document is skipped.
inline TestRequest MakeRequest(int64_t begin, int64_t size, uint32_t policy, int64_t num_tokens) {
  TestRequest request = {.prompt = {Text().begin() + begin, Text().begin() + begin + size},
                         .max_tokens = num_tokens,
                         .policy = policy,
                         .prefill = MakeNumbers(32, 100, 256),
                         .decode = MakeNumbers(16, 70, 128),
                         .tail_tokens = kTailTokens,
                         .sampling = Greedy(),
                         .cached_blocks = {}};
  request.sampling.set_temperature(1);
  request.sampling.set_seed(1);
  SetWhatThePolicyNeeds(request);
  return request;
}

inline int64_t BlocksOf(const TestRequest& request) {
  return (std::ssize(request.prompt) + request.max_tokens) / kernels::kPageTokens + 1;
}

// Requests beside `request`, of all policies and many lengths, that last as long as it does.
inline std::vector<TestRequest> Others(const TestRequest& request, int count) {
  std::vector<TestRequest> others;
  for (int i = 0; i < count; ++i) {
    others.push_back(
        MakeRequest(2000 + 97 * i, 30 + 37 * i, static_cast<uint32_t>(i) % 17, request.max_tokens));
  }
  return others;
}

// The same document with another question. The tokens that it reads one by one lie after the
// document.
inline TestRequest FirstQuestion(const TestRequest& request) {
  TestRequest first = request;
  first.prompt.resize(kPromptTokens - 100);
  first.prompt.insert(first.prompt.end(), 60, 5);
  first.tail_tokens = kTailTokens;
  first.max_tokens = 1;
  return first;
}

// Memory for the KV of `blocks` on each rank, of which the device tier holds a part.
inline RankGroupOptions GroupOptions(const Way& way, kernels::DType dtype, int64_t blocks) {
  RankGroupOptions options = {
      .model = {.folder = kModel,
                .dtype = dtype,
                .max_model_len = 8192,
                .extension = way.extension,
                .grouped = way.extension == PositionExtension::kSelfExtend
                               ? kGrouped
                               : kernels::GroupedPositions{},
                .layer_windows = way.windows ? kLayerWindows : std::vector<int64_t>{},
                .num_threads = way.num_threads,
                .edit_weights = {}},
      .size = way.ranks};
  const ModelConfig config = LoadModelConfig(kModel).value();
  const kernels::KvLayout layout = {.num_layers = config.num_layers,
                                    .num_kv_heads = config.num_kv_heads / way.ranks,
                                    .head_dim = config.head_dim,
                                    .dtype = way.kv.value_or(dtype)};
  const int64_t bytes = blocks * layout.block_bytes();
  if (way.extension == PositionExtension::kSelfExtend) {  // policies that it serves;
    options.engine.policies.resize(kPruned);              // the first keep their indices
  }
  options.engine.kv_dtype = layout.dtype;
  options.engine.kv.device = static_cast<int64_t>(way.device_part * static_cast<double>(bytes));
  options.engine.kv.host = 2 * bytes;
  if (way.host_blocks > 0) {
    // An extent has more than its pages: here some tenth.
    options.engine.kv.host = way.host_blocks * layout.block_bytes() * 11 / 10;
    options.engine.on_demand_bytes = 2 * bytes;
  }
  options.engine.weights_hash = std::string(32, 'w');
  options.engine.kv_form = "rotated";
  return options;
}

// Serves one request through one group of ranks, and where the way says so, through another.
class Journey {
 public:
  Journey(const Way& way, kernels::DType dtype, int64_t blocks)
      : way_(way), options_(GroupOptions(way, dtype, blocks)) {
    if (way.disk || way.host_blocks > 0) options_.disk_path = scratch_.path();
    Start();
  }

  // Serves the request and keeps its full blocks. Adds to the served tokens.
  const TestResult& Run(const TestRequest& request, const std::vector<TestRequest>& others,
                        Served& served) {
    const size_t r = coordinator_->Add(request);  // in slot 0
    for (const TestRequest& other : others) coordinator_->Add(other);
    group_->Run(*coordinator_);
    const TestResult& result = coordinator_->result(r);
    EXPECT_TRUE(result.status.ok()) << result.status;
    served.tokens.insert(served.tokens.end(), result.tokens.begin(), result.tokens.end());
    TestCoordinator::AddAccounting(result.accounting, served.accounting);
    served.stats = group_->worker(0).engine().store().stats();
    for (const auto& [place, logits] : group_->worker(0).logits()) {
      const auto [slot, position] = place;
      if (slot == 0 && position >= std::ssize(request.prompt) - 1) served.logits[position] = logits;
    }
    return result;
  }

  // Returns the blocks of the document that both questions share, once the first was asked.
  std::vector<uint64_t> ReadDocument(const TestRequest& first) {
    Served unused;
    std::vector<uint64_t> blocks = Run(first, {}, unused).blocks;
    blocks.resize((kPromptTokens - 100) / kernels::kPageTokens);
    return way_.disk ? OverDisk(first, blocks) : blocks;
  }

 private:
  void Start() {
    group_.reset();
    group_ = std::make_unique<RankGroup>(options_);
    coordinator_.emplace(TestCoordinator::Options{.chunk = way_.chunk, .keep_blocks = true});
  }

  v1::TierReport StepAndWait(const v1::StepPlan& plan) {
    for (const auto& reply : group_->Step(plan)) EXPECT_TRUE(reply.ok()) << reply.status();
    Engine& engine = group_->worker(0).engine();
    engine.FlushTier();
    while (engine.TierIsBusy()) engine.PollTier();
    return engine.TakeTierReport();
  }

  // Writes the blocks, forgets them, and reads them again under other names.
  std::vector<uint64_t> OverDisk(const TestRequest& first, const std::vector<uint64_t>& blocks) {
    v1::StepPlan persist = coordinator_->NextPlan();
    auto token = first.prompt.begin();
    for (const uint64_t block : blocks) {
      v1::BlockPersist& to = *persist.add_persists();
      to.set_block_id(block);
      to.mutable_tokens()->Add(token, token + kernels::kPageTokens);
      token += kernels::kPageTokens;
    }
    EXPECT_GE(StepAndWait(persist).stored_size(), std::ssize(blocks));
    v1::StepPlan drop = coordinator_->NextPlan();
    drop.mutable_drop_blocks()->Add(blocks.begin(), blocks.end());
    StepAndWait(drop);
    if (way_.restart) Start();

    constexpr uint64_t kFirstName = 100'000;
    v1::StepPlan restore = coordinator_->NextPlan();
    std::vector<uint64_t> restored;
    for (const uint64_t block : blocks) {
      v1::BlockRestore& from = *restore.add_restores();
      restored.push_back(kFirstName + block);
      from.set_block_id(restored.back());
      from.set_prefix_hash(TestCoordinator::HashOfBlock(block));
    }
    const v1::TierReport report = StepAndWait(restore);
    EXPECT_EQ(report.restored_size(), std::ssize(blocks));
    for (const v1::RestoredBlock& block : report.restored()) {
      EXPECT_EQ(block.error_code(), 0) << block.error_message();
    }
    return restored;
  }

  const Way way_;
  const kvasir::testing::ScratchDirectory scratch_;
  RankGroupOptions options_;
  std::unique_ptr<RankGroup> group_;
  std::optional<TestCoordinator> coordinator_;
};

// The first half of the answer, then the rest by a request that finds the first half's blocks.
inline void ServeInHalves(const TestRequest& request, Journey& journey, Served& served) {
  TestRequest half = request;
  half.max_tokens = request.max_tokens / 2;
  const TestResult& begun = journey.Run(half, {}, served);
  TestRequest rest = request;
  rest.max_tokens -= half.max_tokens;
  rest.generated = begun.tokens;
  rest.cached_blocks = begun.blocks;
  served.accounting = {};
  journey.Run(rest, {}, served);
}

inline Served Serve(TestRequest request, const Way& way, kernels::DType dtype) {
  const std::vector<TestRequest> others = Others(request, way.others);
  const TestRequest first = FirstQuestion(request);
  int64_t blocks = BlocksOf(request) + (way.cached ? BlocksOf(first) : 0);
  for (const TestRequest& other : others) blocks += BlocksOf(other);

  Journey journey(way, dtype, blocks);
  if (way.cached) request.cached_blocks = journey.ReadDocument(first);
  Served served;
  if (way.preempted) {
    ServeInHalves(request, journey, served);
  } else {
    journey.Run(request, others, served);
  }
  return served;
}

}  // namespace kvasir::worker
