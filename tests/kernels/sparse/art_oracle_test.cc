// Attention that ends early against the independent definition in art_oracle.py: which pages stay
// unread, and the output, by every implementation and after every selector.
#include <algorithm>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "kernels/append/digests.h"
#include "kernels/append/key_codes.h"
#include "kernels/sparse/common/select_common.h"
#include "kernels/sparse/policy.h"
#include "tests/kernels/sparse/oracle_values.h"
#include "tests/support/attend_implementations.h"
#include "tests/support/compare.h"

namespace kvasir::kernels {
namespace {

using nlohmann::json;
using Side = FakePagedKv::Side;

constexpr int64_t kDim = 64, kKvHeads = 2;
constexpr int64_t kLayer = AttentionShape{}.layer;

MethodOptions OptionsOf(const json& fields) {
  MethodOptions options;
  for (const auto& [name, value] : fields.items()) {
    options.push_back({name, value.is_string() ? value.get<std::string>() : value.dump()});
  }
  return options;
}

// A recorded case as a batch of one query, its selection and its terminator.
class OracleCase {
 public:
  OracleCase(const json& c, DType dtype)
      : c_(c),
        context_(c["first"].get<int64_t>() + 1),
        batch_({.activation = dtype,
                .kv = dtype,
                .head_dim = kDim,
                .kv_heads = kKvHeads,
                .group = std::ssize(c["peak_q"])},
               1, context_, 1) {
    FillKv();
    FillQueries();
    Select();
    terminator_ = MakeTerminator("art", OptionsOf(c["art"])).value();
    const Termination termination =
        MakeTermination(terminator_.get(), batch_.blocks()[0], numbers_[0]);
    batch_.SetTerminations({termination});
  }

  void ExpectWhatIsRecorded(const AttendImplementation& implementation) {
    batch_.Run([&](AttendParams p, Executor& executor) {
      if (selector_ != nullptr) {
        p.selection = {.headers = headers_.data(),
                       .entries = entries_.data(),
                       .num_rows = kKvHeads,
                       .capacity = capacity_};
      }
      implementation.run(p, executor);
    });
    for (int64_t head = 0; head < kKvHeads; ++head) {
      ExpectUnread(head);
      ExpectOut(head);
    }
  }

 private:
  void FillKv() {
    batch_.FillContext(0, context_);
    for (int64_t head = 0; head < kKvHeads; ++head) {
      for (int64_t t = 0; t < context_; ++t) {
        std::byte* key = batch_.kv().Token(Side::kKey, 0, t, kLayer, head);
        std::byte* value = batch_.kv().Token(Side::kValue, 0, t, kLayer, head);
        const bool dull = Within("dull", t) != nullptr;
        for (int64_t i = 0; i < kDim; ++i) {
          batch_.kv().Set(key, i, OracleValue(c_["seed"], OracleSide::kKey, t, head, i));
          const float x = OracleValue(c_["seed"], OracleSide::kValue, t, head, i);
          batch_.kv().Set(value, i, dull ? 0 : x);
        }
        const json* peak = Within("peaks", t);
        batch_.kv().Set(key, 0, peak == nullptr ? 0 : (*peak)[2].get<float>());
      }
    }
    for (int64_t block = 0; block * kPageTokens < context_; ++block) {
      const int64_t tokens = std::min(kPageTokens, context_ - block * kPageTokens);
      KVASIR_CHECK(RebuildBounds(batch_.kv().View(), 0, block, tokens).ok());
      KVASIR_CHECK(RebuildKeyCodes(batch_.kv().View(), 0, block, tokens).ok());
    }
  }
  // The last of the case's ranges that hold the token.
  const json* Within(const char* ranges, int64_t t) const {
    const json* found = nullptr;
    for (const json& range : c_[ranges]) {
      if (t >= range[0].get<int64_t>() && t < range[1].get<int64_t>()) found = &range;
    }
    return found;
  }

