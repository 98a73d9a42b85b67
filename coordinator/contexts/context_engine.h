// The seam between the names of documents and the requests that read them: the engine as contexts
// use it. EngineApi implements it; tests have a double. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "coordinator/request/client_sink.h"
#include "coordinator/request/request_origin.h"
#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class ContextEngine {
 public:
  virtual ~ContextEngine() = default;

  // Returns the tokens of the request's prompt after `before` tokens of a context; errors are those
  // of Generate, for an answer of one token.
  virtual absl::StatusOr<std::vector<int32_t>> PromptOf(const v1::GenerateRequest& request,
                                                        int64_t before) = 0;
  // Starts a request as Generate does, of whose prompt every whole block can be shared: no tail is
  // read by the decode part.
  virtual void Read(const v1::GenerateRequest& request, const RequestOrigin& origin,
                    const std::shared_ptr<ClientSink>& sink) = 0;
};

}  // namespace kvasir::coordinator
