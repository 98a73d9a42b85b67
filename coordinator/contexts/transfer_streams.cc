#include "coordinator/contexts/transfer_streams.h"

#include <chrono>
#include <utility>

#include "grpcpp/server_context.h"

#include "proto/grpc_status.h"

namespace kvasir::coordinator {

using kernels::MutexLock;

void StreamTurn::Begin() {
  MutexLock lock(mu_);
  is_under_way_ = true;
}

bool StreamTurn::Await() {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(patience_);
  MutexLock lock(mu_);
  while (is_under_way_ && std::chrono::steady_clock::now() < deadline) {
    changed_.WaitUntil(mu_, deadline);
  }
  if (is_under_way_) context_.TryCancel();
  while (is_under_way_) changed_.Wait(mu_);
  return ok_;
}

void StreamTurn::End(bool ok) {
  MutexLock lock(mu_);
  is_under_way_ = false;
  ok_ = ok;
  changed_.NotifyAll();
}

std::shared_ptr<ExportStream> ExportStream::Create(grpc::CallbackServerContext& context,
                                                   absl::Duration patience) {
  std::shared_ptr<ExportStream> stream(new ExportStream(context, patience));
  stream->self_ = stream;
  return stream;
}

bool ExportStream::Write(const v1::ContextPart& part) {
  part_ = part;
  turn_.Begin();
  StartWrite(&part_);
  return turn_.Await();
}

void ExportStream::End(const absl::Status& status) { Finish(proto::ToGrpcStatus(status)); }

std::shared_ptr<ImportStream> ImportStream::Create(grpc::CallbackServerContext& context,
                                                   absl::Duration patience) {
  std::shared_ptr<ImportStream> stream(new ImportStream(context, patience));
  stream->self_ = stream;
  return stream;
}

std::optional<v1::ImportContextRequest> ImportStream::Read() {
  turn_.Begin();
  StartRead(&message_);
  if (!turn_.Await()) return std::nullopt;
  return std::move(message_);
}

void ImportStream::End(const absl::Status& status) { Finish(proto::ToGrpcStatus(status)); }

}  // namespace kvasir::coordinator
