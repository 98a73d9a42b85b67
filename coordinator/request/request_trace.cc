#include "coordinator/request/request_trace.h"

#include <array>
#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "kernels/base/status_macros.h"
#include "openssl/rand.h"
#include "proto/finish_numbers.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMostReasonBytes = 256;
// Flags of a span (trace.proto): that it is sampled, that it is known whether its parent is another
// process's, and that it is.
constexpr uint32_t kSampled = 0x1;
constexpr uint32_t kKnowsParent = 0x100;
constexpr uint32_t kParentIsRemote = 0x200;

template <size_t kBytes>
std::string RandomId() {
  std::array<unsigned char, kBytes> bytes;
  KVASIR_CHECK(RAND_bytes(bytes.data(), kBytes) == 1);
  return std::string(bytes.begin(), bytes.end());
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

// Ends that OpenTelemetry's conventions for gRPC servers call errors: the service's, not the
// client's.
bool IsFault(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDataLoss:
      return true;
    default:
      return false;
  }
}

void SetStatus(const absl::Status& status, otlp::Span& span) {
  if (status.ok()) return;
  SetAttribute("error.type", absl::StatusCodeToString(status.code()), span);
  if (!IsFault(status)) return;
  span.mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
  span.mutable_status()->set_message(std::string(status.message().substr(0, kMostReasonBytes)));
}

// The spans of one request, of which the first is the whole.
class Spans {
 public:
  Spans(const RequestOrigin& origin, const std::string& name, absl::Duration total)
      : begin_(absl::Now() - total) {
    otlp::Span span;
    span.set_trace_id(origin.trace.has_value() ? absl::HexStringToBytes(origin.trace->trace_id)
                                               : RandomId<16>());
    span.set_kind(otlp::Span::SPAN_KIND_SERVER);
    span.set_flags(kSampled | kKnowsParent);
    if (origin.trace.has_value()) {
      span.set_parent_span_id(absl::HexStringToBytes(origin.trace->parent_id));
      span.set_flags(span.flags() | kParentIsRemote);
    }
    span.set_span_id(RandomId<8>());
    spans_.push_back(std::move(span));
    SetTime(name, absl::ZeroDuration(), total, spans_[0]);
  }

  otlp::Span& whole() { return spans_[0]; }
  // Adds a part of the request's time, which is counted from its arrival.
  otlp::Span& AddPart(const char* name, absl::Duration from, absl::Duration to) {
    otlp::Span span;
    span.set_trace_id(whole().trace_id());
    span.set_parent_span_id(whole().span_id());
    span.set_span_id(RandomId<8>());
    span.set_kind(otlp::Span::SPAN_KIND_INTERNAL);
    span.set_flags(kSampled | kKnowsParent);
    SetTime(name, from, to, span);
    return spans_.emplace_back(std::move(span));
  }
  std::vector<otlp::Span> Take() { return std::move(spans_); }

 private:
  void SetTime(const std::string& name, absl::Duration from, absl::Duration to,
               otlp::Span& span) const {
    span.set_name(name);
    span.set_start_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(begin_ + from)));
    span.set_end_time_unix_nano(static_cast<uint64_t>(absl::ToUnixNanos(begin_ + to)));
  }

  const absl::Time begin_;
  std::vector<otlp::Span> spans_;
};

bool IsTraced(const RequestOrigin& origin) {
  return !origin.trace.has_value() || origin.trace->is_sampled;
}

void SetOrigin(const RequestOrigin& origin, const std::string& model, otlp::Span& span) {
  SetAttribute("gen_ai.provider.name", "kvasir", span);
  SetAttribute("gen_ai.request.model", model, span);
  SetAttribute("gen_ai.response.id", origin.request_id, span);
  SetAttribute("gen_ai.request.id", origin.request_id, span);  // vLLM's name
  if (!origin.tenant.empty()) SetAttribute("kvasir.tenant", origin.tenant, span);
}

void SetSampling(const AcceptedRequest& request, otlp::Span& span) {
  SetAttribute("gen_ai.request.max_tokens", request.max_tokens, span);
  SetAttribute("gen_ai.request.temperature", double{request.temperature}, span);
  SetAttribute("gen_ai.request.top_p", double{request.top_p}, span);
  if (request.top_k > 0) {
    SetAttribute("gen_ai.request.top_k", static_cast<double>(request.top_k), span);
  }
  SetAttribute("kvasir.policy", request.policy, span);
}

