#include "coordinator/contexts/contexts.h"

#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "spdlog/spdlog.h"

#include "kernels/base/mutex.h"
#include "proto/grpc_status.h"
#include "tests/support/fake_clock.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kBlockBytes = 1000;

// An engine that does what the test says. Reads end as soon as they begin.
class FakeEngine final : public ContextEngine {
 public:
  absl::StatusOr<std::vector<int32_t>> PromptOf(const v1::GenerateRequest& request,
                                                int64_t /*before*/) override {
    const auto& ids = request.token_ids().ids();
    return std::vector<int32_t>(ids.begin(), ids.end());
  }
  void Read(const v1::GenerateRequest& /*request*/, const RequestOrigin& origin,
            const std::shared_ptr<ClientSink>& sink) override {
    sink->Close(absl::OkStatus());
    // "context-NAME-NUMBER"
    const absl::string_view name = absl::StripPrefix(origin.request_id, "context-");
    kernels::MutexLock lock(mu_);
    last_read_ = std::string(name.substr(0, name.rfind('-')));
    changed_.NotifyAll();
  }
  absl::StatusOr<GroupInfo> Group() override {
    GroupInfo group;
    group.weights_hash = "w";
    group.kv_form = "form";
    group.ranks.emplace_back().set_block_bytes(kBlockBytes);
    return group;
  }
  // Waits until the test answers.
  void Pin(const Context& context, v1::Tier /*tier*/, int64_t most_blocks,
           Done<PinnedBlocks> done) override {
    kernels::MutexLock lock(mu_);
    pins_.push_back({.name = context->name, .most_blocks = most_blocks, .done = std::move(done)});
    changed_.NotifyAll();
  }
  void Unpin(int64_t /*context*/, v1::Tier /*tier*/) override {
    kernels::MutexLock lock(mu_);
    ++unpins_;
    changed_.NotifyAll();
  }
  void CountInMemory(const Context& /*context*/, Done<int64_t> done) override { done(0); }
  void Demote(const Context& /*context*/, Done<int64_t> done) override { done(0); }
  void EraseContext(const Context& /*context*/, Done<v1::Erased> done) override {
    done(v1::Erased());
  }
  void EraseTenant(const std::string& /*tenant*/, Done<v1::Erased> done) override {
    done(v1::Erased());
  }
  void EraseAll(Done<v1::Erased> done) override { done(v1::Erased()); }
  void BeginExchange(const Context& /*context*/, Done<int64_t> done) override { done(0); }
  void EndExchange(int64_t /*context*/) override { ++ended_exchanges; }
  void ExportBlock(int64_t /*context*/, int64_t /*index*/,
                   Done<std::vector<v1::HeadExtent>> done) override {
    done(std::vector<v1::HeadExtent>());
  }
  void ImportBlock(int64_t /*context*/, std::vector<v1::HeadExtent> heads,
                   std::function<void(const absl::Status&)> done) override {
    imported.push_back(std::ssize(heads));
    if (on_import) on_import();
    done(absl::OkStatus());
  }

  struct PinCall {
    std::string name;
    int64_t most_blocks = 0;
    Done<PinnedBlocks> done;
  };
  PinCall TakePin() {
    kernels::MutexLock lock(mu_);
    while (pins_.empty()) changed_.Wait(mu_);
    PinCall call = std::move(pins_.front());
    pins_.pop_front();
    return call;
  }
  void AwaitReadOf(const std::string& context) {
    kernels::MutexLock lock(mu_);
    while (last_read_ != context) changed_.Wait(mu_);
  }
  void AwaitUnpins(int64_t count) {
    kernels::MutexLock lock(mu_);
    while (unpins_ < count) changed_.Wait(mu_);
  }

  std::vector<int64_t> imported;  // heads of each block
  std::function<void()> on_import;
  int64_t ended_exchanges = 0;

 private:
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::deque<PinCall> pins_ GUARDED_BY(mu_);
  std::string last_read_ GUARDED_BY(mu_);
  int64_t unpins_ GUARDED_BY(mu_) = 0;
};

class ContextsTest : public ::testing::Test {
 protected:
  ContextsTest() { spdlog::set_level(spdlog::level::off); }

