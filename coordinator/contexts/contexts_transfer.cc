// Contexts that leave the server, and come to it, as parts. One block is on its way at a time: the
// ranks send and take it beside their steps.
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/worker_protocol.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr absl::Duration kRetry = absl::Seconds(10);
// A transfer that is slower than this, after a time for free, ends: others wait for it.
constexpr int64_t kLeastBytesPerSecond = int64_t{256} << 10;
constexpr absl::Duration kFreeTime = absl::Minutes(2);

// Calls `start` with a function that takes the result, and waits until it was called.
template <typename Result, typename Start>
Result Await(Start start) {
  auto promise = std::make_shared<std::promise<Result>>();
  std::future<Result> result = promise->get_future();
  start([promise](const Result& told) { promise->set_value(told); });
  return result.get();
}

// The engine's exchange of a context, until it is destroyed.
class Exchange {
 public:
  Exchange(ContextEngine& engine, const std::shared_ptr<const NamedContext>& context)
      : engine_(engine), number_(context->number), held_([&] {
          return Await<absl::StatusOr<int64_t>>(
              [&](auto done) { engine.BeginExchange(context, done); });
        }()) {}
  ~Exchange() { engine_.EndExchange(number_); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Number of blocks that were in memory when it began.
  const absl::StatusOr<int64_t>& held() const { return held_; }

 private:
  ContextEngine& engine_;
  const int64_t number_;
  const absl::StatusOr<int64_t> held_;
};

// Holds the client of a transfer to the least pace.
class Pace {
 public:
  explicit Pace(const Clock& clock) : clock_(clock), begun_(clock.Now()) {}

  // Called after each part.
  absl::Status Count(const v1::ContextPart& part) {
    bytes_ += static_cast<int64_t>(part.ByteSizeLong());
    const absl::Duration most = kFreeTime + absl::Seconds(bytes_ / kLeastBytesPerSecond);
    if (Between(begun_, clock_.Now()) <= most) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat("the transfer moved ", bytes_, " bytes in ",
                                                    absl::FormatDuration(most), ", and must move ",
                                                    kLeastBytesPerSecond, " a second"));
  }

 private:
  const Clock& clock_;
  const TimePoint begun_;
  int64_t bytes_ = 0;
};

// The block whose parts a client is sending. Parts come in the order of blocks, and of heads in a
// block, so that a stream is bounded.
class ArrivingBlock {
 public:
  // `due`: the first block that the server has not got; parts of those before are left out.
  explicit ArrivingBlock(int64_t due) : block_(due) {}

  // Number of blocks that came, or were there.
  int64_t block() const { return block_; }
  const std::vector<v1::HeadExtent>& heads() const { return heads_; }
  // Whether the part is of the block after this one.
  bool EndsWith(const v1::ContextExtent& extent) const {
    return int64_t{extent.block()} == block_ + 1;
  }
  std::vector<v1::HeadExtent> TakeHeads() {
    ++block_;
    bytes_ = 0;
    return std::exchange(heads_, {});
  }
  // INVALID_ARGUMENT for a part out of order, or more bytes than a block has.
  absl::Status Add(v1::ContextExtent& extent) {
    KVASIR_RETURN_IF_ERROR(CheckLimits("extent", extent));
    const std::pair<uint32_t, uint32_t> place(extent.block(), extent.head());
    if (last_.has_value() && place <= *last_) {
      return absl::InvalidArgumentError(absl::StrCat("a part of block ", extent.block(), ", head ",
                                                     extent.head(), " comes after one of block ",
                                                     last_->first, ", head ", last_->second,
                                                     "; send what Export gave, in order"));
    }
    last_ = place;
    if (int64_t{extent.block()} < block_) return absl::OkStatus();
    if (int64_t{extent.block()} != block_) {
      return absl::InvalidArgumentError(
          absl::StrCat("a part is of block ", extent.block(), " where block ", block_, " was due"));
    }
    bytes_ += std::ssize(extent.extent());
    if (bytes_ > proto::kMaxExchangedBlockBytes) {
      return absl::InvalidArgumentError(absl::StrCat("block ", block_, " has more than ",
                                                     proto::kMaxExchangedBlockBytes,
                                                     " bytes; no model here has such blocks"));
    }
    v1::HeadExtent& head = heads_.emplace_back();
    head.set_head(extent.head());
    *head.mutable_extent() = std::move(*extent.mutable_extent());
    return absl::OkStatus();
  }

 private:
  int64_t block_;
  std::vector<v1::HeadExtent> heads_;
  int64_t bytes_ = 0;                                  // of heads_
  std::optional<std::pair<uint32_t, uint32_t>> last_;  // block and head of the last part
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Contexts::Transfer>> Contexts::BeginTransfer() {
  MutexLock lock(mu_);
  if (!transfer_.expired()) {
    return proto::WithRetryDelay(
        absl::ResourceExhaustedError("another context is exported or imported; try again later"),
        kRetry);
  }
  const auto transfer = std::make_shared<const Transfer>();
  transfer_ = transfer;
  return transfer;
}

absl::Status Contexts::CheckUnderWay(const NamedContext& context) {
  MutexLock lock(mu_);
  const Entry* const entry = EntryOf(context);
  if (entry != nullptr && entry->state != v1::CONTEXT_STATE_EVICTED) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("context ", context.name, " was deleted or evicted meanwhile; begin again"));
}

absl::Status Contexts::Export(const Transfer& /*transfer*/, const v1::ExportContextRequest& request,
                              const ContextCaller& by,
                              absl::FunctionRef<bool(const v1::ContextPart& part)> write) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> context,
                          Find(by.tenant, request.name()));
  return ExportBlocks(context, write);
}

