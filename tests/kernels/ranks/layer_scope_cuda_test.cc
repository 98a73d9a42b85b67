// Selections of layer scope over ranks on GPUs: the same lists, bit by bit, on all ranks and for
// any number of them, and alike the CPU's. Ranks are threads, which share a GPU or have one each.
#include <barrier>
#include <cstdint>
#include <functional>
#include <gtest/gtest.h>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reuse_gate_cuda.h"
#include "kernels/sparse/reuse/selection_memory_cuda.h"
#include "tests/kernels/sparse/cuda/token_lists_cuda.h"
#include "tests/kernels/sparse/layer_rank.h"
#include "tests/support/device_methods.h"
#include "tests/support/peer_ranks.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kHeads = LayerRank::kHeads;
constexpr int64_t kMostTilesOfCall = 1;

class PeerLayerRanks final : public CudaLayerRanks {
 public:
  explicit PeerLayerRanks(const PeerSumEnd& end) : end_(end) {}
  absl::Status Sum(const RankRows<int64_t>& rows, cudaStream_t stream) override {
    ++calls;
    return SumRows(end_, rows, stream);
  }
  absl::Status Max(const RankRows<uint32_t>& rows, cudaStream_t stream) override {
    ++calls;
    return MaxRows(end_, rows, stream);
  }
  int calls = 0;

 private:
  const PeerSumEnd& end_;
};

struct Case {
  std::string name;
  std::string selector;
  std::string preset;
  std::string rule;
  LayerRankShape shape;
};

class LayerScopeCudaTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (CountGpus() == 0) GTEST_SKIP() << "no GPU on this machine";
  }
  void TearDown() override { cudaSetDevice(0); }

  static std::unique_ptr<Selector> MakeTested() {
    MethodOptions options = {{"scope", "layer"}};
    if (!GetParam().preset.empty()) options.push_back({"preset", GetParam().preset});
    return MakeSelector(GetParam().selector, options).value();
  }

  // Runs every query tile alone, as LayerRank::Run does. `ready` is called when all memory is
  // taken: from then on ranks wait for each other.
  Lists RunOnGpu(LayerRank& rank, const LayerPart& part, cudaStream_t stream,
                 const std::function<void()>& ready) {
    const PolicyNumbers numbers = LayerRank::NumbersFor(*selector_, rule_.get());
    AttentionBatch& batch = rank.batch();
    const int64_t heads = rank.heads();
    DeviceMemory device;
    std::unique_ptr<CudaSelectionMemory> memory;
    const DeviceSelectionMemory* remembered = nullptr;
    if (rule_ != nullptr) {
      memory = CudaSelectionMemory::Create(rank.NeedsOf(*selector_, *rule_), stream).value();
      remembered = device.Copy(&memory->view(), 1).value();
    }
    const DeviceMethod method = MakeDeviceMethod({.selector = GetParam().selector,
                                                  .preset = GetParam().preset,
                                                  .scope = Scope::kLayer,
                                                  .tiles = kMostTilesOfCall,
                                                  .max_budget_tokens = numbers.budget_tokens,
                                                  .stream = stream},
                                                 batch.kv().View(), LayerRank::kGroup);
    const DeviceBuffer judging =
        DeviceBuffer::Allocate(JudgeReuseWorkspaceBytes(kHeads, kMostTilesOfCall)).value();
    const auto select = [&](const CudaSelectParams& all, const PageSelection& out,
                            std::byte* workspace) -> absl::Status {
      KVASIR_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "preparing"));
      ready();
      for (int64_t block = 0; block < LayerRank::kBlocks; ++block) {
        CudaSelectParams params = all;
        params.tiles = all.tiles.subspan(static_cast<size_t>(block), 1);
        params.numbers = all.numbers.subspan(static_cast<size_t>(block), 1);
        params.part = part;
        params.most_rows = block == 0 ? kPageTokens : 1;
        const PageSelection rows = out.Rows(block * heads, heads);
        if (remembered != nullptr && block > 0) {
          params.device_memories = {remembered, 1};
          if (rule_->ReadsQueries()) {
            KVASIR_RETURN_IF_ERROR(JudgeReuse(params, Scope::kLayer, rows, judging.data(), stream));
          }
        }
        KVASIR_RETURN_IF_ERROR(method.select(params, rows, workspace));
      }
      return CudaStatus(cudaStreamSynchronize(stream), "selecting");
    };
    const std::vector<PolicyNumbers> all_numbers(LayerRank::kBlocks, numbers);
    return RunSelectOnGpu(
        batch, all_numbers,
        HostLists(batch, selector_->MaxEntries(numbers, GetParam().shape.context)).View(),
        method.workspace_bytes, select);
  }

  std::vector<Lists> RunOnRanks(int size, bool apart) {
    std::vector<PeerRank> peers(static_cast<size_t>(size));
    for (int r = 0; r < size; ++r) peers[static_cast<size_t>(r)].device = apart ? r : 0;
    ConnectPeers(peers, /*patience_ns=*/10'000'000'000);
    const int64_t heads = kHeads / size;
    std::vector<Lists> lists(peers.size());
    std::barrier<> ready(size);
    std::vector<std::thread> threads;
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        const PeerRank& peer = peers[static_cast<size_t>(r)];
        peer.Use();
        PeerLayerRanks ranks(peer.end);
        LayerRank rank(r * heads, heads, GetParam().shape);
        lists[static_cast<size_t>(r)] =
            RunOnGpu(rank, {.ranks = &ranks, .first_head = r * heads, .num_heads = kHeads},
                     peer.stream, [&] { ready.arrive_and_wait(); });
        EXPECT_GE(ranks.calls, LayerRank::kBlocks);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const PeerRank& peer : peers) EXPECT_EQ(*peer.gave_up.As<uint32_t>(), 0u);
    return lists;
  }

  const std::unique_ptr<Selector> selector_ = MakeTested();
  const std::unique_ptr<ReuseRule> rule_ =
      GetParam().rule.empty() ? nullptr : MakeReuseRule(GetParam().rule).value();
};

