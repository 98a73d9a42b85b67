// Turns a request of vllm.grpc.engine.VllmEngine into one of kvasir.v1.Generation. What this server
// lacks is refused by name. Called by the service. Function without state.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "coordinator/request/generation_api.h"
#include "proto/kvasir/v1/generation.pb.h"
#include "proto/vllm/grpc/vllm_engine.pb.h"

namespace kvasir::coordinator {

// Tokens of a prompt whose log probabilities may be asked for, and of an answer whose log
// probabilities come in one message. With 20 most probable tokens each, such a message has 5 MB.
inline constexpr int64_t kMostScoredTokens = 16384;

// Returns the request with the prompt as token ids; a text is tokenized, so it is called within
// RunText. UNIMPLEMENTED for what is refused, INVALID_ARGUMENT for numbers that the result cannot
// hold; the API checks all others.
absl::StatusOr<v1::GenerateRequest> FromVllm(const ::vllm::grpc::engine::GenerateRequest& request,
                                             GenerationApi& api);

}  // namespace kvasir::coordinator
