#include "coordinator/cli/context_command.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/check_text.h"
#include "coordinator/cli/progress_bar.h"
#include "coordinator/contexts/part_frames.h"
#include "coordinator/files/draft_file.h"
#include "coordinator/request/status_json.h"
#include "kernels/base/status_macros.h"
#include "proto/finish_numbers.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/contexts.grpc.pb.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

constexpr std::chrono::milliseconds kPollInterval(100);

// One run of the command.
struct ContextRun {
  const v1::ContextCommandConfig& config;
  v1::Contexts::Stub& stub;
  v1::Generation::Stub& generation;
  absl::Time deadline;
};

// Calls the server until the run's deadline.
template <typename Request, typename Response>
absl::StatusOr<Response> Call(const ContextRun& run,
                              grpc::Status (v1::Contexts::Stub::*call)(grpc::ClientContext*,
                                                                       const Request&, Response*),
                              const Request& request) {
  grpc::ClientContext context;
  SetTimeout(run.deadline - absl::Now(), context);
  Response response;
  KVASIR_RETURN_IF_ERROR(proto::FromGrpcStatus((run.stub.*call)(&context, request, &response)));
  return response;
}

absl::Status PrintJson(const google::protobuf::Message& message) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, MessageJson(message));
  std::cout << text << '\n';
  return absl::OkStatus();
}

absl::Status Print(const ContextRun& run, const v1::Context& context) {
  if (run.config.json()) return PrintJson(context);
  std::cout << ContextTable({context});
  return absl::OkStatus();
}

// Reads --text or --file; none of them: nothing.
absl::StatusOr<std::optional<std::string>> ReadDocument(const v1::ContextCommandConfig& config) {
  const std::string& path = config.file();
  if (!path.empty() && !config.text().empty()) {
    return absl::InvalidArgumentError("--text and --file are both given; give one of them");
  }
  if (path.empty() && config.text().empty()) return std::optional<std::string>();
  std::string text = config.text();
  if (path == "-") {
    KVASIR_ASSIGN_OR_RETURN(text, proto::ReadStandardInput());
  } else if (!path.empty()) {
    KVASIR_ASSIGN_OR_RETURN(text, proto::ReadTextFile("--file", path));
  }
  KVASIR_RETURN_IF_ERROR(CheckUtf8("the document", text));
  return std::optional<std::string>(std::move(text));
}

// Waits until the context is read, if that is wanted, and prints it.
absl::Status Await(const ContextRun& run, v1::Context context) {
  v1::GetContextRequest get;
  get.set_name(context.name());
  get.set_tenant_id(run.config.tenant());
  ProgressBar bar(stderr, "reading context");
  while (run.config.wait() && (context.state() == v1::CONTEXT_STATE_WAITING ||
                               context.state() == v1::CONTEXT_STATE_READING)) {
    std::optional<absl::Duration> eta;
    if (context.has_eta()) eta = absl::Seconds(proto::ToSeconds(context.eta()));
    bar.Show(context.processed_tokens(), context.tokens(), eta);
    std::this_thread::sleep_for(kPollInterval);
    KVASIR_ASSIGN_OR_RETURN(context, Call(run, &v1::Contexts::Stub::Get, get));
  }
  bar.Clear();
  KVASIR_RETURN_IF_ERROR(Print(run, context));
  if (context.state() != v1::CONTEXT_STATE_FAILED) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the context was not read: ", context.state_reason()));
}

absl::Status Create(const ContextRun& run) {
  KVASIR_ASSIGN_OR_RETURN(std::optional<std::string> document, ReadDocument(run.config));
  if (!document.has_value()) {
    return absl::InvalidArgumentError("give the document by one of --text and --file");
  }
  v1::CreateContextRequest request;
  request.set_name(run.config.name());
  request.set_tenant_id(run.config.tenant());
  request.set_text(*std::move(document));
  request.set_add_special_tokens(run.config.add_special_tokens());
  request.set_parse_special_tokens(run.config.parse_special_tokens());
  request.mutable_policy()->set_name(run.config.policy());
  KVASIR_ASSIGN_OR_RETURN(const v1::Context made, Call(run, &v1::Contexts::Stub::Create, request));
  return Await(run, made);
}

