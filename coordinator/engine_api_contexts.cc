// The engine's API as contexts use it: blocks that are pinned, demoted and erased by the scheduler,
// on the engine loop's thread.
#include <memory>
#include <string>
#include <utility>

#include "coordinator/engine_api.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::Status NoGroup() {
  return absl::UnavailableError("the worker group is being formed; try again");
}

}  // namespace

template <typename Result>
void EngineApi::WithChain(const Context& context, Done<Result> done,
                          std::function<void(Scheduler&, const ContextChain&)> call) {
  const absl::StatusOr<ResolvedPolicy> policy = context_.policies.Resolve(context->policy);
  if (!policy.ok()) return done(policy.status());  // the server has other policies now
  ContextChain chain = {.context = context->number,
                        .tenant = context->tenant,
                        .prefill = policy->prefill,
                        .tokens = {context, &context->tokens}};
  context_.engine.Call([chain = std::move(chain), done = std::move(done),
                        call = std::move(call)](Scheduler* scheduler) {
    if (scheduler == nullptr) return done(NoGroup());
    scheduler->contexts().AtNextPlan([scheduler, chain, done, call](const absl::Status& status) {
      if (!status.ok()) return done(status);
      call(*scheduler, chain);
    });
  });
}

void EngineApi::Pin(const Context& context, v1::Tier tier, int64_t most_blocks,
                    Done<PinnedBlocks> done) {
  WithChain<PinnedBlocks>(context, done,
                          [tier, most_blocks, done](Scheduler& s, const ContextChain& chain) {
                            done(tier == v1::TIER_DISK ? s.contexts().PinDisk(chain, most_blocks)
                                                       : s.contexts().PinHost(chain, most_blocks));
                          });
}

void EngineApi::Unpin(int64_t context, v1::Tier tier) {
  context_.engine.Call([context, tier](Scheduler* scheduler) {
    if (scheduler == nullptr) return;  // its pins went with the group
    if (tier == v1::TIER_DISK) {
      scheduler->contexts().UnpinDisk(context);
    } else {
      scheduler->contexts().UnpinHost(context);
    }
  });
}

void EngineApi::CountInMemory(const Context& context, Done<int64_t> done) {
  WithChain<int64_t>(context, done, [done](Scheduler& s, const ContextChain& chain) {
    done(s.contexts().CountInMemory(chain));
  });
}

void EngineApi::Demote(const Context& context, Done<int64_t> done) {
  WithChain<int64_t>(context, done, [done](Scheduler& s, const ContextChain& chain) {
    if (!s.persists()) {
      return done(absl::FailedPreconditionError(
          "there is no disk tier to write to (--kv-disk-path); Evict gives up KV for good"));
    }
    done(s.contexts().Demote(chain));
  });
}

void EngineApi::EraseContext(const Context& context, Done<v1::Erased> done) {
  WithChain<v1::Erased>(context, done, [done](Scheduler& s, const ContextChain& chain) {
    s.contexts().Erase({.chain = std::make_shared<const ContextChain>(chain)}, done);
  });
}

void EngineApi::EraseTenant(const std::string& tenant, Done<v1::Erased> done) {
  EraseAfterEnd(&tenant, std::move(done));
}

void EngineApi::EraseAll(Done<v1::Erased> done) { EraseAfterEnd(nullptr, std::move(done)); }

void EngineApi::EraseAfterEnd(const std::string* tenant, Done<v1::Erased> done) {
  const std::shared_ptr<const std::string> whose =
      tenant == nullptr ? nullptr : std::make_shared<const std::string>(*tenant);
  context_.engine.Call([this, whose, done = std::move(done)](Scheduler* scheduler) {
    if (scheduler == nullptr) return done(NoGroup());
    for (const SequenceId id : scheduler->SequencesOf(whose.get())) {
      context_.engine.Cancel(id, absl::CancelledError("the KV of this request's tenant is erased"));
    }
    // The loop ends what was cancelled before it makes this call.
    context_.engine.Call([whose, done](Scheduler* next) {
      if (next == nullptr) return done(NoGroup());
      next->contexts().Erase({.tenant = whose}, done);
    });
  });
}

void EngineApi::BeginExchange(const Context& context, Done<int64_t> done) {
  WithChain<int64_t>(context, done, [done](Scheduler& s, const ContextChain& chain) {
    done(s.exchange().Begin(chain));
  });
}

void EngineApi::EndExchange(int64_t context) {
  context_.engine.Call([context](Scheduler* scheduler) {
    if (scheduler != nullptr) scheduler->exchange().End(context);
  });
}

void EngineApi::ExportBlock(int64_t context, int64_t index,
                            Done<std::vector<v1::HeadExtent>> done) {
  context_.engine.Call([context, index, done = std::move(done)](Scheduler* scheduler) {
    if (scheduler == nullptr) return done(NoGroup());
    scheduler->exchange().Export(context, index, done);
  });
}

void EngineApi::ImportBlock(int64_t context, std::vector<v1::HeadExtent> heads,
                            std::function<void(const absl::Status&)> done) {
  context_.engine.Call(
      [context, heads = std::move(heads), done = std::move(done)](Scheduler* scheduler) mutable {
        if (scheduler == nullptr) return done(NoGroup());
        scheduler->exchange().Import(context, std::move(heads), std::move(done));
      });
}

}  // namespace kvasir::coordinator
