// Selecting with memory on the GPU, step by step, against SelectReusing on the CPU.
#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "kernels/rope/rope.h"
#include "kernels/sparse/methods.h"
#include "kernels/sparse/policy.h"
#include "kernels/sparse/reuse/reuse_gate_cuda.h"
#include "kernels/sparse/reuse/reusing_select.h"
#include "kernels/sparse/reuse/selection_memory_cuda.h"
#include "tests/support/device_methods.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kContext = 2400;
constexpr int64_t kSteps = 80;  // past a multiple of 64
// Number of sequences that remember; one that does not comes after them.
constexpr int64_t kRemembering = 2;
constexpr int64_t kSlots = kRemembering + 1;
constexpr int64_t kBudget = 300;

// The call of a step, whose blocks count its own queries.
template <typename Params>
Params StepOf(const Params& all, int64_t step) {
  const int64_t first = step * kSlots;
  const int64_t heads = all.q.dim(1), dim = all.q.dim(2);
  Params some = all;
  some.q = TensorView(static_cast<std::byte*>(all.q.data()) +
                          first * heads * dim * static_cast<int64_t>(DTypeSize(all.q.dtype())),
                      all.q.dtype(), {kSlots, heads, dim}, all.q.device());
  some.rotation = {.cos = all.rotation.cos + first * dim / 2,
                   .sin = all.rotation.sin + first * dim / 2};
  some.tiles = all.tiles.subspan(static_cast<size_t>(first), kSlots);
  some.numbers = all.numbers.subspan(static_cast<size_t>(first), kSlots);
  return some;
}

// Queries that turn from step to step: in a few steps by more than theta, in some by more than
// theta_force; rotated to their positions.
class TurningQueries {
 public:
  TurningQueries(AttentionBatch& batch, const std::vector<int64_t>& positions)
      : table_(Frequencies(batch), 1.25) {
    const int64_t dim = batch.shape().head_dim;
    std::normal_distribution<float> normal;
    std::vector<float> from(static_cast<size_t>(kSlots * batch.heads() * dim)), to(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
      from[i] = normal(batch.rng());
      to[i] = normal(batch.rng());
    }
    for (int64_t token = 0; token < batch.num_tokens(); ++token) {
      const int64_t slot = token % kSlots, step = token / kSlots;
      for (int64_t head = 0; head < batch.heads(); ++head) {
        // Heads of the second group turn twice as fast.
        const int64_t pace = 1 + head / batch.shape().group;
        const double turns = 0.05 * static_cast<double>((step + slot) * pace) +
                             1.3 * static_cast<double>((step + 3 * slot) / 11);
        const auto at = static_cast<size_t>((slot * batch.heads() + head) * dim);
        for (int64_t i = 0; i < dim; ++i) {
          const size_t e = at + static_cast<size_t>(i);
          batch.q(token, head)[i] = static_cast<float>(std::cos(turns)) * from[e] +
                                    static_cast<float>(std::sin(turns)) * to[e];
        }
      }
    }
    SerialExecutor executor;
    table_.SetPositions(positions, executor);
    const TensorView q(batch.q(0, 0), DType::kFloat32, {batch.num_tokens(), batch.heads(), dim});
    EXPECT_TRUE(ApplyRope(table_, q, executor).ok());
  }

  QueryRotation rotation() const { return {.cos = table_.cos(), .sin = table_.sin()}; }

 private:
  static std::vector<double> Frequencies(const AttentionBatch& batch) {
    std::vector<double> inv_freq;
    for (int64_t i = 0; i < batch.shape().head_dim / 2; ++i) {
      inv_freq.push_back(batch.InverseFrequency(i));
    }
    return inv_freq;
  }

  RopeTable table_;
};

struct ReuseCase {
  std::string selector;
  std::string rule;
  std::string preset;
  int64_t context;
  AttentionShape shape;
  std::string scope = "group";
};

