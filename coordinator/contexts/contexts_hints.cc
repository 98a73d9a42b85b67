// Where the KV of contexts should be: pins, prefetching, demotion, erasing. Answers come from the
// engine's thread, which waits for nothing here.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "coordinator/contexts/contexts.h"
#include "coordinator/contexts/read_sink.h"
#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

constexpr uint32_t kDefaultTtlSeconds = 3600;

v1::ContextHint Hint(const NamedContext& context, v1::Tier tier, v1::HintOutcome outcome,
                     std::string reason = {}) {
  v1::ContextHint hint;
  hint.set_outcome(outcome);
  hint.set_reason(std::move(reason));
  hint.set_tier(tier);
  hint.set_blocks(static_cast<uint32_t>(context.num_blocks()));
  return hint;
}

// The tier in which blocks can be pinned for a wish.
v1::Tier PinnedTier(v1::Tier asked) {
  return asked == v1::TIER_DISK ? v1::TIER_DISK : v1::TIER_HOST;
}

}  // namespace

// --- pins ---------------------------------------------------------------------------------------

void Contexts::Pin(const v1::PinContextRequest& request, const ContextCaller& by,
                   Done<v1::ContextHint> done) {
  const absl::StatusOr<PinOrder> order = OrderOf(request, by);
  if (!order.ok()) return done(order.status());
  if (order->most_blocks == 0 && order->context->num_blocks() > 0) {
    return done(Hint(*order->context, order->tier, v1::HINT_OUTCOME_REJECTED,
                     "the tenant has pinned as much in this tier as it may"));
  }
  engine_->Pin(order->context, order->tier, order->most_blocks,
               [this, order = *order, done](const absl::StatusOr<PinnedBlocks>& pinned) {
                 OnAnswered(order);
                 if (!pinned.ok()) return done(pinned.status());
                 done(OnPinned(order, *pinned));
               });
}

absl::StatusOr<Contexts::PinOrder> Contexts::OrderOf(const v1::PinContextRequest& request,
                                                     const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  PinOrder order = {.context = nullptr, .asked = request.tier()};
  order.tier = PinnedTier(request.tier());
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, engine_->Group());
  order.pin.ttl = absl::Seconds(request.has_ttl_s() ? request.ttl_s() : kDefaultTtlSeconds);
  order.pin.expires = After(clock_.Now(), order.pin.ttl);
  order.pin.refresh = request.refresh_on_hit();
  MutexLock lock(mu_);
  KVASIR_ASSIGN_OR_RETURN(const Entry* entry, FindEntry(by.tenant, request.name()));
  order.context = entry->context;
  order.most_blocks =
      std::min(order.context->num_blocks(),
               Quota(*order.context, order.tier, by.caller.get(), BlockBytesOf(group)));
  EntryOf(*order.context)->ordered_blocks[order.tier] += order.most_blocks;
  return order;
}

void Contexts::OnAnswered(const PinOrder& order) {
  MutexLock lock(mu_);
  Entry* const entry = EntryOf(*order.context);
  if (entry != nullptr) entry->ordered_blocks[order.tier] -= order.most_blocks;
}

int64_t Contexts::Quota(const NamedContext& context, v1::Tier tier, const Caller* caller,
                        int64_t block_bytes) const {
  const bool on_disk = tier == v1::TIER_DISK;
  int64_t bytes = on_disk ? options_.pin_disk_bytes : options_.pin_host_bytes;
  if (caller != nullptr) {
    const CallerLimits& limits = caller->limits();
    const int64_t own = on_disk ? limits.pinned_disk_bytes : limits.pinned_host_bytes;
    if (own > 0) bytes = own;
  }
  if (bytes == 0) return std::numeric_limits<int64_t>::max();
  int64_t pinned = 0;
  ForEachOf(context.tenant, caller, [&](const Entry& entry) {
    if (entry.context.get() == &context) return;
    const auto pin = entry.pins.find(tier);
    const auto ordered = entry.ordered_blocks.find(tier);
    pinned += std::max(pin == entry.pins.end() ? 0 : pin->second.blocks.granted,
                       ordered == entry.ordered_blocks.end() ? 0 : ordered->second);
  });
  return std::max<int64_t>(0, bytes / std::max<int64_t>(1, block_bytes) - pinned);
}

