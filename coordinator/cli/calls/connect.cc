#include "coordinator/cli/calls/connect.h"

#include <chrono>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/support/client_interceptor.h"

#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"
#include "proto/security/tls.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {

namespace {

namespace experimental = grpc::experimental;

// Adds the key to every call of a channel.
class KeyInterceptor final : public experimental::Interceptor {
 public:
  explicit KeyInterceptor(const std::string& authorization) : authorization_(authorization) {}
  void Intercept(experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace("authorization", authorization_);
    }
    methods->Proceed();
  }

 private:
  const std::string& authorization_;
};

class KeyInterceptorFactory final : public experimental::ClientInterceptorFactoryInterface {
 public:
  explicit KeyInterceptorFactory(absl::string_view key)
      : authorization_(absl::StrCat("Bearer ", key)) {}
  experimental::Interceptor* CreateClientInterceptor(experimental::ClientRpcInfo*) override {
    return new KeyInterceptor(authorization_);
  }

 private:
  const std::string authorization_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(const std::string& server,
                                                       const std::string& api_key_file,
                                                       const v1::TlsClientConfig& tls) {
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<proto::ChannelTls> speech,
                          proto::ChannelTls::Load(tls));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  // A server that starts again is found soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  std::vector<std::unique_ptr<experimental::ClientInterceptorFactoryInterface>> interceptors;
  if (!api_key_file.empty()) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text,
                            proto::ReadTextFile("--api-key-file", api_key_file));
    const absl::string_view key = absl::StripAsciiWhitespace(text);
    if (key.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--api-key-file ", api_key_file, " holds no key"));
    }
    interceptors.push_back(std::make_unique<KeyInterceptorFactory>(key));
  }
  return experimental::CreateCustomChannelWithInterceptors(server, speech->CredentialsFor(server),
                                                           arguments, std::move(interceptors));
}

void SetTimeout(absl::Duration timeout, grpc::ClientContext& context) {
  const auto nanoseconds = absl::ToChronoNanoseconds(timeout);
  context.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::duration_cast<std::chrono::system_clock::duration>(nanoseconds));
}

}  // namespace kvasir::coordinator
