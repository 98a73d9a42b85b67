// Takes the answer of one request: the stream of a client, or a collector in tests. The seam
// between requests and the API that asked. Calls come from one thread at a time.
#pragma once

#include "absl/status/status.h"

#include "proto/kvasir/v1/generation.pb.h"

namespace kvasir::coordinator {

class ResponseSink {
 public:
  virtual ~ResponseSink() = default;
  // Never blocks. A sink cancels the request when its client does not keep up.
  virtual void Write(v1::GenerateResponse response) = 0;
  // The last call.
  virtual void Close(const absl::Status& status) = 0;
};

}  // namespace kvasir::coordinator
