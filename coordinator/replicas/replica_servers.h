// The servers of other replicas, asked for answers over kvasir.v1.Generation. It hides channels and
// gRPC's reactions. Made by the server, called by moved answers. Thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "proto/kvasir/v1/config.pb.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {

// A request as another server is asked: with the tokens of its prompt, and the seed that this
// server chose.
struct ElsewhereRequest {
  v1::GenerateRequest request;
  std::string authorization;  // the client's own header; empty: none
};

// Returns the request for one token more than `request` says were told: its server then has the KV
// of all of them.
v1::GenerateRequest OneTokenOf(v1::GenerateRequest request);

class ReplicaServers {
 public:
  // `addresses`: HOST:PORT of each, separated by commas, as the flag has them. INVALID_ARGUMENT for
  // what is no address, or files that are of no use for TLS.
  static absl::StatusOr<std::unique_ptr<ReplicaServers>> Create(absl::string_view flag,
                                                                absl::string_view addresses,
                                                                const v1::TlsClientConfig& tls);

  size_t size() const { return servers_.size(); }
  const std::string& address(size_t server) const { return servers_[server].address; }

  // A call of Generate under way. Its callbacks come one at a time, on any thread, and the last one
  // once the call has ended.
  class Call {
   public:
    virtual ~Call() = default;
    // Ends the call soon, with CANCELLED.
    virtual void Cancel() = 0;
  };
  struct Callbacks {
    std::function<void(v1::GenerateResponse)> on_response;
    std::function<void(const absl::Status&)> on_end;
  };
  std::shared_ptr<Call> Generate(size_t server, ElsewhereRequest request,
                                 Callbacks callbacks) const;

 private:
  struct Server {
    std::string address;
    std::unique_ptr<v1::Generation::Stub> stub;
  };

  std::vector<Server> servers_;
};

}  // namespace kvasir::coordinator
