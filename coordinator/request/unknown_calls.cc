#include "coordinator/request/unknown_calls.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#include "coordinator/request/grpc_call.h"
#include "coordinator/request/request_log.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "proto/grpc_status.h"

namespace kvasir::coordinator {
namespace {

class Refusal final : public grpc::ServerGenericBidiReactor {
 public:
  explicit Refusal(const absl::Status& why) { Finish(proto::ToGrpcStatus(why)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerGenericBidiReactor* UnknownCalls::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  const absl::StatusOr<std::shared_ptr<const Caller>> caller = CallerOf(*context, api_);
  const absl::Status why =
      caller.ok()
          ? absl::UnimplementedError(absl::StrCat("there is no ", ForMessage(context->method()),
                                                  "; docs/api.md lists what there is"))
          : caller.status();
  LogRefusal(OriginOfCall(*context, {}, caller.value_or(nullptr), api_), why);
  return new Refusal(why);
}

}  // namespace kvasir::coordinator