  void Open(ContextsOptions options = {}) {
    contexts_ = nullptr;
    options.max_contexts = 100;
    options.max_tokens = 1'000'000;
    contexts_ = Contexts::Open(options, clock_, metrics_).value();
    contexts_->Start(engine_);
  }
  v1::CreateContextRequest Blocks(const std::string& name, uint32_t blocks) {
    v1::CreateContextRequest request;
    request.set_name(name);
    for (uint32_t i = 0; i < 64 * blocks; ++i) request.mutable_token_ids()->add_ids(i);
    return request;
  }
  void Create(const std::string& name, uint32_t blocks, const ContextCaller& by = {}) {
    ASSERT_EQ(contexts_->Create(Blocks(name, blocks), by).status(), absl::OkStatus());
    // Where the read of another one begins, that of this one has ended, with all that follows.
    const std::string after = absl::StrCat("after-", ++others_);
    ASSERT_EQ(contexts_->Create(Blocks(after, 1), {.caller = nullptr, .tenant = "others"}).status(),
              absl::OkStatus());
    engine_.AwaitReadOf(after);
  }
  v1::Context Get(const std::string& name, const ContextCaller& by = {}) {
    v1::GetContextRequest request;
    request.set_name(name);
    return contexts_->Get(request, by).value_or(v1::Context());
  }
  absl::Status Delete(const std::string& name) {
    v1::DeleteContextRequest request;
    request.set_name(name);
    return contexts_->Delete(request, {});
  }
  // The hint comes when the engine has answered.
  std::shared_ptr<v1::ContextHint> Pin(const std::string& name, const ContextCaller& by = {},
                                       bool refresh = false) {
    v1::PinContextRequest request;
    request.set_name(name);
    request.set_ttl_s(100);
    request.set_refresh_on_hit(refresh);
    const auto hint = std::make_shared<v1::ContextHint>();
    contexts_->Pin(request, by, [hint](const absl::StatusOr<v1::ContextHint>& told) {
      if (told.ok()) *hint = *told;
    });
    return hint;
  }

  testing::FakeClock clock_;
  Metrics metrics_{"test", {"default"}};
  FakeEngine engine_;
  const testing::ScratchDirectory folder_;
  int64_t others_ = 0;
  std::unique_ptr<Contexts> contexts_;
};

// --- shares -------------------------------------------------------------------------------------

TEST_F(ContextsTest, ATenantMayKeepItsShareAndLeavesTheRestToOthers) {
  ContextsOptions options;
  options.max_tenant_contexts = 2;
  options.max_tenant_tokens = 64 * 4;
  Open(options);
  const ContextCaller greedy = {.caller = nullptr, .tenant = "greedy"};
  const auto create = [&](const std::string& name, uint32_t blocks, const ContextCaller& by) {
    return contexts_->Create(Blocks(name, blocks), by).status();
  };
  ASSERT_EQ(create("a", 2, greedy), absl::OkStatus());
  const absl::Status long_one = create("b", 3, greedy);
  EXPECT_TRUE(absl::IsResourceExhausted(long_one)) << long_one;
  EXPECT_THAT(long_one.message(), HasSubstr("others have 128; it may keep 256"));
  ASSERT_EQ(create("b", 1, greedy), absl::OkStatus());
  const absl::Status third = create("c", 1, greedy);
  EXPECT_TRUE(absl::IsResourceExhausted(third)) << third;
  EXPECT_THAT(third.message(), HasSubstr("has 2 contexts and may keep 2"));
  EXPECT_EQ(create("a", 4, {.caller = nullptr, .tenant = "greedy:not"}), absl::OkStatus());
  EXPECT_EQ(create("a", 4, {.caller = nullptr, .tenant = "other"}), absl::OkStatus());
  v1::DeleteContextRequest request;
  request.set_name("a");
  ASSERT_EQ(contexts_->Delete(request, greedy), absl::OkStatus());
  EXPECT_EQ(create("c", 3, greedy), absl::OkStatus());
}