absl::Status Fork(const ContextRun& run) {
  KVASIR_ASSIGN_OR_RETURN(std::optional<std::string> document, ReadDocument(run.config));
  v1::ForkContextRequest request;
  request.set_name(run.config.name());
  request.set_into(run.config.into());
  request.set_tenant_id(run.config.tenant());
  if (document.has_value()) {
    request.set_text(*std::move(document));
    request.set_parse_special_tokens(run.config.parse_special_tokens());
  }
  KVASIR_ASSIGN_OR_RETURN(const v1::Context made, Call(run, &v1::Contexts::Stub::Fork, request));
  return Await(run, made);
}

absl::Status Get(const ContextRun& run) {
  v1::GetContextRequest request;
  request.set_name(run.config.name());
  request.set_tenant_id(run.config.tenant());
  KVASIR_ASSIGN_OR_RETURN(const v1::Context context, Call(run, &v1::Contexts::Stub::Get, request));
  return Print(run, context);
}

absl::Status List(const ContextRun& run) {
  v1::ListContextsRequest request;
  request.set_tenant_id(run.config.tenant());
  KVASIR_ASSIGN_OR_RETURN(const v1::ListContextsResponse list,
                          Call(run, &v1::Contexts::Stub::List, request));
  if (run.config.json()) return PrintJson(list);
  std::cout << ContextTable({list.contexts().begin(), list.contexts().end()});
  return absl::OkStatus();
}

absl::Status Delete(const ContextRun& run) {
  v1::DeleteContextRequest request;
  request.set_name(run.config.name());
  request.set_tenant_id(run.config.tenant());
  return Call(run, &v1::Contexts::Stub::Delete, request).status();
}

v1::Tier TierOf(const v1::ContextCommandConfig& config) {
  if (config.tier() == "device") return v1::TIER_DEVICE;
  return config.tier() == "disk" ? v1::TIER_DISK : v1::TIER_HOST;
}

const char* OutcomeName(v1::HintOutcome outcome) {
  switch (outcome) {
    case v1::HINT_OUTCOME_ACCEPTED:
      return "accepted";
    case v1::HINT_OUTCOME_CLIPPED:
      return "clipped";
    case v1::HINT_OUTCOME_DEFERRED:
      return "deferred";
    case v1::HINT_OUTCOME_REJECTED:
      return "rejected";
    default:
      return "?";
  }
}

// Sends a hint about the named context and prints how it was taken.
template <typename Request>
absl::Status SendHint(const ContextRun& run, Request request,
                      grpc::Status (v1::Contexts::Stub::*call)(grpc::ClientContext*, const Request&,
                                                               v1::ContextHint*)) {
  request.set_name(run.config.name());
  request.set_tenant_id(run.config.tenant());
  KVASIR_ASSIGN_OR_RETURN(const v1::ContextHint hint, Call(run, call, request));
  if (run.config.json()) return PrintJson(hint);
  std::cout << absl::StrFormat("%s: %s of %s blocks granted, %s there%s%s\n",
                               OutcomeName(hint.outcome()), WithCommas(hint.granted_blocks()),
                               WithCommas(hint.blocks()), WithCommas(hint.present_blocks()),
                               hint.reason().empty() ? "" : "; ", hint.reason());
  return absl::OkStatus();
}

absl::Status Pin(const ContextRun& run) {
  v1::PinContextRequest request;
  request.set_tier(TierOf(run.config));
  request.set_ttl_s(run.config.ttl());
  request.set_refresh_on_hit(run.config.refresh_on_hit());
  return SendHint(run, request, &v1::Contexts::Stub::Pin);
}