v1::ContextHint Contexts::OnPinned(const PinOrder& order, const PinnedBlocks& blocks) {
  const NamedContext& context = *order.context;
  MutexLock lock(mu_);
  Entry* const entry = EntryOf(context);
  if (entry == nullptr) {
    to_unpin_.emplace_back(context.number, order.tier);
    changed_.NotifyAll();
  }
  if (entry != nullptr && blocks.granted == 0) {
    entry->is_unsaved |= entry->pins.erase(order.tier) > 0;  // the engine has ended it
    changed_.NotifyAll();
  }
  if (entry == nullptr || blocks.granted == 0) {
    return Hint(context, order.tier, v1::HINT_OUTCOME_REJECTED,
                entry == nullptr            ? "the context was deleted"
                : context.num_blocks() == 0 ? "it has no whole block of 64 tokens"
                : order.tier == v1::TIER_DISK
                    ? "the disk tier has no room for it, or there is none (--kv-disk-path)"
                    : "the host tier has no room for it beside the longest context "
                      "(--kv-host-size-gb)");
  }
  PinState& pin = entry->pins[order.tier];
  pin = order.pin;
  pin.blocks = blocks;
  entry->is_unsaved = true;
  const bool is_there = blocks.present == blocks.granted;
  if (!is_there) ReadSoon(*entry);
  changed_.NotifyAll();
  v1::ContextHint hint = Hint(context, order.tier, v1::HINT_OUTCOME_ACCEPTED);
  if (blocks.granted < context.num_blocks()) {
    hint.set_outcome(v1::HINT_OUTCOME_CLIPPED);
    hint.set_reason("there is room for a part of it, by the tier or by the tenant's quota");
  } else if (order.asked == v1::TIER_DEVICE) {
    hint.set_outcome(v1::HINT_OUTCOME_CLIPPED);
    hint.set_reason("pages in the device tier follow use; it is pinned in the host tier");
  } else if (!is_there) {
    hint.set_outcome(v1::HINT_OUTCOME_DEFERRED);
    hint.set_reason("it is being brought into the tier");
  }
  hint.set_granted_blocks(static_cast<uint32_t>(blocks.granted));
  hint.set_present_blocks(static_cast<uint32_t>(blocks.present));
  hint.mutable_expires_at()->set_seconds(absl::ToUnixSeconds(absl::Now() + order.pin.ttl));
  return hint;
}

void Contexts::PinAgain(const std::shared_ptr<const NamedContext>& context) {
  std::vector<std::pair<v1::Tier, int64_t>> pins;
  {
    MutexLock lock(mu_);
    const Entry* const entry = EntryOf(*context);
    if (entry == nullptr) return;
    for (const auto& [tier, pin] : entry->pins) pins.emplace_back(tier, pin.blocks.granted);
  }
  for (const auto& [tier, granted] : pins) {
    engine_->Pin(context, tier, granted,
                 [this, context, tier = tier](const absl::StatusOr<PinnedBlocks>& pinned) {
                   if (!pinned.ok()) return;  // the next group's readiness pins it again
                   MutexLock lock(mu_);
                   Entry* const entry = EntryOf(*context);
                   if (entry == nullptr || !entry->pins.contains(tier)) {
                     to_unpin_.emplace_back(context->number, tier);
                     changed_.NotifyAll();
                   } else {
                     entry->pins[tier].blocks = *pinned;
                   }
                 });
  }
}

