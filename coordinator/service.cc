#include "coordinator/service.h"

#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

uint64_t Random64() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* GenerationService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const std::shared_ptr<GenerateStream> stream = GenerateStream::Create(context);
  absl::StatusOr<std::unique_ptr<Request>> accepted = Accept(*request, stream);
  if (!accepted.ok()) {
    context_.metrics.RequestRejected(accepted.status());
    stream->Close(accepted.status());
    return stream.get();
  }
  const SequenceId id = (*accepted)->sequence();
  stream->set_on_cancel(
      [&engine = context_.engine, id](const absl::Status& why) { engine.Cancel(id, why); });
  // gRPC reports a cancellation only once it has the stream, that is behind Submit.
  context_.engine.Submit(*std::move(accepted));
  return stream.get();
}

absl::StatusOr<std::unique_ptr<Request>> GenerationService::Accept(
    const v1::GenerateRequest& request, const std::shared_ptr<GenerateStream>& stream) {
  const TimePoint arrival = context_.clock.Now();
  KVASIR_ASSIGN_OR_RETURN(const GroupInfo group, context_.engine.ServedGroup());
  KVASIR_ASSIGN_OR_RETURN(ParsedRequest parsed,
                          ParseRequest(request,
                                       {.tokenizer = context_.tokenizer,
                                        .policies = context_.policies,
                                        .eos_token_ids = context_.eos_token_ids,
                                        .vocab_size = group.vocab_size,
                                        .max_model_len = group.max_model_len},
                                       Random64()));
  if (parsed.request_id.empty()) {
    parsed.request_id = absl::StrCat("req-", absl::Hex(Random64(), absl::kZeroPad16));
  }
  KVASIR_ASSIGN_OR_RETURN(auto id, ids_.Acquire(parsed.request_id));
  return Request::Create(std::move(parsed), {.tokenizer = context_.tokenizer,
                                             .metrics = context_.metrics,
                                             .id = std::move(id),
                                             .sink = stream,
                                             .sequence = context_.engine.NewSequenceId(),
                                             .arrival = arrival});
}

}  // namespace kvasir::coordinator
