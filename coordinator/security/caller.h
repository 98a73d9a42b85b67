// Who sends requests under one API key: the tenant, the limits, and what is in use of them. Made by
// ApiKeys; a request holds a Use from its acceptance to its end. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"

namespace kvasir::coordinator {

struct CallerLimits {
  uint32_t concurrent_requests = 0;  // 0: no limit
  // Tokens of prompts and answers. A request begins while some are left and may take more; the
  // next ones then wait until the minutes have paid for it. 0: no limit.
  uint64_t tokens_per_minute = 0;
  // KV that its running requests may reach together, over all tiers and ranks. 0: no limit.
  int64_t kv_bytes = 0;
  // KV of contexts that its tenant may pin. 0: as the server says.
  int64_t pinned_host_bytes = 0;
  int64_t pinned_disk_bytes = 0;
  // Contexts that its tenant may keep, and tokens of all of them. 0: as the server says.
  uint64_t contexts = 0;
  uint64_t context_tokens = 0;
};

// Needs of one request.
struct CallerNeeds {
  int64_t prompt_tokens = 0;
  int64_t max_tokens = 0;  // of the answer
  int64_t kv_bytes = 0;    // that both reach at most; shared prefixes count for each request
};

class Caller {
 public:
  // Counts a request, and its tokens, while it runs.
  class Use {
   public:
    Use(std::shared_ptr<const Caller> caller, int64_t kv_bytes)
        : caller_(std::move(caller)), kv_bytes_(kv_bytes) {}
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    void AddTokens(int64_t count);

   private:
    const std::shared_ptr<const Caller> caller_;
    const int64_t kv_bytes_;
  };

  // With the use of `before`, the same key as an earlier file had it; null for a new one.
  Caller(std::string name, std::string tenant, CallerLimits limits, const Caller* before);

  const std::string& name() const { return name_; }
  const CallerLimits& limits() const { return limits_; }
  // Returns the tenant of a request that names `part`: the caller's, or a part of it that no other
  // caller reaches.
  std::string Tenant(const std::string& part) const;
  // RESOURCE_EXHAUSTED, with a time to try again, when a limit is reached; without one when the
  // request needs more than the caller may ever have.
  static absl::StatusOr<std::unique_ptr<Use>> Begin(const std::shared_ptr<const Caller>& caller,
                                                    const CallerNeeds& needs, TimePoint now);

 private:
  struct InUse {
    kernels::Mutex mu;
    uint32_t requests GUARDED_BY(mu) = 0;
    int64_t kv_bytes GUARDED_BY(mu) = 0;  // that these may reach
    double tokens_left GUARDED_BY(mu) = 0;
    TimePoint filled GUARDED_BY(mu) = {};  // when tokens_left was counted
  };

  absl::Status Take(const CallerNeeds& needs, TimePoint now) const;
  absl::Status CheckKv(const CallerNeeds& needs) const REQUIRES(in_use_->mu);

  const std::string name_;
  const std::string tenant_;
  const CallerLimits limits_;
  const std::shared_ptr<InUse> in_use_;
};

}  // namespace kvasir::coordinator