void Contexts::Unpin(const v1::UnpinContextRequest& request, const ContextCaller& by,
                     Done<v1::ContextHint> done) {
  absl::Status status = CheckLimits("", request);
  if (!status.ok()) return done(status);
  const v1::Tier tier = PinnedTier(request.tier());
  v1::ContextHint hint;
  int64_t number = 0;
  {
    MutexLock lock(mu_);
    const absl::StatusOr<const Entry*> found = FindEntry(by.tenant, request.name());
    if (!found.ok()) {
      status = found.status();
    } else {
      Entry& entry = *EntryOf(*(*found)->context);
      number = entry.context->number;
      const bool was_pinned = entry.pins.erase(tier) > 0;
      entry.is_unsaved |= was_pinned;
      hint = Hint(*entry.context, tier,
                  was_pinned ? v1::HINT_OUTCOME_ACCEPTED : v1::HINT_OUTCOME_REJECTED,
                  was_pinned ? "" : "it is not pinned in this tier");
      changed_.NotifyAll();
    }
  }
  if (!status.ok()) return done(status);
  engine_->Unpin(number, tier);
  done(hint);
}

// --- prefetching and demotion -------------------------------------------------------------------

void Contexts::Prefetch(const v1::PrefetchContextRequest& request, const ContextCaller& by,
                        Done<v1::ContextHint> done) {
  if (absl::Status status = CheckLimits("", request); !status.ok()) return done(status);
  const auto context = Find(by.tenant, request.name());
  if (!context.ok()) return done(context.status());
  engine_->CountInMemory(
      *context, [this, context = *context, done](const absl::StatusOr<int64_t>& count) {
        if (!count.ok()) return done(count.status());
        v1::ContextHint hint = Hint(*context, v1::TIER_HOST, v1::HINT_OUTCOME_ACCEPTED);
        hint.set_present_blocks(static_cast<uint32_t>(*count));
        hint.set_granted_blocks(hint.blocks());
        if (*count < context->num_blocks()) {
          hint.set_outcome(v1::HINT_OUTCOME_DEFERRED);
          hint.set_reason("it is being brought into the host tier");
          MutexLock lock(mu_);
          if (Entry* const entry = EntryOf(*context); entry != nullptr) ReadSoon(*entry);
        }
        done(hint);
      });
}

void Contexts::Demote(const v1::DemoteContextRequest& request, const ContextCaller& by,
                      Done<v1::ContextHint> done) {
  if (absl::Status status = CheckLimits("", request); !status.ok()) return done(status);
  const auto context = Find(by.tenant, request.name());
  if (!context.ok()) return done(context.status());
  bool is_pinned = false;
  {
    MutexLock lock(mu_);
    const Entry* const entry = EntryOf(**context);
    is_pinned = entry != nullptr && entry->pins.contains(v1::TIER_HOST);
  }
  if (is_pinned) {
    return done(Hint(**context, v1::TIER_DISK, v1::HINT_OUTCOME_REJECTED,
                     "it is pinned in the host tier; Unpin it first"));
  }
  engine_->Demote(*context, [context = *context, done](const absl::StatusOr<int64_t>& count) {
    if (absl::IsFailedPrecondition(count.status())) {
      return done(Hint(*context, v1::TIER_DISK, v1::HINT_OUTCOME_REJECTED,
                       std::string(count.status().message())));
    }
    if (!count.ok()) return done(count.status());
    v1::ContextHint hint = Hint(*context, v1::TIER_DISK, v1::HINT_OUTCOME_DEFERRED,
                                "its blocks are written, and those that nobody uses leave memory");
    hint.set_granted_blocks(static_cast<uint32_t>(*count));
    if (*count == 0) hint.set_outcome(v1::HINT_OUTCOME_ACCEPTED);
    if (*count == 0) hint.set_reason("none of it was in memory");
    done(hint);
  });
}

// --- erasing ------------------------------------------------------------------------------------

