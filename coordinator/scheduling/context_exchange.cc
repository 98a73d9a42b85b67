#include "coordinator/scheduling/context_exchange.h"

#include <algorithm>
#include <string>
#include <utility>

namespace kvasir::coordinator {
namespace {

using kvstore::Block;
using kvstore::BlockId;
using kvstore::PrefixHash;

template <typename Answer>
absl::Status StatusOf(const Answer& answer) {
  return absl::Status(static_cast<absl::StatusCode>(answer.error_code()), answer.error_message());
}

absl::Status Lost() {
  return absl::UnavailableError("the worker group was lost meanwhile; begin again");
}

absl::Status Ended() {
  return absl::AbortedError(
      "the context was deleted or evicted, or the worker group lost, meanwhile; begin again");
}

}  // namespace

int64_t ContextExchange::Begin(const ContextChain& chain) {
  kvstore::PrefixMatch match = contexts_.Match(chain);
  Exchange& exchange = exchanges_[chain.context];
  exchange = {.chain = chain,
              .scope = contexts_.ScopeOf(chain.tenant, chain.prefill),
              .blocks = std::move(match.blocks),
              .hashes = std::move(match.hashes)};
  return std::ssize(exchange.blocks);
}

void ContextExchange::End(int64_t context) {
  exchanges_.erase(context);
  std::erase_if(imports_, [&](const v1::BlockImport& import) {
    const auto it = importing_.find(BlockId(static_cast<int64_t>(import.block_id())));
    if (it->second.context != context) return false;
    const PendingImport ended = std::move(importing_.extract(it).mapped());
    ended.done(Ended());
    return true;
  });
}

absl::Span<const int32_t> ContextExchange::TokensOf(const Exchange& exchange, int64_t index) {
  return absl::MakeConstSpan(*exchange.chain.tokens)
      .subspan(static_cast<size_t>(index * kBlockTokens), static_cast<size_t>(kBlockTokens));
}

void ContextExchange::Export(int64_t context, int64_t index, OnExported done) {
  const auto it = exchanges_.find(context);
  if (it == exchanges_.end()) return done(Ended());
  v1::BlockExport block;
  block.set_id(++next_export_);
  const Block& held = it->second.blocks[static_cast<size_t>(index)];
  block.set_block_id(static_cast<uint64_t>(held.id().value));
  exporting_[block.id()] = {
      .ranks_left = options_.num_ranks, .heads = {}, .status = {}, .done = std::move(done)};
  exports_.push_back(std::move(block));
}

void ContextExchange::OnExportedBy(const v1::ExportedBlock& exported) {
  const auto it = exporting_.find(exported.id());
  if (it == exporting_.end()) return;
  PendingExport& pending = it->second;
  pending.status.Update(StatusOf(exported));
  for (const v1::HeadExtent& head : exported.heads()) pending.heads[head.head()] = head;
  if (--pending.ranks_left > 0) return;
  PendingExport ended = std::move(exporting_.extract(it).mapped());
  if (!ended.status.ok()) return ended.done(ended.status);
  std::vector<v1::HeadExtent> heads;
  for (auto& [number, head] : ended.heads) heads.push_back(std::move(head));
  ended.done(std::move(heads));
}

absl::StatusOr<Block> ContextExchange::TakeBlock() const {
  int64_t held = contexts_.pinned_host_blocks() + static_cast<int64_t>(importing_.size());
  for (const auto& [context, exchange] : exchanges_) held += std::ssize(exchange.blocks);
  const int64_t longest = (options_.longest_sequence + kBlockTokens - 1) / kBlockTokens;
  if (held + 1 > budget_.capacity() - longest || budget_.unreserved() < 1) {
    return absl::ResourceExhaustedError(
        "the host tier has no room for the blocks beside running requests, pins and the longest "
        "context; try again later, or raise --kv-host-size-gb");
  }
  return budget_.index().Allocate();
}

void ContextExchange::Import(int64_t context, std::vector<v1::HeadExtent> heads, OnImported done) {
  const auto it = exchanges_.find(context);
  if (it == exchanges_.end()) return done(Ended());
  const Exchange& exchange = it->second;
  const int64_t index = std::ssize(exchange.blocks);
  if (index >= exchange.chain.num_blocks()) {
    return done(absl::InvalidArgumentError("there are more blocks than the tokens fill"));
  }
  absl::StatusOr<Block> block = TakeBlock();
  if (!block.ok()) return done(block.status());
  const absl::Span<const int32_t> tokens = TokensOf(exchange, index);
  const PrefixHash hash =
      kvstore::HashBlock(index == 0 ? exchange.scope : exchange.hashes.back(), tokens, {});
  const PrefixHash owner = kvstore::HashOwner(exchange.chain.tenant);
  v1::BlockImport import;
  import.set_block_id(static_cast<uint64_t>(block->id().value));
  import.set_prefix_hash(hash.data(), hash.size());
  import.set_owner(owner.data(), owner.size());
  import.mutable_tokens()->Assign(tokens.begin(), tokens.end());
  for (v1::HeadExtent& head : heads) *import.add_heads() = std::move(head);
  imports_.push_back(std::move(import));
  const BlockId id = block->id();
  importing_[id] = {.context = context,
                    .block = *std::move(block),
                    .hash = hash,
                    .ranks_left = options_.num_ranks,
                    .status = {},
                    .done = std::move(done)};
}

void ContextExchange::OnRestoredBy(const v1::RestoredBlock& restored) {
  const auto it = importing_.find(BlockId(static_cast<int64_t>(restored.block_id())));
  if (it == importing_.end()) return;
  it->second.status.Update(StatusOf(restored));
  if (--it->second.ranks_left == 0) EndImport(std::move(importing_.extract(it).mapped()));
}

void ContextExchange::EndImport(PendingImport import) {
  const auto it = exchanges_.find(import.context);
  if (it == exchanges_.end()) import.status.Update(Ended());
  if (!import.status.ok()) return import.done(import.status);
  Exchange& exchange = it->second;
  const int64_t index = std::ssize(exchange.blocks);
  budget_.index().Publish({.block = import.block,
                           .before = index == 0 ? Block() : exchange.blocks.back(),
                           .parent = index == 0 ? exchange.scope : exchange.hashes.back(),
                           .hash = import.hash,
                           .tokens = TokensOf(exchange, index),
                           .owner = kvstore::HashOwner(exchange.chain.tenant)});
  exchange.blocks.push_back(std::move(import.block));
  exchange.hashes.push_back(import.hash);
  import.done(absl::OkStatus());
}

void ContextExchange::AddTo(PlanBuilder& plan) {
  for (v1::BlockExport& block : exports_) plan.AddExport(std::move(block));
  exports_.clear();
  for (v1::BlockImport& block : imports_) plan.AddImport(std::move(block));
  imports_.clear();
}

void ContextExchange::GiveUp() {
  exports_.clear();
  imports_.clear();
  const auto exporting = std::exchange(exporting_, {});
  const auto importing = std::exchange(importing_, {});
  exchanges_.clear();
  for (const auto& [id, pending] : exporting) pending.done(Lost());
  for (const auto& [id, pending] : importing) pending.done(Lost());
}

std::vector<BlockId> ContextExchange::held() const {
  std::vector<BlockId> ids;
  for (const auto& [context, exchange] : exchanges_) {
    for (const Block& block : exchange.blocks) ids.push_back(block.id());
  }
  for (const auto& [id, import] : importing_) ids.push_back(id);
  return ids;
}

}  // namespace kvasir::coordinator