TEST_F(ContextsTest, AKeysShareIsOneForAllTenantsOfIt) {
  ContextsOptions options;
  options.max_tenant_contexts = 1;
  Open(options);
  const auto key = std::make_shared<const Caller>(
      "key", "acme", CallerLimits{.contexts = 2, .context_tokens = 64 * 4}, nullptr);
  const auto other = std::make_shared<const Caller>("other", "acme-2", CallerLimits(), nullptr);
  const auto create = [&](const std::string& name, uint32_t blocks,
                          const std::shared_ptr<const Caller>& caller, const std::string& part) {
    return contexts_->Create(Blocks(name, blocks), ContextCallerOf(caller, part)).status().code();
  };
  EXPECT_EQ(create("a", 2, other, ""), absl::StatusCode::kOk);
  EXPECT_EQ(create("b", 2, other, "part"), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(create("a", 2, key, "one"), absl::StatusCode::kOk);
  EXPECT_EQ(create("a", 3, key, "two"), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(create("a", 2, key, ""), absl::StatusCode::kOk);
  EXPECT_EQ(create("b", 1, key, "three"), absl::StatusCode::kResourceExhausted);
}

// --- pins ---------------------------------------------------------------------------------------

TEST_F(ContextsTest, PinsThatAreOrderedTogetherHaveOneQuota) {
  ContextsOptions options;
  options.pin_host_bytes = 3 * kBlockBytes;
  Open(options);
  Create("a", 2);
  Create("b", 2);
  const auto first = Pin("a");
  const auto second = Pin("b");
  const FakeEngine::PinCall a = engine_.TakePin();
  const FakeEngine::PinCall b = engine_.TakePin();
  EXPECT_EQ(a.most_blocks, 2);
  EXPECT_EQ(b.most_blocks, 1);
  a.done(absl::UnavailableError("there is no group"));
  b.done(PinnedBlocks{.granted = 1, .present = 1});
  EXPECT_EQ(second->outcome(), v1::HINT_OUTCOME_CLIPPED);
  Pin("a");  // what was refused is not counted any more
  EXPECT_EQ(engine_.TakePin().most_blocks, 2);
}

TEST_F(ContextsTest, AKeysQuotaIsOneForAllTenantsOfIt) {
  Open();
  const auto key = std::make_shared<const Caller>(
      "key", "acme", CallerLimits{.pinned_host_bytes = 3 * kBlockBytes}, nullptr);
  const auto other = std::make_shared<const Caller>("other", "acme-2", CallerLimits(), nullptr);
  const ContextCaller one = ContextCallerOf(key, "one");
  const ContextCaller two = ContextCallerOf(key, "two");
  const ContextCaller stranger = ContextCallerOf(other, "");
  for (const ContextCaller& by : {one, two, stranger}) Create("a", 2, by);
  for (const ContextCaller& by : {stranger, one}) {
    Pin("a", by);
    engine_.TakePin().done(PinnedBlocks{.granted = 2, .present = 2});
  }
  Pin("a", two);
  EXPECT_EQ(engine_.TakePin().most_blocks, 1);
}

TEST_F(ContextsTest, APinThatIsNotGrantedAgainIsOver) {
  Open();
  Create("a", 2);
  Pin("a");
  engine_.TakePin().done(PinnedBlocks{.granted = 2, .present = 2});
  EXPECT_EQ(Get("a").pins_size(), 1);
  const auto hint = Pin("a");
  engine_.TakePin().done(PinnedBlocks());
  EXPECT_EQ(hint->outcome(), v1::HINT_OUTCOME_REJECTED);
  EXPECT_EQ(Get("a").pins_size(), 0);
}

TEST_F(ContextsTest, APinOfAContextThatIsDeletedMeanwhileEnds) {
  Open();
  Create("a", 2);
  const auto hint = Pin("a");
  const FakeEngine::PinCall pin = engine_.TakePin();
  ASSERT_EQ(Delete("a"), absl::OkStatus());
  engine_.AwaitUnpins(2);  // of both tiers, before it was pinned
  pin.done(PinnedBlocks{.granted = 2, .present = 2});
  EXPECT_EQ(hint->outcome(), v1::HINT_OUTCOME_REJECTED);
  engine_.AwaitUnpins(3);
}

TEST_F(ContextsTest, ARefreshedPinOutlivesTheServer) {
  Open({.folder = folder_.path()});
  Create("a", 2);
  Pin("a", {}, /*refresh=*/true);
  engine_.TakePin().done(PinnedBlocks{.granted = 2, .present = 2});
  clock_.Advance(absl::Seconds(80));
  v1::PrefetchContextRequest prefetch;
  prefetch.set_name("a");
  contexts_->Prefetch(prefetch, {}, [](const auto&) {});
  engine_.TakePin().done(PinnedBlocks{.granted = 2, .present = 2});  // after it was read again
  clock_.AwaitWaiter();                                              // its record says 20 s
  ASSERT_EQ(contexts_->Use("", "a").status(), absl::OkStatus());
  const int64_t expires = Get("a").pins(0).expires_at().seconds();
  Open({.folder = folder_.path()});
  ASSERT_EQ(Get("a").pins_size(), 1);
  EXPECT_GE(Get("a").pins(0).expires_at().seconds(), expires - 1);
}

// --- records ------------------------------------------------------------------------------------

TEST_F(ContextsTest, TheDraftOfARecordIsErasedAtStart) {
  const std::string draft = folder_.path() + "/0123.context.new";
  std::ofstream(draft) << "tokens of a tenant";
  Open({.folder = folder_.path()});
  EXPECT_FALSE(std::filesystem::exists(draft));
}

// --- export and import --------------------------------------------------------------------------

class ContextsTransferTest : public ContextsTest {
 protected:
  ContextsTransferTest() {
    Open();
    v1::ContextHead& head = *Add().mutable_head();
    for (uint32_t i = 0; i < 64 * 2; ++i) head.add_token_ids(i);
    head.set_weights_hash("77");
    head.set_kv_form("form");
  }
  v1::ContextPart& Add() { return parts_.emplace_back(); }
  void AddExtent(uint32_t block, uint32_t head, size_t bytes = 10) {
    v1::ContextExtent& extent = *Add().mutable_extent();
    extent.set_block(block);
    extent.set_head(head);
    extent.set_extent(std::string(bytes, 'x'));
  }
  absl::StatusOr<v1::Context> Import() {
    const auto transfer = contexts_->BeginTransfer().value();
    size_t next = 0;
    return contexts_->Import(*transfer, "a", {},
                             [&]() -> absl::StatusOr<std::optional<v1::ContextPart>> {
                               if (next == parts_.size()) return std::optional<v1::ContextPart>();
                               return std::optional<v1::ContextPart>(parts_[next++]);
                             });
  }
  void ExpectRefused(const std::string& words) {
    const absl::Status refused = Import().status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr(words));
    EXPECT_EQ(Get("a").name(), "");
  }

  std::vector<v1::ContextPart> parts_;
};

TEST_F(ContextsTransferTest, BlocksAreMadeOfTheirHeadsInOrder) {
  for (uint32_t block = 0; block < 2; ++block) {
    for (uint32_t head = 0; head < 3; ++head) AddExtent(block, head);
  }
  EXPECT_EQ(Import()->tokens(), 128u);
  EXPECT_THAT(engine_.imported, ElementsAre(3, 3));
  engine_.AwaitReadOf("a");
}

TEST_F(ContextsTransferTest, AStreamWithoutAnEndIsRefused) {
  AddExtent(0, 0);
  AddExtent(0, 0);
  ExpectRefused("in order");
  parts_.pop_back();
  AddExtent(0, 65536);
  ExpectRefused("extent.head");
  parts_.pop_back();
  AddExtent(0, 1, 30 << 20);
  AddExtent(0, 2, 30 << 20);
  ExpectRefused("more than 50331648 bytes");
  EXPECT_THAT(engine_.imported, IsEmpty());
}

TEST_F(ContextsTransferTest, ASlowClientIsCutOff) {
  for (uint32_t block = 0; block < 2; ++block) {
    for (uint32_t head = 0; head < 2; ++head) AddExtent(block, head, 20 << 20);
  }
  // 80 MiB have 120 s and another 320.
  engine_.on_import = [this] { clock_.Advance(absl::Seconds(400)); };
  EXPECT_EQ(Import().status(), absl::OkStatus());
  ASSERT_EQ(Delete("a"), absl::OkStatus());
  engine_.on_import = [this] { clock_.Advance(absl::Hours(1)); };
  const absl::Status slow = Import().status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(slow)) << slow;
  EXPECT_EQ(Get("a").name(), "");
}

TEST_F(ContextsTransferTest, OneAtATime) {
  const auto transfer = contexts_->BeginTransfer();
  ASSERT_EQ(transfer.status(), absl::OkStatus());
  const absl::Status other = contexts_->BeginTransfer().status();
  EXPECT_TRUE(absl::IsResourceExhausted(other)) << other;
  EXPECT_TRUE(proto::RetryDelay(other).has_value());
}

TEST_F(ContextsTransferTest, AnImportThatFailsLeavesAnotherContextOfItsNameAlone) {
  AddExtent(0, 0);
  AddExtent(1, 0);
  engine_.on_import = [this] {
    if (engine_.imported.size() > 1) return;
    ASSERT_EQ(Delete("a"), absl::OkStatus());
    EXPECT_EQ(engine_.ended_exchanges, 1);
    Create("a", 1);
  };
  const absl::Status aborted = Import().status();
  EXPECT_TRUE(absl::IsAborted(aborted)) << aborted;
  EXPECT_EQ(Get("a").tokens(), 64u);
}

}  // namespace
}  // namespace kvasir::coordinator
