#include "coordinator/group/step_replies.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/scheduling/attention_sums.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

absl::Status Disagree(size_t rank, const v1::StepReply& first, const v1::StepReply& other,
                      absl::string_view about) {
  return absl::InternalError(absl::StrCat(
      "rank 0 and rank ", rank, " disagree about ", about, ": epoch ", first.group_epoch(), " and ",
      other.group_epoch(), ", step ", first.step(), " and ", other.step(), ", ",
      first.results_size(), " and ", other.results_size(), " rows, token hash ",
      absl::Hex(first.token_hash()), " and ", absl::Hex(other.token_hash())));
}

using Counts = google::protobuf::RepeatedField<uint64_t>;
void AddCounts(const Counts& from, Counts& to) {
  to.Resize(std::max(from.size(), to.size()), 0);
  for (int i = 0; i < from.size(); ++i) to[i] += from[i];
}

void AddAccounting(const v1::RowAccounting& from, v1::RowAccounting& to) {
  if (from.has_prefill()) AddPhase(from.prefill(), *to.mutable_prefill());
  if (from.has_decode()) AddPhase(from.decode(), *to.mutable_decode());
  if (from.has_estimated_mass()) {
    AddMassSamples(from.estimated_mass(), *to.mutable_estimated_mass());
  }
  if (from.has_contract()) AddContract(from.contract(), *to.mutable_contract());
  to.set_attended_tokens(to.attended_tokens() + from.attended_tokens());
  to.set_attending_rows(to.attending_rows() + from.attending_rows());
  to.set_disk_page_waits(to.disk_page_waits() + from.disk_page_waits());
  to.set_disk_wait_s(to.disk_wait_s() + from.disk_wait_s());
  AddCounts(from.stages_run(), *to.mutable_stages_run());
  AddCounts(from.stages_reused(), *to.mutable_stages_reused());
  if (from.cached_device_tokens() < to.cached_device_tokens()) {
    to.set_cached_device_tokens(from.cached_device_tokens());
    to.set_cached_host_tokens(from.cached_host_tokens());
    to.set_cached_disk_tokens(from.cached_disk_tokens());
    to.set_cached_peer_tokens(from.cached_peer_tokens());
  }
}

// Ranks whose KV heads others count too have no counts.
void AddSelections(const v1::SelectionMap& from, v1::SelectionMap& to) {
  if (from.counts_size() == 0) return;
  if (to.counts_size() == 0) {
    to = from;
    return;
  }
  to.set_num_heads(to.num_heads() + from.num_heads());
  for (int i = 0; i < std::min(from.counts_size(), to.counts_size()); ++i) {
    to.set_counts(i, to.counts(i) + from.counts(i));
  }
}

absl::Status AddRow(size_t rank, const v1::RowResult& from, v1::RowResult& to) {
  const bool both_ran = from.error_code() == 0 && to.error_code() == 0;
  if (from.slot() != to.slot() || (both_ran && (from.has_token_id() != to.has_token_id() ||
                                                from.token_id() != to.token_id()))) {
    return absl::InternalError(
        absl::StrCat("rank 0 and rank ", rank, " disagree about a row: slot ", to.slot(), " and ",
                     from.slot(), ", token ", to.token_id(), " and ", from.token_id()));
  }
  if (to.error_code() == 0 && from.error_code() != 0) {
    to.clear_token_id();
    to.set_error_code(from.error_code());
    to.set_error_message(from.error_message());
  }
  AddAccounting(from.accounting(), *to.mutable_accounting());
  if (from.has_selections()) AddSelections(from.selections(), *to.mutable_selections());
  return absl::OkStatus();
}

void AddTiers(const v1::TierUsage& from, v1::TierUsage& to) {
  to.set_device_pages_used(to.device_pages_used() + from.device_pages_used());
  to.set_device_pages_total(to.device_pages_total() + from.device_pages_total());
  to.set_host_blocks_used(to.host_blocks_used() + from.host_blocks_used());
  to.set_host_blocks_total(to.host_blocks_total() + from.host_blocks_total());
  to.set_disk_blocks_used(to.disk_blocks_used() + from.disk_blocks_used());
  to.set_disk_blocks_total(to.disk_blocks_total() + from.disk_blocks_total());
}

absl::Status AddReply(size_t rank, const v1::StepReply& from, v1::StepReply& to) {
  if (from.group_epoch() != to.group_epoch() || from.step() != to.step()) {
    return Disagree(rank, to, from, "the plan they answer");
  }
  if (from.results_size() != to.results_size()) {
    return Disagree(rank, to, from, "the number of rows");
  }
  if (from.token_hash() != to.token_hash()) {
    return Disagree(rank, to, from, "the sampled tokens");
  }
  for (int i = 0; i < from.results_size(); ++i) {
    KVASIR_RETURN_IF_ERROR(AddRow(rank, from.results(i), *to.mutable_results(i)));
  }
  AddTiers(from.tiers(), *to.mutable_tiers());
  to.set_step_s(std::max(to.step_s(), from.step_s()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::StepReply> MergeReplies(std::vector<v1::StepReply> replies) {
  v1::StepReply merged = std::move(replies[0]);
  std::set<uint64_t> missing(merged.missing_blocks().begin(), merged.missing_blocks().end());
  for (size_t rank = 1; rank < replies.size(); ++rank) {
    KVASIR_RETURN_IF_ERROR(AddReply(rank, replies[rank], merged));
    missing.insert(replies[rank].missing_blocks().begin(), replies[rank].missing_blocks().end());
  }
  if (!missing.empty() && !merged.results().empty()) {
    return absl::InternalError(absl::StrCat("the ranks ran step ", merged.step(), " though ",
                                            missing.size(), " of its blocks are missing"));
  }
  merged.mutable_missing_blocks()->Assign(missing.begin(), missing.end());
  return merged;
}

}  // namespace kvasir::coordinator
