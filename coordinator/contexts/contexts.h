// The contexts of all tenants: their names and tokens, how far they are read, and where their KV
// should be. It hides where records are kept, and a thread that reads one context after the other
// through requests of its own, so that clients' requests have at most one such prompt beside them,
// and that ends pins. Made by the server; called by the transports, and by requests that name a
// context. Thread-safe.
//
// A pin outlives the worker group, whose blocks it holds, and the process: the next group reads the
// context, from disk if it is there, and pins it again.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "coordinator/contexts/context_engine.h"
#include "coordinator/contexts/record_folder.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/security/caller.h"
#include "coordinator/time/clock.h"
#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/context_record.pb.h"
#include "proto/kvasir/v1/contexts.pb.h"

namespace kvasir::coordinator {

struct ContextsOptions {
  std::string folder;        // of the records; empty: they end with the process
  int64_t max_contexts = 0;  // of all tenants
  int64_t max_tokens = 0;    // of all contexts together
  // That a tenant may keep, unless its key says otherwise. 0: as many as all.
  uint64_t max_tenant_contexts = 0;
  uint64_t max_tenant_tokens = 0;
  // That a tenant may pin, unless its key says otherwise. 0: as much as there is room.
  int64_t pin_host_bytes = 0;
  int64_t pin_disk_bytes = 0;
};

// Who asks: the key's owner, if there are keys, and the tenant that the request names.
struct ContextCaller {
  std::shared_ptr<const Caller> caller;
  std::string tenant;  // as prefix keys have it
};

// Returns who asks for `part` of the caller's tenant, as GenerateRequest.tenant_id names it.
ContextCaller ContextCallerOf(std::shared_ptr<const Caller> caller, const std::string& part);

class Contexts {
 public:
  // Loads the records. UNAVAILABLE when the folder cannot be used. The references outlive it.
  static absl::StatusOr<std::unique_ptr<Contexts>> Open(const ContextsOptions& options,
                                                        Clock& clock, Metrics& metrics);
  ~Contexts();  // calls Stop

  // Begins to read. `engine` outlives Stop.
  void Start(ContextEngine& engine);
  // A worker group serves: pins are made again, and reads that waited for one tried at once. Any
  // thread.
  void OnReady() EXCLUDES(mu_);
  // Reads no more, and ends what is read: the next start reads it.
  void Stop() EXCLUDES(mu_);

  // Called within RunText, as a text may be long.
  absl::StatusOr<v1::Context> Create(const v1::CreateContextRequest& request,
                                     const ContextCaller& by) EXCLUDES(mu_);
  absl::StatusOr<v1::Context> Fork(const v1::ForkContextRequest& request, const ContextCaller& by)
      EXCLUDES(mu_);

  absl::StatusOr<v1::Context> Get(const v1::GetContextRequest& request, const ContextCaller& by)
      EXCLUDES(mu_);
  absl::StatusOr<v1::ListContextsResponse> List(const v1::ListContextsRequest& request,
                                                const ContextCaller& by) EXCLUDES(mu_);
  absl::Status Delete(const v1::DeleteContextRequest& request, const ContextCaller& by)
      EXCLUDES(files_mu_, mu_);

  // Hints. `done` is called once, perhaps on the engine's thread.
  template <typename Response>
  using Done = std::function<void(const absl::StatusOr<Response>&)>;
  void Pin(const v1::PinContextRequest& request, const ContextCaller& by,
           Done<v1::ContextHint> done) EXCLUDES(mu_);
  void Unpin(const v1::UnpinContextRequest& request, const ContextCaller& by,
             Done<v1::ContextHint> done) EXCLUDES(mu_);
  void Prefetch(const v1::PrefetchContextRequest& request, const ContextCaller& by,
                Done<v1::ContextHint> done) EXCLUDES(mu_);
  void Demote(const v1::DemoteContextRequest& request, const ContextCaller& by,
              Done<v1::ContextHint> done) EXCLUDES(mu_);
  void Evict(const v1::EvictRequest& request, const ContextCaller& by, Done<v1::EvictResponse> done)
      EXCLUDES(files_mu_, mu_);

