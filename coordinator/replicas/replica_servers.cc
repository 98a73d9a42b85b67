#include "coordinator/replicas/replica_servers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/client_callback.h"

#include "coordinator/policy/limits.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/security/tls.h"

namespace kvasir::coordinator {
namespace {

// A server that answers no ping for so long is gone. Servers take a ping every 10 s.
constexpr int kPingIntervalMs = 15'000;
constexpr int kPingTimeoutMs = 5'000;

class GenerateCall final : public ReplicaServers::Call,
                           public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  GenerateCall(ElsewhereRequest request, ReplicaServers::Callbacks callbacks)
      : request_(std::move(request.request)), callbacks_(std::move(callbacks)) {
    if (!request.authorization.empty()) {
      context_.AddMetadata("authorization", request.authorization);
    }
  }

  void Begin(v1::Generation::Stub& stub, std::shared_ptr<GenerateCall> self) {
    self_ = std::move(self);
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  void Cancel() override { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    callbacks_.on_response(std::exchange(response_, {}));
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    // Callbacks may hold this call: they must not do so for ever.
    const ReplicaServers::Callbacks callbacks = std::exchange(callbacks_, {});
    callbacks.on_end(proto::FromGrpcStatus(status));
    self_.reset();
  }

 private:
  const v1::GenerateRequest request_;
  ReplicaServers::Callbacks callbacks_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  std::shared_ptr<GenerateCall> self_;  // until OnDone
};

// Keeps the channel until the process ends. With the last channel that has callbacks gRPC 1.51 ends
// the queue of their threads, also while one of them is about to return from a call's last
// callback, and aborts.
std::shared_ptr<grpc::Channel> Kept(std::shared_ptr<grpc::Channel> channel) {
  static kernels::Mutex mu;
  static auto* const kept = new std::vector<std::shared_ptr<grpc::Channel>>;
  const kernels::MutexLock lock(mu);
  kept->push_back(channel);
  return channel;
}

}  // namespace

v1::GenerateRequest OneTokenOf(v1::GenerateRequest request) {
  const auto told = static_cast<uint32_t>(request.resume().token_ids_size());
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_max_tokens(told + 1);
  sampling.set_min_tokens(std::min(sampling.min_tokens(), told + 1));
  // The client's id is that of the request itself, perhaps at the same server.
  request.set_request_id(absl::StrCat("prepare-", request.request_id()).substr(0, kMaxIdBytes));
  return request;
}

absl::StatusOr<std::unique_ptr<ReplicaServers>> ReplicaServers::Create(
    absl::string_view flag, absl::string_view addresses, const v1::TlsClientConfig& tls) {
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<proto::ChannelTls> speech,
                          proto::ChannelTls::Load(tls));
  auto replicas = std::make_unique<ReplicaServers>();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingIntervalMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  for (const absl::string_view part : absl::StrSplit(addresses, ',', absl::SkipWhitespace())) {
    const std::string address(absl::StripAsciiWhitespace(part));
    if (address.rfind(':') == std::string::npos || address.rfind(':') == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": '", address, "' is no address of a server; write HOST:PORT"));
    }
    replicas->servers_.push_back({.address = address,
                                  .stub = v1::Generation::NewStub(Kept(grpc::CreateCustomChannel(
                                      address, speech->CredentialsFor(address), arguments)))});
  }
  return replicas;
}

std::shared_ptr<ReplicaServers::Call> ReplicaServers::Generate(size_t server,
                                                               ElsewhereRequest request,
                                                               Callbacks callbacks) const {
  auto call = std::make_shared<GenerateCall>(std::move(request), std::move(callbacks));
  call->Begin(*servers_[server].stub, call);
  return call;
}

}  // namespace kvasir::coordinator
