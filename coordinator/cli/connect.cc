#include "coordinator/cli/connect.h"

#include <chrono>

#include "grpcpp/create_channel.h"

#include "coordinator/policy/limits.h"

namespace kvasir::coordinator {

std::shared_ptr<grpc::Channel> Connect(const std::string& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  return grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
}

void SetTimeout(absl::Duration timeout, grpc::ClientContext& context) {
  const auto nanoseconds = absl::ToChronoNanoseconds(timeout);
  context.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::duration_cast<std::chrono::system_clock::duration>(nanoseconds));
}

}  // namespace kvasir::coordinator
