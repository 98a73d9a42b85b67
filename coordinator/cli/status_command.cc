#include "coordinator/cli/status_command.h"

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "google/protobuf/util/json_util.h"

#include "coordinator/cli/connect.h"
#include "coordinator/cli/progress_bar.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {
namespace {

std::string StateLine(const v1::GetServerInfoResponse& server) {
  switch (server.state()) {
    case v1::SERVER_STATE_SERVING:
      return "serving";
    case v1::SERVER_STATE_DRAINING:
      return "draining: running requests end, new ones are refused";
    default:
      return absl::StrCat("starting: ", server.state_reason());
  }
}

std::string Share(uint64_t part, uint64_t whole) {
  if (whole == 0) return "-";
  return absl::StrFormat("%.1f%%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string Gigabytes(uint64_t bytes) {
  return absl::StrFormat("%.3f GB", 1e-9 * static_cast<double>(bytes));
}

void AppendModel(const v1::GetModelInfoResponse& model, std::string& text) {
  absl::StrAppendFormat(&text, "context      %s tokens, vocabulary %s, KV %s, weights %s\n",
                        WithCommas(model.max_context_length()), WithCommas(model.vocab_size()),
                        model.kv_form(), model.weights_hash().substr(0, 16));
}

void AppendRequests(const v1::GetServerInfoResponse& server, std::string& text) {
  absl::StrAppendFormat(
      &text,
      "requests     %s running (at most %s), %s waiting with %s prompt tokens; "
      "%s finished, %s refused since the start\n",
      WithCommas(server.requests_running()), WithCommas(server.max_num_seqs()),
      WithCommas(server.requests_waiting()), WithCommas(server.waiting_prompt_tokens()),
      WithCommas(server.requests_finished()), WithCommas(server.requests_rejected()));
  absl::StrAppendFormat(&text, "tokens       %s read, %s generated\n",
                        WithCommas(server.prompt_tokens()), WithCommas(server.generation_tokens()));
  const uint64_t queries = server.prefix_cache_queries();
  absl::StrAppendFormat(&text, "prefix cache %s of %s prompt tokens found (%s)\n",
                        WithCommas(server.prefix_cache_hits()), WithCommas(queries),
                        Share(server.prefix_cache_hits(), queries));
}

const char* TierName(v1::Tier tier) {
  switch (tier) {
    case v1::TIER_DEVICE:
      return "device";
    case v1::TIER_HOST:
      return "host";
    case v1::TIER_DISK:
      return "disk";
    default:
      return "?";
  }
}

uint64_t CachedTokens(const v1::GetServerInfoResponse& server, v1::Tier tier) {
  if (tier == v1::TIER_DEVICE) return server.cached_device_tokens();
  if (tier == v1::TIER_HOST) return server.cached_host_tokens();
  return server.cached_disk_tokens();
}

void AppendTiers(const v1::GetServerInfoResponse& server, std::string& text) {
  absl::StrAppendFormat(&text, "\ntier    %14s %14s %8s %24s\n", "used", "total", "full",
                        "share of read tokens");
  for (const v1::TierInfo& tier : server.tiers()) {
    absl::StrAppendFormat(&text, "%-7s %14s %14s %8s %24s\n", TierName(tier.tier()),
                          Gigabytes(tier.used_bytes()), Gigabytes(tier.total_bytes()),
                          Share(tier.used_bytes(), tier.total_bytes()),
                          Share(CachedTokens(server, tier.tier()), server.prompt_tokens()));
  }
}

void AppendWorkers(const v1::GetServerInfoResponse& server, std::string& text) {
  size_t width = 7;
  for (const v1::WorkerInfo& worker : server.workers()) {
    width = std::max(width, worker.address().size());
  }
  const int address_width = static_cast<int>(width);
  absl::StrAppendFormat(&text, "\nrank  %-*s  %-21s  %s\n", address_width, "address", "metrics",
                        "device");
  for (const v1::WorkerInfo& worker : server.workers()) {
    absl::StrAppendFormat(&text, "%4d  %-*s  %-21s  %s\n", worker.rank(), address_width,
                          worker.address(), worker.metrics_address(), worker.device());
  }
}

}  // namespace

std::string StatusTable(const v1::GetServerInfoResponse& server,
                        const v1::GetModelInfoResponse* model) {
  std::string text =
      absl::StrFormat("server       kvasir %s, %s\n", server.version(), StateLine(server));
  absl::StrAppendFormat(&text, "model        %s, up %s\n", server.served_model_name(),
                        absl::FormatDuration(absl::Seconds(server.uptime().seconds())));
  if (model != nullptr) AppendModel(*model, text);
  AppendRequests(server, text);
  if (server.workers().empty()) return text;
  AppendTiers(server, text);
  AppendWorkers(server, text);
  return text;
}

absl::StatusOr<std::string> StatusJson(const v1::GetServerInfoResponse& server,
                                       const v1::GetModelInfoResponse* model) {
  std::string server_text;
  std::string model_text = "null";
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  auto status = google::protobuf::util::MessageToJsonString(server, &server_text, options);
  if (status.ok() && model != nullptr) {
    model_text.clear();
    status = google::protobuf::util::MessageToJsonString(*model, &model_text, options);
  }
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return absl::StrCat("{\"server\":", server_text, ",\"model\":", model_text, "}\n");
}

absl::Status RunStatus(const v1::StatusCommandConfig& config) {
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file()));
  const auto stub = v1::Generation::NewStub(channel);
  const absl::Duration timeout = absl::Seconds(config.timeout());
  v1::GetServerInfoResponse server;
  grpc::ClientContext server_context;
  SetTimeout(timeout, server_context);
  KVASIR_RETURN_IF_ERROR(proto::FromGrpcStatus(stub->GetServerInfo(&server_context, {}, &server)));
  v1::GetModelInfoResponse model;
  grpc::ClientContext model_context;
  SetTimeout(timeout, model_context);
  const absl::Status served = proto::FromGrpcStatus(stub->GetModelInfo(&model_context, {}, &model));
  const v1::GetModelInfoResponse* shown = served.ok() ? &model : nullptr;
  if (config.json()) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text, StatusJson(server, shown));
    std::cout << text;
  } else {
    std::cout << StatusTable(server, shown);
  }
  // While a group is being formed there is no model to report; the table says so.
  return absl::IsUnavailable(served) ? absl::OkStatus() : served;
}

}  // namespace kvasir::coordinator
