#include "coordinator/cli/status_command.h"

#include <algorithm>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"

#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/progress_bar.h"
#include "coordinator/policy/limits.h"
#include "coordinator/request/request_origin.h"
#include "coordinator/request/status_json.h"
#include "kernels/base/status_macros.h"
#include "proto/finish_numbers.h"
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
  absl::StrAppendFormat(&text, "KV           %s bytes a token, over all workers\n",
                        WithCommas(server.kv_token_bytes()));
  absl::StrAppendFormat(&text, "\ntier    %14s %14s %8s %24s\n", "used", "total", "full",
                        "share of read tokens");
  for (const v1::TierInfo& tier : server.tiers()) {
    absl::StrAppendFormat(&text, "%-7s %14s %14s %8s %24s\n", TierName(tier.tier()),
                          Gigabytes(tier.used_bytes()), Gigabytes(tier.total_bytes()),
                          Share(tier.used_bytes(), tier.total_bytes()),
                          Share(CachedTokens(server, tier.tier()), server.prompt_tokens()));
  }
  absl::StrAppendFormat(&text, "%-7s %72s\n", "peers",
                        Share(server.cached_peer_tokens(), server.prompt_tokens()));
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

const char* StateName(v1::RequestState state) {
  switch (state) {
    case v1::REQUEST_STATE_WAITING:
      return "waiting";
    case v1::REQUEST_STATE_READING:
      return "reading";
    case v1::REQUEST_STATE_ANSWERING:
      return "answering";
    case v1::REQUEST_STATE_RESUMING:
      return "resuming";
    default:
      return "?";
  }
}

std::string MassOf(const v1::RequestInfo& request) {
  if (request.has_measured_mass()) return absl::StrFormat("%.3f", request.measured_mass());
  if (request.has_estimated_mass()) return absl::StrFormat("~%.3f", request.estimated_mass());
  return "-";
}

void AppendRunning(const v1::GetServerInfoResponse& server, std::string& text) {
  if (server.requests().empty()) return;
  absl::StrAppendFormat(&text, "\n%-10s %-16s %21s %15s %10s %8s %8s %6s  %s\n", "request",
                        "policy", "prompt read", "answer", "tokens/s", "left", "skipped", "mass",
                        "id");
  for (const v1::RequestInfo& request : server.requests()) {
    absl::StrAppendFormat(
        &text, "%-10s %-16s %21s %15s %10.1f %8s %8s %6s  %s\n", StateName(request.state()),
        request.policy(),
        absl::StrCat(WithCommas(request.processed_tokens()), "/",
                     WithCommas(request.prompt_tokens())),
        absl::StrCat(WithCommas(request.answer_tokens()), "/", WithCommas(request.max_tokens())),
        request.tokens_per_second(),
        request.has_eta() ? absl::StrFormat("%.1f s", proto::ToSeconds(request.eta())) : "-",
        Share(request.blocks_skipped(), request.blocks_total()), MassOf(request),
        HeaderText(request.request_id()));
  }
  const auto listed = static_cast<uint32_t>(server.requests_size());
  const uint32_t all = server.requests_running() + server.requests_waiting();
  if (all > listed) absl::StrAppendFormat(&text, "and %s more\n", WithCommas(all - listed));
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
  AppendRunning(server, text);
  return text;
}

absl::Status RunStatus(const v1::StatusCommandConfig& config) {
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file(), config.tls()));
  const auto stub = v1::Generation::NewStub(channel);
  const absl::Duration timeout = absl::Seconds(config.timeout());
  v1::GetServerInfoRequest asked;
  asked.set_max_requests(kMaxListedRequests);
  v1::GetServerInfoResponse server;
  grpc::ClientContext server_context;
  SetTimeout(timeout, server_context);
  KVASIR_RETURN_IF_ERROR(
      proto::FromGrpcStatus(stub->GetServerInfo(&server_context, asked, &server)));
  v1::GetModelInfoResponse model;
  grpc::ClientContext model_context;
  SetTimeout(timeout, model_context);
  const absl::Status served = proto::FromGrpcStatus(stub->GetModelInfo(&model_context, {}, &model));
  const v1::GetModelInfoResponse* shown = served.ok() ? &model : nullptr;
  if (config.json()) {
    KVASIR_ASSIGN_OR_RETURN(const std::string text, StatusJson(server, shown));
    std::cout << text << '\n';
  } else {
    std::cout << StatusTable(server, shown);
  }
  // While a group is being formed there is no model to report; the table says so.
  return absl::IsUnavailable(served) ? absl::OkStatus() : served;
}

}  // namespace kvasir::coordinator