std::vector<ReuseCase> Cases() {
  const AttentionShape small = {.kv = DType::kBFloat16, .group = 1};
  const AttentionShape large = {
      .activation = DType::kBFloat16, .kv = DType::kBFloat16, .head_dim = 128, .group = 4};
  std::vector<ReuseCase> cases;
  for (const std::string rule : {"interval", "cosine", "both"}) {
    for (const AttentionShape& shape : {small, large}) {
      for (const std::string selector : {"quest", "tokenselect", "hip"}) {
        cases.push_back({selector, rule, "", kContext, shape});
      }
      for (const std::string preset : {"3k", "3k-fast", "3k-flash", "5k"}) {
        cases.push_back({"infinitehip", rule, preset, kContext, shape});
      }
    }
    cases.push_back({"infinitehip", rule, "3k", kContext, large, "layer"});
    cases.push_back({"tokenselect", rule, "", kContext, large, "layer"});
    // Long enough that every stage has to choose.
    cases.push_back({"infinitehip", rule, "3k", 40'000, small});
  }
  return cases;
}

std::string NameOf(const testing::TestParamInfo<ReuseCase>& test) {
  const ReuseCase& of = test.param;
  std::string name = of.selector + "_" + of.preset + "_" + of.scope + "_" + of.rule + "_" +
                     std::to_string(of.context) + "_" + std::to_string(of.shape.head_dim);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

class ReuseCudaTest : public testing::TestWithParam<ReuseCase> {
 protected:
  void SetUp() override {
    if (!HasGpu()) GTEST_SKIP() << "no GPU on this machine";
  }
};
INSTANTIATE_TEST_SUITE_P(Methods, ReuseCudaTest, testing::ValuesIn(Cases()), NameOf);

// Many steps of two sequences, which remember, and of one that does not: a call a step.
class ReuseRun {
 public:
  explicit ReuseRun(const ReuseCase& tested)
      : tested_(tested),
        selector_(MakeSelector(tested.selector, OptionsOf(tested)).value()),
        rule_(MakeReuseRule(tested.rule).value()),
        batch_(tested.shape, kSlots, tested.context, 61),
        layout_(batch_.kv().View().layout) {
    numbers_ = {.sink_tokens = 4,
                .window_tokens = std::max<int64_t>(100, selector_->MinWindowTokens()),
                .budget_tokens = kBudget,
                .reuse = {.interval = 5, .theta = 0.9f, .theta_force = 0.6f, .max_age = 7}};
    if (tested.selector == "infinitehip") numbers_.reuse.interval = 0;  // its stages' own
    numbers_.reach_tokens = ReachTokens(*selector_, *rule_, numbers_.reuse);
    for (int64_t slot = 0; slot < kSlots; ++slot) batch_.FillContext(slot, tested.context);
    std::vector<int64_t> positions;
    for (int64_t step = 0; step < kSteps; ++step) {
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        positions.push_back(tested.context - 150 + 17 * slot + step);
        batch_.AddBlock(slot, positions.back(), 1);
      }
    }
    queries_ = std::make_unique<TurningQueries>(batch_, positions);
    all_numbers_.assign(batch_.blocks().size(), numbers_);
    tiles_.assign(batch_.blocks().begin(), batch_.blocks().end());
    for (QueryTile& tile : tiles_) tile.first_row %= kSlots;
  }

  const Selector& selector() const { return *selector_; }

  HostLists OnCpu() {
    std::vector<std::unique_ptr<SelectionMemory>> memories;
    std::vector<RowMemory*> rows(static_cast<size_t>(kRowsOfStep));
    for (int64_t row = 0; row < kRemembering * kHeads; ++row) {
      if (row % kHeads == 0) memories.push_back(MakeSelectionMemory(Needs()).value());
      rows[static_cast<size_t>(row)] = &memories.back()->row(AttentionBatch::kLayer, row % kHeads);
    }
    const PageSelection selection = batch_.MakeSelection(Capacity());
    SelectParams params = batch_.ParamsForSelect(all_numbers_);
    params.rotation = queries_->rotation();
    params.memories = rows;
    params.tiles = tiles_;
    SerialExecutor executor;
    for (int64_t step = 0; step < kSteps; ++step) {
      PageSelection out = selection.Rows(step * kRowsOfStep, kRowsOfStep);
      const absl::Status status =
          SelectReusing(*selector_, *rule_, StepOf(params, step), out, executor);
      EXPECT_TRUE(status.ok()) << status;
    }
    return HostLists(selection);
  }

  Lists OnGpu() {
    std::vector<std::unique_ptr<CudaSelectionMemory>> memories;
    std::vector<DeviceSelectionMemory> views(kSlots);
    for (size_t slot = 0; slot < kRemembering; ++slot) {
      memories.push_back(CudaSelectionMemory::Create(Needs(), nullptr).value());
      views[slot] = memories.back()->view();
    }
    DeviceMemory device;
    const DeviceSelectionMemory* const device_views =
        device.Copy(views.data(), views.size()).value();
    const DeviceMethod method = MakeDeviceMethod({.selector = tested_.selector,
                                                  .preset = tested_.preset,
                                                  .scope = selector_->scope(),
                                                  .tiles = kSlots,
                                                  .max_budget_tokens = kBudget},
                                                 batch_.kv().View(), tested_.shape.group);
    const auto run = [&](CudaSelectParams all, const PageSelection& out,
                         std::byte* workspace) -> absl::Status {
      KVASIR_ASSIGN_OR_RETURN(const QueryTile* tiles, device.Copy(tiles_.data(), tiles_.size()));
      all.tiles = {tiles, tiles_.size()};
      for (int64_t step = 0; step < kSteps; ++step) {
        CudaSelectParams params = StepOf(all, step);
        params.device_memories = {device_views, views.size()};
        const PageSelection rows = out.Rows(step * kRowsOfStep, kRowsOfStep);
        if (rule_->ReadsQueries())
          KVASIR_RETURN_IF_ERROR(JudgeReuse(params, selector_->scope(), rows, nullptr, nullptr));
        KVASIR_RETURN_IF_ERROR(method.select(params, rows, workspace));
        // Other layers work there before the next step; or that begins while this one still runs.
        if (step % 2 == 0) continue;
        KVASIR_RETURN_IF_ERROR(
            CudaStatus(cudaMemsetAsync(workspace, 0, static_cast<size_t>(method.workspace_bytes),
                                       /*stream=*/nullptr),
                       "clearing the workspace"));
      }
      return CudaStatus(cudaDeviceSynchronize(), "running the kernels");
    };
    return RunSelectOnGpu(batch_, all_numbers_, HostLists(batch_, Capacity()).View(),
                          method.workspace_bytes, run, queries_->rotation());
  }

  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kRowsOfStep = kSlots * kHeads;

 private:
  static MethodOptions OptionsOf(const ReuseCase& tested) {
    MethodOptions options;
    if (!tested.preset.empty()) options.push_back({"preset", tested.preset});
    if (tested.scope != "group") options.push_back({"scope", tested.scope});
    return options;
  }
  int64_t Capacity() const { return selector_->MaxEntries(numbers_, tested_.context); }
  MemoryNeeds Needs() const {
    return {*selector_, *rule_, layout_, tested_.shape.group, numbers_, tested_.context};
  }

  const ReuseCase& tested_;
  const std::unique_ptr<Selector> selector_;
  const std::unique_ptr<ReuseRule> rule_;
  AttentionBatch batch_;
  const KvLayout layout_;
  PolicyNumbers numbers_;
  std::unique_ptr<TurningQueries> queries_;
  std::vector<PolicyNumbers> all_numbers_;
  std::vector<QueryTile> tiles_;
};

// Verdicts and headers are the same; how many tokens of the lists are others.
TEST_P(ReuseCudaTest, EveryStepServesAndSelectsAsOnTheCpu) {
  ReuseRun run(GetParam());
  HostLists expected = run.OnCpu();
  const Lists found = run.OnGpu();
  std::set<int32_t> reused;  // how many stages
  int64_t tokens = 0, others = 0;
  for (size_t row = 0; row < expected.headers.size(); ++row) {
    SCOPED_TRACE(testing::Message() << "step " << row / ReuseRun::kRowsOfStep << ", row "
                                    << row % ReuseRun::kRowsOfStep);
    const SelectionHeader& header = expected.headers[row];
    EXPECT_EQ(found.headers[row].kind, header.kind);
    EXPECT_EQ(found.headers[row].sink_end, header.sink_end);
    EXPECT_EQ(found.headers[row].window_begin, header.window_begin);
    EXPECT_EQ(found.headers[row].query_position, header.query_position);
    EXPECT_EQ(found.headers[row].made_at, header.made_at);
    ASSERT_EQ(found.headers[row].reused_stages, header.reused_stages);
    reused.insert(header.reused_stages);
    const auto mine = TokensOf(found.headers[row], found.list(row), &SelectionEntry::live);
    const auto theirs =
        TokensOf(header, expected.View().list(static_cast<int64_t>(row)), &SelectionEntry::live);
    std::vector<int64_t> both;
    std::set_intersection(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                          std::back_inserter(both));
    EXPECT_EQ(mine.size(), theirs.size());
    tokens += std::ssize(theirs);
    others += std::ssize(theirs) - std::ssize(both);
  }
  EXPECT_LE(others * 500, tokens) << others << " of " << tokens;
  const auto num_stages = static_cast<int32_t>(run.selector().RefreshIntervals().size());
  EXPECT_EQ(reused.count(0), 1u) << "premise: some steps select";
  EXPECT_EQ(reused.count(num_stages), 1u) << "premise: some lists serve";
  // Under `cosine` all stages are of one age.
  if (num_stages > 1 && GetParam().rule != "cosine") {
    EXPECT_GT(reused.size(), 2u) << "premise: some stages serve, and others run";
  }
}

}  // namespace
}  // namespace kvasir::kernels
