// The engine as contexts use it: the seam between the names of documents and the requests and
// blocks that they stand for. EngineApi implements it; tests have a double. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "coordinator/group/worker_group.h"
#include "coordinator/request/client_sink.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/scheduling/context_blocks.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// A context as requests use it. Never changes.
struct NamedContext {
  int64_t number = 0;  // of no other context of this process
  std::string tenant;
  std::string name;
  std::vector<int32_t> tokens;
  v1::PolicyChoice policy;
  int64_t created_at_unix_s = 0;

  int64_t num_blocks() const { return std::ssize(tokens) / kBlockTokens; }
};

class ContextEngine {
 public:
  using Context = std::shared_ptr<const NamedContext>;
  // Called once, perhaps before the call returns, perhaps on the engine's thread, which it must not
  // hold up. UNAVAILABLE while there is no worker group.
  template <typename Result>
  using Done = std::function<void(const absl::StatusOr<Result>&)>;

  virtual ~ContextEngine() = default;

  // Returns the tokens of the request's prompt after `before` tokens of a context; errors are those
  // of Generate, for an answer of one token.
  virtual absl::StatusOr<std::vector<int32_t>> PromptOf(const v1::GenerateRequest& request,
                                                        int64_t before) = 0;
  // Starts a request as Generate does, of whose prompt every whole block can be shared: no tail is
  // read by the decode part.
  virtual void Read(const v1::GenerateRequest& request, const RequestOrigin& origin,
                    const std::shared_ptr<ClientSink>& sink) = 0;

  // UNAVAILABLE while no group is formed.
  virtual absl::StatusOr<GroupInfo> Group() = 0;
  // As ContextBlocks. `tier` is the host or the disk.
  virtual void Pin(const Context& context, v1::Tier tier, int64_t most_blocks,
                   Done<PinnedBlocks> done) = 0;
  virtual void Unpin(int64_t context, v1::Tier tier) = 0;
  virtual void CountInMemory(const Context& context, Done<int64_t> done) = 0;
  // FAILED_PRECONDITION without a disk tier.
  virtual void Demote(const Context& context, Done<int64_t> done) = 0;
  // Erases the blocks of a context, or of a tenant, whose requests end first, or of all.
  virtual void EraseContext(const Context& context, Done<v1::Erased> done) = 0;
  virtual void EraseTenant(const std::string& tenant, Done<v1::Erased> done) = 0;
  virtual void EraseAll(Done<v1::Erased> done) = 0;

  // As ContextExchange.
  virtual void BeginExchange(const Context& context, Done<int64_t> done) = 0;
  virtual void EndExchange(int64_t context) = 0;
  virtual void ExportBlock(int64_t context, int64_t index,
                           Done<std::vector<v1::HeadExtent>> done) = 0;
  virtual void ImportBlock(int64_t context, std::vector<v1::HeadExtent> heads,
                           std::function<void(const absl::Status&)> done) = 0;
};

}  // namespace kvasir::coordinator
