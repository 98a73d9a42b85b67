#include "coordinator/formed_group.h"

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "spdlog/spdlog.h"

#include "kernels/base/status_macros.h"
#include "kvstore/index/prefix_index.h"

namespace kvasir::coordinator {

absl::StatusOr<FormedGroup> FormGroup(WorkerGroup& group, const FormingOptions& options) {
  FormedGroup formed;
  KVASIR_ASSIGN_OR_RETURN(formed.info, group.Form());
  if (options.check_group) KVASIR_RETURN_IF_ERROR(options.check_group(formed.info));
  const v1::SchedulerConfig& config = options.scheduler;
  KVASIR_ASSIGN_OR_RETURN(
      formed.scheduler,
      Scheduler::Create({.group_epoch = formed.info.epoch,
                         .num_ranks = static_cast<int64_t>(formed.info.ranks.size()),
                         .device_blocks = formed.info.device_blocks,
                         .disk_blocks = formed.info.disk_blocks,
                         .has_peers = formed.info.has_peers,
                         .attention_parity_tokens = formed.info.attention_parity_tokens,
                         .mass_unmeasured = formed.info.mass_unmeasured,
                         .vocab_size = formed.info.vocab_size,
                         .longest_sequence = formed.info.max_model_len,
                         .weights_hash = formed.info.weights_hash,
                         .kv_form = formed.info.kv_form,
                         .max_num_seqs = config.max_num_seqs(),
                         .max_num_batched_tokens = config.max_num_batched_tokens(),
                         .max_queue_len = config.max_queue_len(),
                         .max_queued_tokens = config.max_queued_tokens(),
                         .enable_prefix_caching = config.enable_prefix_caching()},
                        kvstore::PrefixIndex::Create(formed.info.host_blocks, kvstore::HashBlock,
                                                     options.block_listener)));
  return formed;
}

bool IsPermanent(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status) ||
         absl::IsNotFound(status) || absl::IsResourceExhausted(status) ||
         absl::IsUnimplemented(status) || absl::IsUnauthenticated(status) ||
         absl::IsPermissionDenied(status);
}

absl::Status ForClients(const absl::Status& lost) {
  const absl::StatusCode code =
      absl::IsInternal(lost) ? absl::StatusCode::kInternal : absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat("the worker group failed: ", lost.message()));
}

void LogSetAside(const SchedulerStats& before, const SchedulerStats& now) {
  if (now.disk_set_aside && !before.disk_set_aside) {
    spdlog::error("the disk tier does not answer: it is set aside and tried now and then");
  } else if (!now.disk_set_aside && before.disk_set_aside) {
    spdlog::info("the disk tier answers again");
  }
  if (now.peers_set_aside && !before.peers_set_aside) {
    spdlog::warn("peers failed or are slower than computing: they are asked now and then only");
  }
}

void Announce(const GroupInfo& info, Metrics& metrics) {
  metrics.GroupFormed({.num_device_blocks = info.device_blocks,
                       .num_host_blocks = info.host_blocks,
                       .num_disk_blocks = info.disk_blocks,
                       .kv_cache_dtype = info.kv_form.substr(info.kv_form.find('/') + 1),
                       .tensor_parallel_size = static_cast<int64_t>(info.addresses.size())});
  for (size_t i = 0; i < info.addresses.size(); ++i) {
    metrics.WorkerUp(static_cast<int64_t>(i), true);
  }
  spdlog::info("serving: epoch {}, {} workers, context of {} tokens", info.epoch,
               info.addresses.size(), info.max_model_len);
  const auto tokens = [](int64_t blocks) { return blocks * kvstore::kBlockTokens; };
  spdlog::info("KV fits {} tokens: device {}, host {}, disk {}", tokens(info.host_blocks),
               tokens(info.device_blocks), tokens(info.host_blocks), tokens(info.disk_blocks));
}

}  // namespace kvasir::coordinator