// Short contexts, where the last stage alone chooses, and such that every stage has to.
std::vector<Case> Cases() {
  const LayerRankShape plain = {}, products = {.dtype = DType::kBFloat16},
                       larger = {.context = 9056, .dtype = DType::kBFloat16},
                       large = {.context = 36'000, .dtype = DType::kBFloat16};
  return {{"tokenselect_float32", "tokenselect", "", "", plain},
          {"tokenselect", "tokenselect", "", "", products},
          {"tokenselect_long", "tokenselect", "", "", larger},
          {"tokenselect_interval", "tokenselect", "", "interval", products},
          {"tokenselect_cosine", "tokenselect", "", "cosine", products},
          {"infinitehip", "infinitehip", "5k", "", products},
          {"infinitehip_long", "infinitehip", "5k", "", large},
          {"infinitehip_3k_long", "infinitehip", "3k", "", large},
          {"infinitehip_both", "infinitehip", "5k", "both", products},
          {"infinitehip_long_interval", "infinitehip", "5k", "interval", large}};
}
INSTANTIATE_TEST_SUITE_P(Methods, LayerScopeCudaTest, testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

TEST_P(LayerScopeCudaTest, RanksHaveTheListsOfOneAndTheCpus) {
  LayerRank one(0, kHeads, GetParam().shape);
  one.Run(*selector_, rule_.get(), nullptr);
  PeerRank alone;
  ASSERT_EQ(cudaStreamCreateWithFlags(&alone.stream, cudaStreamNonBlocking), cudaSuccess);
  Lists of_one = RunOnGpu(one, {}, alone.stream, [] {});
  // There are few lists, and of some a whole chunk may be another.
  const Likeness likeness = Compare(of_one, one.selection);
  EXPECT_LE(likeness.other_tokens * 50, likeness.tokens);
  EXPECT_GT(likeness.tokens, 0) << "premise: something was selected";
  std::set<int32_t> reused;
  for (int64_t row = 0; row < one.selection.num_rows; ++row) {
    ASSERT_EQ(of_one.headers[static_cast<size_t>(row)].reused_stages,
              one.selection.header(row).reused_stages)
        << "row " << row;
    reused.insert(one.selection.header(row).reused_stages);
  }
  EXPECT_EQ(reused.size() > 1, rule_ != nullptr) << "premise: some lists are reused, others not";

  const auto view = [](Lists& lists) -> PageSelection {
    return {.headers = lists.headers.data(),
            .entries = lists.entries.data(),
            .num_rows = std::ssize(lists.headers),
            .capacity = lists.capacity};
  };
  int64_t runs = 0;
  // A GPU must have room for the clusters of all its ranks, beside what waits for a rank: two fit.
  for (const auto& [size, apart] : {std::pair{2, false}, {2, true}, {4, true}}) {
    if (apart && CountGpus() < size) continue;
    SCOPED_TRACE(testing::Message() << size << (apart ? " GPUs" : " ranks on a GPU"));
    for (Lists& lists : RunOnRanks(size, apart)) {
      const int64_t heads = kHeads / size;
      for (int64_t row = 0; row < LayerRank::kBlocks * heads; ++row) {
        ExpectSameRow(view(lists), row, view(of_one), row / heads * kHeads);
      }
    }
    ++runs;
  }
  std::cout << runs << " groups of ranks" << std::endl;
}

}  // namespace
}  // namespace kvasir::kernels
