// kvasir.v1.Generation without a transport: requests are checked, tokenized, submitted, cancelled
// and refused here, whichever way they came. The gRPC service and the HTTP front call it; the
// server implements it over its parts (engine_api.h). Thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "coordinator/request/client_sink.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/security/caller.h"
#include "coordinator/time/clock.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::coordinator {

// Bytes that stand for work that waits for files, in RunText: it never runs at once.
inline constexpr size_t kFileWorkBytes = size_t{1} << 17;

class GenerationApi {
 public:
  virtual ~GenerationApi() = default;

  // Returns whose key the header `authorization` holds; null when the server has no keys. Called
  // before anything else of a call. UNAUTHENTICATED.
  virtual absl::StatusOr<std::shared_ptr<const Caller>> Authenticate(
      absl::string_view authorization) = 0;

  // Does `work`, which takes time in proportion to a request of `bytes`: at once when that is
  // short, otherwise on a thread that serves no streams. RESOURCE_EXHAUSTED, with a time to try
  // again, when too much waits; then `work` is dropped.
  virtual absl::Status RunText(size_t bytes, std::function<void()> work) = 0;

  // Starts the request, whose answer goes to `sink`; one that is refused closes the sink. Called
  // within RunText.
  virtual void Generate(const v1::GenerateRequest& request, const RequestOrigin& origin,
                        const std::shared_ptr<ClientSink>& sink) = 0;
  // Closes the sink of a request that is refused before Generate.
  virtual void Refuse(const RequestOrigin& origin, ClientSink& sink, const absl::Status& why) = 0;
  // Returns an id for a request whose client chose none.
  virtual std::string NewRequestId() = 0;
  virtual TimePoint Now() const = 0;

  // Called within RunText.
  virtual absl::StatusOr<v1::TokenizeResponse> Tokenize(const v1::TokenizeRequest& request) = 0;
  virtual absl::StatusOr<v1::DetokenizeResponse> Detokenize(
      const v1::DetokenizeRequest& request) = 0;

  // UNAVAILABLE while no group is formed.
  virtual absl::StatusOr<v1::GetModelInfoResponse> ModelInfo() = 0;
  virtual v1::GetServerInfoResponse ServerInfo(const v1::GetServerInfoRequest& request) = 0;
  // Returns the pages that a running request selected in the last step that was observed, and
  // observes its next step: who watches a request asks again and again. NOT_FOUND when no request
  // of this id runs.
  struct Selections {
    bool is_observed = false;  // false: not yet; the rest is unset
    absl::Duration age = {};
    v1::SelectionMap map = {};  // without counts where the ranks cannot tell
  };
  virtual absl::StatusOr<Selections> Observe(const std::string& request_id) = 0;
  // Tells the texts of tokens in answers.
  virtual const Tokenizer& tokenizer() const = 0;
};

// Returns the most tokens that an answer to such a prompt may have; 1 for a prompt that leaves no
// room, which is refused with the others that are too long.
inline uint32_t LongestAnswer(const v1::GetModelInfoResponse& model, int64_t prompt_tokens) {
  return static_cast<uint32_t>(
      std::max<int64_t>(int64_t{model.max_context_length()} - prompt_tokens, 1));
}

}  // namespace kvasir::coordinator
