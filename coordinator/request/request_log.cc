#include "coordinator/request/request_log.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "proto/finish_numbers.h"
#include "proto/process/logs.h"

namespace kvasir::coordinator {
namespace {

using proto::LogField;

// A line stays below 4,096 bytes, so that a pipe takes it in one piece.
constexpr size_t kMaxReasonBytes = 256;

// Ends that a client chose, or that a client must mend, are no concern of the operator.
spdlog::level::level_enum LevelOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kUnimplemented:
      return spdlog::level::info;
    default:
      return spdlog::level::warn;
  }
}

void AddOrigin(const RequestOrigin& origin, std::vector<LogField>& fields) {
  fields.emplace_back("request_id", origin.request_id);
  fields.emplace_back("tenant", origin.tenant);
  if (origin.caller != nullptr) fields.emplace_back("api_key", origin.caller->name());
  if (!origin.trace.has_value()) return;
  fields.emplace_back("trace_id", origin.trace->trace_id);
  fields.emplace_back("parent_id", origin.trace->parent_id);
}

void AddStatus(const absl::Status& status, std::vector<LogField>& fields) {
  fields.emplace_back("status", absl::StatusCodeToString(status.code()));
}

void AddReason(absl::string_view reason, std::vector<LogField>& fields) {
  fields.emplace_back("reason", std::string(reason.substr(0, kMaxReasonBytes)));
}

// Errors quote what they found in a request, which is not logged: the reason ends before it.
std::string WithoutQuotes(absl::string_view message) {
  const size_t quote = message.find_first_of("\"'");
  if (quote == absl::string_view::npos) return std::string(message);
  return absl::StrCat(message.substr(0, quote), "...");
}

void AddAttention(const v1::AttentionReport& attention, std::vector<LogField>& fields) {
  const uint64_t total = attention.prefill_blocks_total() + attention.decode_blocks_total();
  if (total == 0) return;
  const uint64_t skipped = proto::SkippedPages(attention.prefill_blocks_skipped()) +
                           proto::SkippedPages(attention.decode_blocks_skipped());
  fields.emplace_back("skipped_share", static_cast<double>(skipped) / static_cast<double>(total));
}

void AddTimes(const v1::Finish& summary, absl::Duration total, std::vector<LogField>& fields) {
  const v1::Timing& timing = summary.timing();
  const uint32_t tokens = summary.usage().completion_tokens();
  if (timing.has_queue()) fields.emplace_back("queue_s", proto::ToSeconds(timing.queue()));
  if (timing.has_time_to_first_token()) {
    fields.emplace_back("ttft_s", proto::ToSeconds(timing.time_to_first_token()));
  }
  if (tokens > 1) {
    fields.emplace_back("mean_itl_s", proto::ToSeconds(timing.decode()) / (tokens - 1));
  }
  fields.emplace_back("total_s", absl::ToDoubleSeconds(total));
}

}  // namespace

void LogRequestEnd(const AcceptedRequest& request, const absl::Status& status,
                   const v1::Finish& summary, absl::Duration total) {
  std::vector<LogField> fields;
  AddOrigin(request.origin, fields);
  AddStatus(status, fields);
  if (status.ok()) {
    fields.emplace_back("finish_reason", proto::FinishReasonName(summary.reason()));
  } else {
    AddReason(status.message(), fields);
  }
  fields.emplace_back("policy", request.policy);
  fields.emplace_back("prompt_tokens", request.prompt_tokens);
  fields.emplace_back("answer_tokens", int64_t{summary.usage().completion_tokens()});
  const v1::CachedTokens& cached = summary.usage().cached_tokens();
  fields.emplace_back("cached_device", int64_t{cached.device()});
  fields.emplace_back("cached_host", int64_t{cached.host()});
  fields.emplace_back("cached_disk", int64_t{cached.disk()});
  fields.emplace_back("cached_peer", int64_t{cached.peer()});
  AddTimes(summary, total, fields);
  AddAttention(summary.attention(), fields);
  proto::LogEvent(LevelOf(status), "request ended", fields);
}

void LogRefusal(const RequestOrigin& origin, const absl::Status& why) {
  std::vector<LogField> fields;
  AddOrigin(origin, fields);
  AddStatus(why, fields);
  AddReason(WithoutQuotes(why.message()), fields);
  proto::LogEvent(LevelOf(why), "request refused", fields);
}

}  // namespace kvasir::coordinator