void SetUsage(int64_t prompt_tokens, const v1::Usage& usage, otlp::Span& span) {
  const v1::CachedTokens& cached = usage.cached_tokens();
  SetAttribute("gen_ai.usage.input_tokens", prompt_tokens, span);
  SetAttribute("gen_ai.usage.output_tokens", int64_t{usage.completion_tokens()}, span);
  SetAttribute("gen_ai.usage.cache_read.input_tokens",
               static_cast<int64_t>(proto::TokensOfAllTiers(cached)), span);
  SetAttribute("kvasir.cached_tokens.device", int64_t{cached.device()}, span);
  SetAttribute("kvasir.cached_tokens.host", int64_t{cached.host()}, span);
  SetAttribute("kvasir.cached_tokens.disk", int64_t{cached.disk()}, span);
  SetAttribute("kvasir.cached_tokens.peer", int64_t{cached.peer()}, span);
}

void SetAttention(const v1::AttentionReport& attention, otlp::Span& span) {
  const uint64_t total = attention.prefill_blocks_total() + attention.decode_blocks_total();
  if (total == 0) return;
  const uint64_t skipped = proto::SkippedPages(attention.prefill_blocks_skipped()) +
                           proto::SkippedPages(attention.decode_blocks_skipped());
  SetAttribute("kvasir.skipped_share", static_cast<double>(skipped) / static_cast<double>(total),
               span);
}

void SetFinishReason(v1::FinishReason reason, otlp::Span& span) {
  otlp::KeyValue& reasons = *span.add_attributes();
  reasons.set_key("gen_ai.response.finish_reasons");
  reasons.mutable_value()->mutable_array_value()->add_values()->set_string_value(
      proto::FinishReasonName(reason));
}

void SetSeconds(const char* key, absl::Duration time, otlp::Span& span) {
  SetAttribute(absl::StrCat("gen_ai.latency.", key), absl::ToDoubleSeconds(time), span);
}

// Adds the parts that the request has reached, and their times under vLLM's names.
void AddParts(const v1::Finish& summary, absl::Duration total, Spans& spans) {
  const v1::Timing& timing = summary.timing();
  const absl::Duration queue = timing.has_queue() ? FromProto(timing.queue()) : total;
  const absl::Duration restore = FromProto(timing.restore());
  SetSeconds("e2e", total, spans.whole());
  SetSeconds("time_in_queue", queue, spans.whole());
  spans.AddPart("queue", absl::ZeroDuration(), queue - restore);
  if (timing.has_restore()) {
    const v1::CachedTokens& cached = summary.usage().cached_tokens();
    SetAttribute("kvasir.restored_tokens", int64_t{cached.disk()} + int64_t{cached.peer()},
                 spans.AddPart("restore", queue - restore, queue));
  }
  if (!timing.has_time_to_first_token()) {
    if (queue < total) spans.AddPart("prefill", queue, total);
    return;
  }
  const absl::Duration first = FromProto(timing.time_to_first_token());
  const absl::Duration decode = FromProto(timing.decode());
  SetSeconds("time_to_first_token", first, spans.whole());
  SetSeconds("time_in_model_prefill", first - queue, spans.whole());
  SetSeconds("time_in_model_decode", decode, spans.whole());
  SetSeconds("time_in_model_inference", first - queue + decode, spans.whole());
  spans.AddPart("prefill", queue, first);
  spans.AddPart("decode", first, first + decode);
}

}  // namespace

void RequestTracer::OnEnd(const AcceptedRequest& request, const absl::Status& status,
                          const v1::Finish& summary, absl::Duration total) const {
  if (!IsTraced(request.origin)) return;
  const char* operation = request.is_conversation ? "chat" : "text_completion";
  Spans spans(request.origin, absl::StrCat(operation, " ", model_), total);
  SetAttribute("gen_ai.operation.name", operation, spans.whole());
  SetOrigin(request.origin, model_, spans.whole());
  SetAttribute("gen_ai.response.model", model_, spans.whole());
  SetSampling(request, spans.whole());
  SetUsage(request.prompt_tokens, summary.usage(), spans.whole());
  SetAttention(summary.attention(), spans.whole());
  if (status.ok()) SetFinishReason(summary.reason(), spans.whole());
  SetStatus(status, spans.whole());
  AddParts(summary, total, spans);
  exporter_.Add(spans.Take());
}

void RequestTracer::OnRefusal(const RequestOrigin& origin, const absl::Status& why,
                              absl::Duration total) const {
  if (!IsTraced(origin)) return;
  Spans spans(origin, absl::StrCat("refused ", model_), total);
  SetOrigin(origin, model_, spans.whole());
  SetStatus(why, spans.whole());
  exporter_.Add(spans.Take());
}

}  // namespace kvasir::coordinator