  // The right to export or import. One caller has it at a time, until its handle is destroyed;
  // RESOURCE_EXHAUSTED, with a time to try again, for others.
  struct Transfer {};
  absl::StatusOr<std::shared_ptr<const Transfer>> BeginTransfer() EXCLUDES(mu_);
  // Writes a context's parts until `write` returns false: then nobody wants them any more. Returns
  // when that has ended, so call it on a thread that may wait, as Import. ABORTED when the context
  // is forgotten meanwhile.
  absl::Status Export(const Transfer& transfer, const v1::ExportContextRequest& request,
                      const ContextCaller& by,
                      absl::FunctionRef<bool(const v1::ContextPart& part)> write) EXCLUDES(mu_);
  // Reads parts until there are no more (nothing), and makes the context of them.
  using PartReader = absl::FunctionRef<absl::StatusOr<std::optional<v1::ContextPart>>()>;
  absl::StatusOr<v1::Context> Import(const Transfer& transfer, const std::string& name,
                                     const ContextCaller& by, PartReader read)
      EXCLUDES(files_mu_, mu_);

  // Returns the context for a request that names it, and refreshes its pins. NOT_FOUND when the
  // tenant has none of this name.
  absl::StatusOr<std::shared_ptr<const NamedContext>> Use(const std::string& tenant,
                                                          const std::string& name) EXCLUDES(mu_);
  absl::StatusOr<std::shared_ptr<const NamedContext>> Find(const std::string& tenant,
                                                           const std::string& name) const
      EXCLUDES(mu_);

 private:
  class ReadSink;
  using Key = std::pair<std::string, std::string>;  // tenant, name
  struct PinState {
    TimePoint expires = {};
    TimePoint recorded = {};  // `expires` as the record has it
    absl::Duration ttl = {};
    bool refresh = false;
    PinnedBlocks blocks = {};
  };
  struct Entry {
    std::shared_ptr<const NamedContext> context;
    std::shared_ptr<const Caller> caller = {};  // who made it; null after a restart
    v1::ContextState state = v1::CONTEXT_STATE_WAITING;
    std::string reason = {};
    int64_t processed_tokens = 0;
    std::optional<google::protobuf::Duration> eta = {};  // until it is read
    std::map<v1::Tier, PinState> pins = {};
    std::map<v1::Tier, int64_t> ordered_blocks = {};  // of pins that the engine has not answered
    bool is_unsaved = false;                          // its record is older than it
  };
  // A pin that is asked for.
  struct PinOrder {
    std::shared_ptr<const NamedContext> context;
    v1::Tier asked = v1::TIER_HOST;
    v1::Tier tier = v1::TIER_HOST;
    PinState pin = {};
    int64_t most_blocks = 0;
  };
  // A read that ended.
  struct Ended {
    std::shared_ptr<const NamedContext> context;
    absl::Status status;
    bool began = false;  // it was admitted
  };

  Contexts(const ContextsOptions& options, std::optional<RecordFolder> folder, Clock& clock,
           Metrics& metrics)
      : options_(options), folder_(std::move(folder)), clock_(clock), metrics_(metrics) {}

  void Load() EXCLUDES(mu_);
  // Names the tokens and lets them be read, now or later.
  enum class Reading { kNow, kLater };
  absl::StatusOr<std::shared_ptr<const NamedContext>> Add(NamedContext context,
                                                          std::shared_ptr<const Caller> caller,
                                                          Reading reading) EXCLUDES(files_mu_, mu_);
  v1::Context DescribeNow(const NamedContext& context) EXCLUDES(mu_);
  absl::Status ExportBlocks(const std::shared_ptr<const NamedContext>& context,
                            absl::FunctionRef<bool(const v1::ContextPart& part)> write);
  absl::StatusOr<NamedContext> ParseHead(const v1::ContextHead& head, const std::string& name,
                                         const ContextCaller& by);
  absl::Status ImportBlocks(const std::shared_ptr<const NamedContext>& context, PartReader read);
  // ABORTED when the context was deleted or evicted.
  absl::Status CheckUnderWay(const NamedContext& context) EXCLUDES(mu_);
  absl::Status CheckNew(const NamedContext& context, const Caller* caller) const REQUIRES(mu_);
  // RESOURCE_EXHAUSTED when the tenant, or all tenants of the caller's key, would have more than
  // they may keep.
  absl::Status CheckShare(const NamedContext& context, const Caller* caller) const REQUIRES(mu_);
  // Calls `visit` for the entries of the tenant, or of all tenants of the caller's key.
  void ForEachOf(const std::string& tenant, const Caller* caller,
                 absl::FunctionRef<void(const Entry& entry)> visit) const REQUIRES(mu_);
  absl::Status Save(const v1::ContextRecord& record) REQUIRES(files_mu_);
  v1::ContextRecord RecordOf(const Entry& entry) const REQUIRES(mu_);
  absl::StatusOr<const Entry*> FindEntry(const std::string& tenant, const std::string& name) const
      REQUIRES(mu_);
  v1::Context DescribeEntry(const Entry& entry) const REQUIRES(mu_);
  // Null when the context was forgotten.
  Entry* EntryOf(const NamedContext& context) REQUIRES(mu_);
  void CountStates() REQUIRES(mu_);
  // Lets the context be read, again if it was. Does nothing when it is about to be.
  void ReadSoon(Entry& entry) REQUIRES(mu_);
  // Forgets the context, whose reading ends with `why`, unless that was done; adds the size of its
  // record. UNAVAILABLE when the record cannot be erased: then nothing is forgotten.
  absl::Status Forget(const NamedContext& context, const absl::Status& why, int64_t& record_bytes)
      REQUIRES(files_mu_) EXCLUDES(mu_);
  // Ends what the engine does for the context and holds of it.
  void LetGo(const NamedContext& context);
  // Forgets the tenant's contexts, or all; adds to what was evicted.
  absl::Status ForgetAll(const std::string* tenant, v1::EvictResponse& evicted)
      EXCLUDES(files_mu_, mu_);