absl::Status Unpin(const ContextRun& run) {
  v1::UnpinContextRequest request;
  request.set_tier(TierOf(run.config));
  return SendHint(run, request, &v1::Contexts::Stub::Unpin);
}

absl::Status Prefetch(const ContextRun& run) {
  return SendHint(run, v1::PrefetchContextRequest(), &v1::Contexts::Stub::Prefetch);
}

absl::Status Demote(const ContextRun& run) {
  return SendHint(run, v1::DemoteContextRequest(), &v1::Contexts::Stub::Demote);
}

// Names what is evicted: one of a context, a text, a tenant and everything.
absl::StatusOr<v1::EvictRequest> MakeEvict(const ContextRun& run) {
  const v1::ContextCommandConfig& config = run.config;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadDocument(config));
  const int named = (config.name().empty() ? 0 : 1) + (text.has_value() ? 1 : 0) +
                    (config.whole_tenant() ? 1 : 0) + (config.everything() ? 1 : 0);
  if (named != 1) {
    return absl::InvalidArgumentError(
        "give one of --name, --text, --file, --whole-tenant and --everything");
  }
  v1::EvictRequest request;
  request.set_tenant_id(config.tenant());
  if (!config.name().empty()) request.set_context(config.name());
  if (config.whole_tenant()) request.set_tenant(true);
  if (config.everything()) request.set_all(true);
  if (!text.has_value()) return request;
  v1::TokenizeRequest tokenize;
  tokenize.set_text(*text);
  tokenize.set_add_special_tokens(config.add_special_tokens());
  tokenize.set_parse_special_tokens(config.parse_special_tokens());
  grpc::ClientContext context;
  SetTimeout(run.deadline - absl::Now(), context);
  v1::TokenizeResponse tokens;
  KVASIR_RETURN_IF_ERROR(
      proto::FromGrpcStatus(run.generation.Tokenize(&context, tokenize, &tokens)));
  *request.mutable_prefix()->mutable_ids() = tokens.token_ids();
  request.mutable_policy()->set_name(config.policy());
  return request;
}

absl::Status Evict(const ContextRun& run) {
  KVASIR_ASSIGN_OR_RETURN(const v1::EvictRequest request, MakeEvict(run));
  KVASIR_ASSIGN_OR_RETURN(const v1::EvictResponse evicted,
                          Call(run, &v1::Contexts::Stub::Evict, request));
  if (run.config.json()) return PrintJson(evicted);
  std::cout << absl::StrFormat(
      "%s: overwritten %s blocks in memory (%s bytes) and %s on disk (%s bytes); %s contexts "
      "forgotten (%s bytes of records); %s blocks in use stay\n",
      OutcomeName(evicted.outcome()), WithCommas(evicted.host_blocks()),
      WithCommas(evicted.host_bytes()), WithCommas(evicted.disk_blocks()),
      WithCommas(evicted.disk_bytes()), WithCommas(evicted.contexts()),
      WithCommas(evicted.record_bytes()), WithCommas(evicted.blocks_in_use()));
  return absl::OkStatus();
}

absl::Status Export(const ContextRun& run) {
  v1::ExportContextRequest request;
  request.set_name(run.config.name());
  request.set_tenant_id(run.config.tenant());
  KVASIR_ASSIGN_OR_RETURN(DraftFile file,
                          DraftFile::Create(run.config.file(), DraftFile::Readers::kOwner));
  grpc::ClientContext context;
  SetTimeout(run.deadline - absl::Now(), context);
  const auto stream = run.stub.Export(&context, request);
  v1::ContextPart part;
  absl::Status written;
  while (written.ok() && stream->Read(&part)) written = file.Write(FrameOf(part));
  if (!written.ok()) context.TryCancel();
  const absl::Status ended = proto::FromGrpcStatus(stream->Finish());
  KVASIR_RETURN_IF_ERROR(written);
  KVASIR_RETURN_IF_ERROR(ended);
  return file.MoveToPlace();
}

