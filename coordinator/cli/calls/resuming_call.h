// A call of Generate that outlives its server: when the connection is lost after the stream began,
// the server at the same address is asked to go on with the answer (GenerateRequest.resume), as
// long as it takes it. Responses come as from one stream. It hides the retries and what they send.
// Used by commands. Thread-compatible.
#pragma once

#include <cstdio>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

struct ResumingCallOptions {
  absl::Duration timeout = absl::InfiniteDuration();  // of the whole answer
  // Time after a loss in which a server has to go on. 0: a loss ends the call.
  absl::Duration resume_timeout;
  FILE* tell = nullptr;  // where losses are told; null: nowhere
};

class ResumingCall {
 public:
  // `stub` outlives the call.
  ResumingCall(v1::Generation::StubInterface& stub, v1::GenerateRequest request,
               const ResumingCallOptions& options)
      : stub_(stub), request_(std::move(request)), options_(options) {}

  // Streams the answer. Returns the status of the last stream. INTERNAL when the server ended one
  // with OK and without a Finish. FAILED_PRECONDITION when it does not go on after the tokens that
  // came, as a server of a release without `resume`, which begins anew. Called once.
  absl::Status Run(const std::function<void(const v1::GenerateResponse&)>& take);

 private:
  // A loss in which so many streams in a row began and brought no token may be the request's doing.
  static constexpr int kMostVainStreams = 3;

  absl::Status Stream(absl::Time deadline,
                      const std::function<void(const v1::GenerateResponse&)>& take);
  absl::Status CheckIndex(const v1::GenerateResponse& response) const;
  void Remember(const v1::GenerateResponse& response);
  bool MayResume(const absl::Status& status);

  v1::Generation::StubInterface& stub_;
  v1::GenerateRequest request_;
  const ResumingCallOptions options_;
  bool began_ = false;     // some stream brought a response
  bool answered_ = false;  // the last one did
  bool finished_ = false;
  int vain_streams_ = 0;
  absl::Time lost_at_;  // the last stream with a response broke
};

}  // namespace kvasir::coordinator
