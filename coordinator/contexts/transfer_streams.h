// The gRPC streams of Export and Import, as a thread that waits for them uses them: a part is
// written or read when the call returns. A client that does not move for `patience` is gone. Made
// by the service, which keeps one until its thread has called End. Thread-safe.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"

#include "kernels/base/mutex.h"
#include "proto/kvasir/v1/contexts.pb.h"

namespace kvasir::coordinator {

// Waits for the ends of operations, of which one is under way at a time.
class StreamTurn {
 public:
  StreamTurn(grpc::CallbackServerContext& context, absl::Duration patience)
      : context_(context), patience_(patience) {}

  void Begin() EXCLUDES(mu_);
  // Waits for the operation's end. Returns whether it went well.
  bool Await() EXCLUDES(mu_);
  void End(bool ok) EXCLUDES(mu_);

 private:
  grpc::CallbackServerContext& context_;
  const absl::Duration patience_;
  kernels::Mutex mu_;
  kernels::CondVar changed_;
  bool is_under_way_ GUARDED_BY(mu_) = false;
  bool ok_ GUARDED_BY(mu_) = false;
};

class ExportStream final : public grpc::ServerWriteReactor<v1::ContextPart> {
 public:
  static std::shared_ptr<ExportStream> Create(grpc::CallbackServerContext& context,
                                              absl::Duration patience);

  // False when the client is gone.
  bool Write(const v1::ContextPart& part);
  // Ends the stream. The last call.
  void End(const absl::Status& status);

  void OnWriteDone(bool ok) override { turn_.End(ok); }
  void OnDone() override { self_.reset(); }

 private:
  ExportStream(grpc::CallbackServerContext& context, absl::Duration patience)
      : turn_(context, patience) {}

  StreamTurn turn_;
  v1::ContextPart part_;  // being written
  std::shared_ptr<ExportStream> self_;
};

class ImportStream final : public grpc::ServerReadReactor<v1::ImportContextRequest> {
 public:
  static std::shared_ptr<ImportStream> Create(grpc::CallbackServerContext& context,
                                              absl::Duration patience);

  // Returns the next message; nothing at the end.
  std::optional<v1::ImportContextRequest> Read();
  void End(const absl::Status& status);

  void OnReadDone(bool ok) override { turn_.End(ok); }
  void OnDone() override { self_.reset(); }

 private:
  ImportStream(grpc::CallbackServerContext& context, absl::Duration patience)
      : turn_(context, patience) {}

  StreamTurn turn_;
  v1::ImportContextRequest message_;
  std::shared_ptr<ImportStream> self_;
};

}  // namespace kvasir::coordinator
