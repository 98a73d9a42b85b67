#include "coordinator/http/answers/usage.h"

#include "proto/finish_numbers.h"

namespace kvasir::coordinator {

using nlohmann::json;

void UsageSum::AddFinish(const v1::Finish& finish) {
  const v1::CachedTokens& cached = finish.usage().cached_tokens();
  cached_.set_device(cached_.device() + cached.device());
  cached_.set_host(cached_.host() + cached.host());
  cached_.set_disk(cached_.disk() + cached.disk());
  cached_.set_peer(cached_.peer() + cached.peer());
  const v1::AttentionReport& report = finish.attention();
  blocks_ += report.prefill_blocks_total() + report.decode_blocks_total();
  blocks_skipped_ += proto::SkippedPages(report.prefill_blocks_skipped()) +
                     proto::SkippedPages(report.decode_blocks_skipped());
  if (report.has_decode_measured_mass()) {
    const v1::MassSummary& mass = report.decode_measured_mass();
    mass_ += static_cast<double>(mass.mean()) * static_cast<double>(mass.samples());
    mass_samples_ += mass.samples();
  } else if (report.decode_mass_unmeasured() != v1::MASS_UNMEASURED_DENSE) {
    mass_unknown_ = true;
  }
}

json UsageSum::Json(State state) const {
  json usage = {{"prompt_tokens", prompt_tokens_},
                {"completion_tokens", completion_tokens_},
                {"total_tokens", prompt_tokens_ + completion_tokens_}};
  if (state == State::kRunning) return usage;
  usage["prompt_tokens_details"] = {{"cached_tokens", proto::TokensOfAllTiers(cached_)},
                                    {"cached_tokens_by_tier",
                                     {{"device", cached_.device()},
                                      {"host", cached_.host()},
                                      {"disk", cached_.disk()},
                                      {"peer", cached_.peer()}}}};
  json mass = 1;
  if (mass_samples_ > 0) mass = mass_ / static_cast<double>(mass_samples_);
  if (mass_unknown_) mass = nullptr;
  const double share =
      blocks_ == 0 ? 0 : static_cast<double>(blocks_skipped_) / static_cast<double>(blocks_);
  usage["kvasir"] = {
      {"sparsity", share}, {"blocks_skipped", blocks_skipped_}, {"mass", std::move(mass)}};
  return usage;
}

}  // namespace kvasir::coordinator