absl::Status Import(const ContextRun& run) {
  std::ifstream file(run.config.file(), std::ios::binary);
  if (!file.is_open()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--file '", run.config.file(), "' cannot be read"));
  }
  const auto read = [&file](size_t bytes, std::string& text) {
    text.resize(bytes);
    file.read(text.data(), static_cast<std::streamsize>(bytes));
    const auto got = static_cast<size_t>(file.gcount());
    text.resize(got);
    return got;
  };
  grpc::ClientContext context;
  SetTimeout(run.deadline - absl::Now(), context);
  v1::Context made;
  const auto stream = run.stub.Import(&context, &made);
  v1::ImportContextRequest message;
  message.set_name(run.config.name());
  message.set_tenant_id(run.config.tenant());
  absl::Status status;
  for (;;) {
    absl::StatusOr<std::optional<v1::ContextPart>> part = ReadFrame(read);
    status = part.status();
    if (!status.ok() || !part->has_value()) break;
    *message.mutable_part() = **std::move(part);
    if (!stream->Write(message)) break;
  }
  if (!status.ok()) context.TryCancel();
  stream->WritesDone();
  const absl::Status ended = proto::FromGrpcStatus(stream->Finish());
  KVASIR_RETURN_IF_ERROR(status);
  KVASIR_RETURN_IF_ERROR(ended);
  return Await(run, made);
}

struct Action {
  absl::string_view name;
  absl::Status (*run)(const ContextRun&);
};

constexpr Action kActions[] = {
    {"create", Create}, {"fork", Fork},   {"get", Get},       {"list", List},
    {"delete", Delete}, {"pin", Pin},     {"unpin", Unpin},   {"prefetch", Prefetch},
    {"demote", Demote}, {"evict", Evict}, {"export", Export}, {"import", Import},
};

absl::string_view StateName(v1::ContextState state) {
  switch (state) {
    case v1::CONTEXT_STATE_WAITING:
      return "waiting";
    case v1::CONTEXT_STATE_READING:
      return "reading";
    case v1::CONTEXT_STATE_READY:
      return "ready";
    case v1::CONTEXT_STATE_FAILED:
      return "failed";
    case v1::CONTEXT_STATE_EVICTED:
      return "evicted";
    default:
      return "?";
  }
}

}  // namespace

std::vector<std::string> ContextActions() {
  std::vector<std::string> names;
  for (const Action& action : kActions) names.emplace_back(action.name);
  return names;
}

std::string ContextTable(const std::vector<v1::Context>& contexts) {
  size_t width = 4;
  for (const v1::Context& context : contexts) width = std::max(width, context.name().size());
  const int name_width = static_cast<int>(width);
  std::string text = absl::StrFormat("%-*s  %-8s %12s %12s  %s\n", name_width, "name", "state",
                                     "tokens", "read", "created (UTC)");
  for (const v1::Context& context : contexts) {
    const absl::Time created = absl::FromUnixSeconds(context.created_at().seconds());
    absl::StrAppendFormat(&text, "%-*s  %-8s %12s %12s  %s\n", name_width, context.name(),
                          StateName(context.state()), WithCommas(context.tokens()),
                          WithCommas(context.processed_tokens()),
                          absl::FormatTime("%Y-%m-%d %H:%M:%S", created, absl::UTCTimeZone()));
  }
  return text;
}

absl::Status RunContext(absl::string_view action, const v1::ContextCommandConfig& config) {
  const auto* found = std::find_if(std::begin(kActions), std::end(kActions),
                                   [&](const Action& known) { return known.name == action; });
  if (found == std::end(kActions)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there is no action '", action, "'; give one of ", absl::StrJoin(ContextActions(), ", ")));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file(), config.tls()));
  const auto stub = v1::Contexts::NewStub(channel);
  const auto generation = v1::Generation::NewStub(channel);
  return found->run({.config = config,
                     .stub = *stub,
                     .generation = *generation,
                     .deadline = absl::Now() + absl::Seconds(config.timeout())});
}

}  // namespace kvasir::coordinator