  absl::StatusOr<PinOrder> OrderOf(const v1::PinContextRequest& request, const ContextCaller& by)
      EXCLUDES(mu_);
  // Number of blocks that the tenant, or all tenants of the caller's key, may still pin in the
  // tier, beside those of `context`.
  int64_t Quota(const NamedContext& context, v1::Tier tier, const Caller* caller,
                int64_t block_bytes) const REQUIRES(mu_);
  void OnAnswered(const PinOrder& order) EXCLUDES(mu_);
  v1::ContextHint OnPinned(const PinOrder& order, const PinnedBlocks& blocks) EXCLUDES(mu_);
  // Returns what is evicted: a prefix as a context without a name, or a context that is not read
  // any more.
  absl::StatusOr<std::shared_ptr<const NamedContext>> EvictedContext(
      const v1::EvictRequest& request, const ContextCaller& by) EXCLUDES(mu_);
  // Makes the pins of a context that was read.
  void PinAgain(const std::shared_ptr<const NamedContext>& context) EXCLUDES(mu_);

  // Tasks of the reading thread.
  struct Work {
    std::optional<Ended> ended = {};
    std::optional<Entry> read = {};
    std::vector<std::pair<int64_t, v1::Tier>> expired = {};
    std::vector<v1::ContextRecord> unsaved = {};
    bool stops = false;
  };
  Work AwaitWork() EXCLUDES(mu_);
  // Takes what is due. Returns the time of the next pin's end.
  TimePoint TakeDue(Work& work) REQUIRES(mu_);
  void RunReader() EXCLUDES(files_mu_, mu_);
  void Read(const Entry& entry) EXCLUDES(mu_);
  void TakeEnd(const Ended& ended) EXCLUDES(files_mu_, mu_);

  // The engine's thread.
  void OnProgress(const NamedContext& context, const v1::Progress& progress) EXCLUDES(mu_);
  void OnEnd(Ended ended) EXCLUDES(mu_);

  const ContextsOptions options_;
  const std::optional<RecordFolder> folder_;
  Clock& clock_;
  Metrics& metrics_;
  ContextEngine* engine_ = nullptr;  // constant after Start

  // Held by who adds or removes a context, over the writing of its record, for which the engine's
  // thread must not wait. Taken before mu_.
  kernels::Mutex files_mu_;
  mutable kernels::Mutex mu_;
  kernels::CondVar changed_;
  std::map<Key, Entry> entries_ GUARDED_BY(mu_);
  int64_t tokens_ GUARDED_BY(mu_) = 0;  // of all entries
  std::deque<std::shared_ptr<const NamedContext>> to_read_ GUARDED_BY(mu_);
  std::vector<std::pair<int64_t, v1::Tier>> to_unpin_ GUARDED_BY(mu_);
  std::weak_ptr<const Transfer> transfer_ GUARDED_BY(mu_);
  std::shared_ptr<ReadSink> reading_ GUARDED_BY(mu_);  // null: nothing is read
  std::optional<Ended> ended_ GUARDED_BY(mu_);         // of reading_
  int64_t next_number_ GUARDED_BY(mu_) = 1;
  TimePoint next_try_ GUARDED_BY(mu_) = {};    // nothing is read before
  absl::Duration pause_ GUARDED_BY(mu_) = {};  // before the last try
  bool stopping_ GUARDED_BY(mu_) = false;

  int64_t reads_ = 0;   // by the reading thread
  std::thread reader_;  // last: it uses everything above
};

}  // namespace kvasir::coordinator
