// GenerationApi over the engine loop: the one place where requests of all transports are accepted
// and refused. Long texts are tokenized on separate threads (text_pool.h). Made by the server.
// Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/contexts/context_engine.h"
#include "coordinator/contexts/contexts.h"
#include "coordinator/engine_loop.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_folder.h"
#include "coordinator/policy/policy.h"
#include "coordinator/replicas/mover.h"
#include "coordinator/replicas/prefill_servers.h"
#include "coordinator/request/generation_api.h"
#include "coordinator/request/parse_request.h"
#include "coordinator/request/request.h"
#include "coordinator/request/request_trace.h"
#include "coordinator/request/running_requests.h"
#include "coordinator/security/api_keys.h"
#include "coordinator/text_pool.h"
#include "coordinator/time/clock.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::coordinator {

// Parts of the server that the API uses; they outlive it.
struct EngineApiContext {
  const v1::ServeConfig& config;  // every name resolved
  const ModelFolder& folder;
  const Tokenizer& tokenizer;
  const PolicyTable& policies;
  EngineLoop& engine;
  Clock& clock;
  Metrics& metrics;
  TextPool& texts;
  Contexts& contexts;
  const ApiKeys* keys = nullptr;          // null: whoever reaches the server may ask
  const RequestTracer* tracer = nullptr;  // null: requests are not traced
  Mover* mover = nullptr;                 // null: running requests do not move
  PrefillServers* prefill = nullptr;      // null: all prompts are read here
  TimePoint started;
};

class EngineApi final : public GenerationApi, public ContextEngine {
 public:
  explicit EngineApi(const EngineApiContext& context) : context_(context) {}

  absl::StatusOr<std::shared_ptr<const Caller>> Authenticate(
      absl::string_view authorization) override;
  absl::Status RunText(size_t bytes, std::function<void()> work) override {
    return context_.texts.Run(bytes, std::move(work));
  }
  void Generate(const v1::GenerateRequest& request, const RequestOrigin& origin,
                const std::shared_ptr<ClientSink>& sink) override;
  void Refuse(const RequestOrigin& origin, ClientSink& sink, const absl::Status& why) override;
  std::string NewRequestId() override;
  TimePoint Now() const override { return context_.clock.Now(); }
  absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request) override;
  absl::StatusOr<v1::DetokenizeResponse> Detokenize(const v1::DetokenizeRequest& request) override;
  absl::StatusOr<v1::GetModelInfoResponse> ModelInfo() override;
  v1::GetServerInfoResponse ServerInfo(const v1::GetServerInfoRequest& request) override;
  absl::StatusOr<Selections> Observe(const std::string& request_id) override;
  const Tokenizer& tokenizer() const override { return context_.tokenizer; }

  absl::StatusOr<std::vector<int32_t>> PromptOf(const v1::GenerateRequest& request,
                                                int64_t before) override;
  void Read(const v1::GenerateRequest& request, const RequestOrigin& origin,
            const std::shared_ptr<ClientSink>& sink) override;
  absl::StatusOr<GroupInfo> Group() override { return context_.engine.ServedGroup(); }
  void Pin(const Context& context, v1::Tier tier, int64_t most_blocks,
           Done<PinnedBlocks> done) override;
  void Unpin(int64_t context, v1::Tier tier) override;
  void CountInMemory(const Context& context, Done<int64_t> done) override;
  void Demote(const Context& context, Done<int64_t> done) override;
  void EraseContext(const Context& context, Done<v1::Erased> done) override;
  void EraseTenant(const std::string& tenant, Done<v1::Erased> done) override;
  void EraseAll(Done<v1::Erased> done) override;
  void BeginExchange(const Context& context, Done<int64_t> done) override;
  void EndExchange(int64_t context) override;
  void ExportBlock(int64_t context, int64_t index, Done<std::vector<v1::HeadExtent>> done) override;
  void ImportBlock(int64_t context, std::vector<v1::HeadExtent> heads,
                   std::function<void(const absl::Status&)> done) override;

 private:
  // Calls `call` with the scheduler and the context's chain, or `done` with an error.
  template <typename Result>
  void WithChain(const Context& context, Done<Result> done,
                 std::function<void(Scheduler&, const ContextChain&)> call);
  // Ends the requests of the tenant, or all, then erases.
  void EraseAfterEnd(const std::string* tenant, Done<v1::Erased> done);

  absl::StatusOr<ParsedRequest> Parse(const v1::GenerateRequest& request,
                                      const RequestOrigin& origin, const GroupInfo& group) const;
  ServedModel ModelOf(const GroupInfo& group) const;
  enum class PromptIs { kReadHere, kReadElsewhere };
  absl::StatusOr<std::unique_ptr<Request>> Accept(ParsedRequest parsed, const GroupInfo& group,
                                                  const RequestOrigin& origin,
                                                  const std::shared_ptr<ResponseSink>& sink,
                                                  PromptIs prompt_is = PromptIs::kReadHere);
  // Has a prefill server read the prompt of a request that was submitted.
  void ReadElsewhere(SequenceId id, ElsewhereRequest request,
                     const std::shared_ptr<AnswerReadElsewhere>& answer);
  // Hands a request to the engine, which from now on hears when its client leaves.
  void Submit(std::unique_ptr<Request> request, ClientSink& sink,
              const std::weak_ptr<MovableAnswer>& movable);

  const EngineApiContext context_;
  RunningRequests running_;
};

}  // namespace kvasir::coordinator