  void FillQueries() {
    batch_.AddBlock(0, context_ - 1, 1);
    for (int64_t head = 0; head < batch_.heads(); ++head) {
      for (int64_t i = 0; i < kDim; ++i) {
        batch_.q(0, head)[i] = OracleValue(c_["seed"], OracleSide::kQuery, context_ - 1, head, i);
      }
      batch_.q(0, head)[0] = c_["peak_q"][static_cast<size_t>(head % batch_.shape().group)];
    }
  }

  void Select() {
    numbers_ = {{.sink_tokens = c_["sink"],
                 .window_tokens = c_["window"],
                 .budget_tokens = c_["budget"],
                 .top_p = c_["top_p"],
                 .patience = c_["patience"]}};
    if (c_["selector"] == "all") return;
    selector_ = MakeSelector(c_["selector"].get<std::string>()).value();
    capacity_ = selector_->MaxEntries(numbers_[0], context_);
    PageSelection selection = batch_.MakeSelection(capacity_);
    SerialExecutor executor;
    const SelectParams params = batch_.ParamsForSelect(numbers_);
    KVASIR_CHECK(selector_->Select(params, selection, executor).ok());
    if (c_["top_p"] < 1) {
      KVASIR_CHECK(MakePruner("top_p").value()->Prune(params, selection, executor).ok());
    }
    headers_.assign(selection.headers, selection.headers + kKvHeads);
    entries_.assign(selection.entries, selection.entries + kKvHeads * capacity_);
  }

  void ExpectUnread(int64_t head) {
    const std::set<int64_t> unread = c_["unread"][static_cast<size_t>(head)];
    const UnreadPages& counted = batch_.unread(0, head);
    EXPECT_EQ(counted.device, std::ssize(unread)) << "KV head " << head;
    EXPECT_EQ(counted.host, 0);
    for (const int64_t page : unread) {
      EXPECT_EQ(batch_.kv().last_touched(0, page, kLayer, head), 0u) << "page " << page;
    }
  }

  void ExpectOut(int64_t head) {
    const bool bf16 = batch_.shape().activation == DType::kBFloat16;
    for (int64_t g = 0; g < batch_.shape().group; ++g) {
      const float* out = batch_.out(0, head * batch_.shape().group + g);
      const std::vector<double> expected =
          c_["out"][static_cast<size_t>(head)][static_cast<size_t>(g)];
      EXPECT_TRUE(tests::AllClose(std::vector<float>(out, out + kDim), expected,
                                  {.absolute = bf16 ? 1e-2 : 2e-5, .relative = bf16 ? 1e-2 : 0}))
          << "KV head " << head << ", query head " << g;
    }
  }

  const json& c_;
  const int64_t context_;
  AttentionBatch batch_;
  std::vector<PolicyNumbers> numbers_;
  std::unique_ptr<Selector> selector_;
  std::unique_ptr<Terminator> terminator_;
  std::vector<SelectionHeader> headers_;
  std::vector<SelectionEntry> entries_;
  int64_t capacity_ = 0;
};

TEST(ArtOracle, EndsWhereTheDefinitionEnds) {
  const json cases = ReadOracleCases("terminations.json");
  ASSERT_GE(cases.size(), 25u);
  for (const AttendImplementation& implementation : AttendImplementations()) {
    for (const json& c : cases) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        SCOPED_TRACE(testing::Message() << implementation.name << ", " << c["name"] << ", "
                                        << DTypeName(dtype).data());
        OracleCase(c, dtype).ExpectWhatIsRecorded(implementation);
      }
    }
  }
}

TEST(ArtOracle, CasesEndEarlyAndDoNot) {
  const json cases = ReadOracleCases("terminations.json");
  const auto ends = [](const json& c) { return !c["unread"][0].empty(); };
  EXPECT_GE(std::count_if(cases.begin(), cases.end(), ends), 12);
  EXPECT_LE(std::count_if(cases.begin(), cases.end(), ends), std::ssize(cases) - 4);
}

}  // namespace
}  // namespace kvasir::kernels