void Contexts::Evict(const v1::EvictRequest& request, const ContextCaller& by,
                     Done<v1::EvictResponse> done) {
  if (absl::Status status = CheckLimits("", request); !status.ok()) return done(status);
  v1::EvictResponse evicted;
  const auto on_erased = [this, done](const v1::EvictResponse& counts) {
    return [this, done,
            counts = v1::EvictResponse(counts)](const absl::StatusOr<v1::Erased>& erased) mutable {
      if (!erased.ok()) return done(erased.status());
      counts.set_host_blocks(erased->host_blocks());
      counts.set_host_bytes(erased->host_bytes());
      counts.set_disk_blocks(erased->disk_blocks());
      counts.set_disk_bytes(erased->disk_bytes());
      counts.set_blocks_in_use(erased->blocks_in_use());
      counts.set_outcome(erased->blocks_in_use() > 0 ? v1::HINT_OUTCOME_CLIPPED
                                                     : v1::HINT_OUTCOME_ACCEPTED);
      metrics_.Erased(*erased);
      done(counts);
    };
  };
  switch (request.what_case()) {
    case v1::EvictRequest::kPrefix:
    case v1::EvictRequest::kContext: {
      const auto context = EvictedContext(request, by);
      if (!context.ok()) return done(context.status());
      return engine_->EraseContext(*context, on_erased(evicted));
    }
    case v1::EvictRequest::kTenant: {
      if (!request.tenant()) break;
      if (absl::Status status = ForgetAll(&by.tenant, evicted); !status.ok()) return done(status);
      return engine_->EraseTenant(by.tenant, on_erased(evicted));
    }
    case v1::EvictRequest::kAll: {
      if (!request.all()) break;
      if (by.caller != nullptr) {
        return done(absl::PermissionDeniedError(
            "all is set, and the server has API keys, whose tenants are evicted one by one"));
      }
      if (absl::Status status = ForgetAll(nullptr, evicted); !status.ok()) return done(status);
      return engine_->EraseAll(on_erased(evicted));
    }
    case v1::EvictRequest::WHAT_NOT_SET:
      break;
  }
  done(absl::InvalidArgumentError(
      "none of prefix, context, tenant and all is set; set one of them"));
}

absl::StatusOr<std::shared_ptr<const NamedContext>> Contexts::EvictedContext(
    const v1::EvictRequest& request, const ContextCaller& by) {
  if (request.has_prefix()) {
    NamedContext prefix = {.tenant = by.tenant, .name = {}, .tokens = {}, .policy = {}};
    prefix.tokens.assign(request.prefix().ids().begin(), request.prefix().ids().end());
    prefix.policy = request.policy();
    return std::make_shared<const NamedContext>(std::move(prefix));
  }
  std::shared_ptr<ReadSink> abandoned;
  std::shared_ptr<const NamedContext> context;
  {
    MutexLock lock(mu_);
    KVASIR_ASSIGN_OR_RETURN(const Entry* found, FindEntry(by.tenant, request.context()));
    Entry& entry = *EntryOf(*found->context);
    context = entry.context;
    std::erase(to_read_, context);
    if (reading_ != nullptr && &reading_->context() == context.get()) abandoned = reading_;
    entry.state = v1::CONTEXT_STATE_EVICTED;
    entry.processed_tokens = 0;
    entry.pins.clear();
    entry.is_unsaved = true;
    CountStates();
    changed_.NotifyAll();
  }
  LetGo(*context);
  if (abandoned != nullptr) abandoned->Abandon(absl::CancelledError("the context is evicted"));
  return context;
}

absl::Status Contexts::ForgetAll(const std::string* tenant, v1::EvictResponse& evicted) {
  MutexLock files(files_mu_);
  std::vector<std::shared_ptr<const NamedContext>> forgotten;
  {
    MutexLock lock(mu_);
    for (const auto& [key, entry] : entries_) {
      if (tenant == nullptr || key.first == *tenant) forgotten.push_back(entry.context);
    }
  }
  int64_t bytes = 0;
  for (const std::shared_ptr<const NamedContext>& context : forgotten) {
    KVASIR_RETURN_IF_ERROR(Forget(*context, absl::CancelledError("the context is evicted"), bytes));
  }
  evicted.set_contexts(static_cast<uint32_t>(forgotten.size()));
  evicted.set_record_bytes(static_cast<uint64_t>(bytes));
  return absl::OkStatus();
}

}  // namespace kvasir::coordinator