absl::Status Contexts::ExportBlocks(const std::shared_ptr<const NamedContext>& context,
                                    absl::FunctionRef<bool(const v1::ContextPart& part)> write) {
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, engine_->Group());
  const Exchange exchange(*engine_, context);
  KVASIR_RETURN_IF_ERROR(exchange.held().status());
  const int64_t blocks = context->num_blocks();
  if (*exchange.held() < blocks) {
    return absl::FailedPreconditionError(
        absl::StrCat(*exchange.held(), " of ", blocks, " blocks of context ", context->name,
                     " are in the host tier; Prefetch it, and Pin it, first"));
  }
  KVASIR_RETURN_IF_ERROR(CheckUnderWay(*context));
  Pace pace(clock_);
  v1::ContextPart part;
  v1::ContextHead& head = *part.mutable_head();
  head.mutable_token_ids()->Assign(context->tokens.begin(), context->tokens.end());
  *head.mutable_policy() = context->policy;
  head.set_weights_hash(absl::BytesToHexString(group.weights_hash));
  head.set_kv_form(group.kv_form);
  if (!write(part)) return absl::CancelledError("the client is gone");
  for (int64_t i = 0; i < blocks; ++i) {
    KVASIR_ASSIGN_OR_RETURN(const std::vector<v1::HeadExtent> heads,
                            Await<absl::StatusOr<std::vector<v1::HeadExtent>>>([&](auto done) {
                              engine_->ExportBlock(context->number, i, done);
                            }));
    for (const v1::HeadExtent& given : heads) {
      v1::ContextExtent& extent = *part.mutable_extent();
      extent.set_block(static_cast<uint32_t>(i));
      extent.set_head(given.head());
      extent.set_extent(given.extent());
      if (!write(part)) return absl::CancelledError("the client is gone");
      KVASIR_RETURN_IF_ERROR(pace.Count(part));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Context> Contexts::Import(const Transfer& /*transfer*/, const std::string& name,
                                             const ContextCaller& by, PartReader read) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<v1::ContextPart> first, read());
  if (!first.has_value() || !first->has_head()) {
    return absl::InvalidArgumentError("the first part is no head; send what Export gave, in order");
  }
  KVASIR_ASSIGN_OR_RETURN(NamedContext parsed, ParseHead(first->head(), name, by));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> context,
                          Add(std::move(parsed), by.caller, Reading::kLater));
  absl::Status imported = ImportBlocks(context, read);
  if (imported.ok()) imported = CheckUnderWay(*context);
  if (!imported.ok()) {
    MutexLock files(files_mu_);
    int64_t record_bytes = 0;
    KVASIR_RETURN_IF_ERROR(Forget(*context, imported, record_bytes));
    return imported;
  }
  {
    MutexLock lock(mu_);
    if (Entry* const entry = EntryOf(*context); entry != nullptr) ReadSoon(*entry);
  }
  return DescribeNow(*context);
}

absl::StatusOr<NamedContext> Contexts::ParseHead(const v1::ContextHead& head,
                                                 const std::string& name, const ContextCaller& by) {
  v1::CreateContextRequest create;
  create.set_name(name);
  KVASIR_RETURN_IF_ERROR(CheckLimits("", create));
  KVASIR_RETURN_IF_ERROR(CheckLimits("head", head));
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, engine_->Group());
  const std::string weights = absl::BytesToHexString(group.weights_hash);
  if (head.weights_hash() != weights || head.kv_form() != group.kv_form) {
    return absl::FailedPreconditionError(
        absl::StrCat("the context is of weights ", head.weights_hash(), " and KV ", head.kv_form(),
                     ", the server has weights ", weights, " and KV ", group.kv_form,
                     "; create the context from its text"));
  }
  v1::GenerateRequest prompt;
  *prompt.mutable_token_ids()->mutable_ids() = head.token_ids();
  *prompt.mutable_policy() = head.policy();
  NamedContext context = {.number = 0,
                          .tenant = by.tenant,
                          .name = name,
                          .tokens = {},
                          .policy = head.policy(),
                          .created_at_unix_s = absl::ToUnixSeconds(absl::Now())};
  KVASIR_ASSIGN_OR_RETURN(context.tokens, engine_->PromptOf(prompt, 0));
  return context;
}

absl::Status Contexts::ImportBlocks(const std::shared_ptr<const NamedContext>& context,
                                    PartReader read) {
  const Exchange exchange(*engine_, context);
  KVASIR_RETURN_IF_ERROR(exchange.held().status());
  KVASIR_RETURN_IF_ERROR(CheckUnderWay(*context));  // who forgets it from now on ends the exchange
  Pace pace(clock_);
  ArrivingBlock arriving(*exchange.held());
  const auto take = [&]() -> absl::Status {
    if (arriving.heads().empty()) return absl::OkStatus();
    return Await<absl::Status>(
        [&](auto done) { engine_->ImportBlock(context->number, arriving.TakeHeads(), done); });
  };
  for (;;) {
    KVASIR_ASSIGN_OR_RETURN(std::optional<v1::ContextPart> part, read());
    if (!part.has_value()) break;
    KVASIR_RETURN_IF_ERROR(pace.Count(*part));
    if (!part->has_extent()) return absl::InvalidArgumentError("a part has no extent");
    v1::ContextExtent& extent = *part->mutable_extent();
    if (arriving.EndsWith(extent)) KVASIR_RETURN_IF_ERROR(take());
    KVASIR_RETURN_IF_ERROR(arriving.Add(extent));
  }
  KVASIR_RETURN_IF_ERROR(take());
  if (arriving.block() >= context->num_blocks()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the parts end after ", arriving.block(), " of ",
                                                 context->num_blocks(), " blocks"));
}

}  // namespace kvasir::coordinator
