#include "coordinator/contexts/contexts.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

#include "coordinator/contexts/read_sink.h"
#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

v1::Context Describe(const NamedContext& context, v1::ContextState state) {
  v1::Context told;
  told.set_name(context.name);
  told.set_state(state);
  told.set_tokens(static_cast<uint32_t>(context.tokens.size()));
  told.mutable_created_at()->set_seconds(context.created_at_unix_s);
  *told.mutable_policy() = context.policy;
  return told;
}

// A request whose prompt is the input, as Generate takes it.
template <typename Input>
v1::GenerateRequest PromptRequestOf(const Input& input) {
  v1::GenerateRequest request;
  if (input.has_text()) request.set_text(input.text());
  if (input.has_token_ids()) *request.mutable_token_ids() = input.token_ids();
  if (input.has_chat()) *request.mutable_chat() = input.chat();
  if (input.has_add_special_tokens()) {
    request.set_add_special_tokens(input.add_special_tokens());
  }
  if (input.has_parse_special_tokens()) {
    request.set_parse_special_tokens(input.parse_special_tokens());
  }
  return request;
}

}  // namespace

ContextCaller ContextCallerOf(std::shared_ptr<const Caller> caller, const std::string& part) {
  std::string tenant = caller == nullptr ? part : caller->Tenant(part);
  return {.caller = std::move(caller), .tenant = std::move(tenant)};
}

absl::StatusOr<std::unique_ptr<Contexts>> Contexts::Open(const ContextsOptions& options,
                                                         Clock& clock, Metrics& metrics) {
  std::optional<RecordFolder> folder;
  if (!options.folder.empty()) {
    KVASIR_ASSIGN_OR_RETURN(folder, RecordFolder::Open(options.folder));
  }
  auto contexts =
      std::unique_ptr<Contexts>(new Contexts(options, std::move(folder), clock, metrics));
  contexts->Load();
  return contexts;
}

void Contexts::Load() {
  if (!folder_.has_value()) return;
  MutexLock lock(mu_);
  for (const v1::ContextRecord& record : folder_->Load()) {
    auto context = std::make_shared<NamedContext>();
    context->tenant = record.tenant();
    context->name = record.name();
    context->tokens.assign(record.tokens().begin(), record.tokens().end());
    context->policy = record.policy();
    context->created_at_unix_s = record.created_at_unix_s();
    context->number = next_number_++;
    tokens_ += std::ssize(context->tokens);
    Entry& entry = entries_[{context->tenant, context->name}];
    entry.context = context;
    for (const v1::PinRecord& pin : record.pins()) {
      const absl::Duration left = absl::FromUnixMillis(pin.expires_at_unix_ms()) - absl::Now();
      if (left <= absl::ZeroDuration()) continue;
      entry.pins[pin.tier()] = {.expires = After(clock_.Now(), left),
                                .recorded = After(clock_.Now(), left),
                                .ttl = absl::Milliseconds(pin.ttl_ms()),
                                .refresh = pin.refresh_on_hit(),
                                .blocks = {.granted = pin.granted_blocks()}};
    }
    if (record.is_read()) entry.state = v1::CONTEXT_STATE_READY;
    if (!record.is_read() || !entry.pins.empty()) to_read_.push_back(context);
  }
  CountStates();
  if (!entries_.empty()) spdlog::info("contexts: {} records are found", entries_.size());
}

Contexts::~Contexts() { Stop(); }

void Contexts::Start(ContextEngine& engine) {
  engine_ = &engine;
  reader_ = proto::NamedThread("contexts", [this] { RunReader(); });
}

void Contexts::OnReady() {
  MutexLock lock(mu_);
  next_try_ = {};
  pause_ = absl::ZeroDuration();
  for (auto& [key, entry] : entries_) {
    if (!entry.pins.empty()) ReadSoon(entry);
  }
  changed_.NotifyAll();
}

void Contexts::Stop() {
  std::shared_ptr<ReadSink> abandoned;
  {
    MutexLock lock(mu_);
    stopping_ = true;
    abandoned = reading_;
    changed_.NotifyAll();
  }
  if (abandoned != nullptr) abandoned->Abandon(absl::CancelledError("the server ends"));
  if (reader_.joinable()) reader_.join();
}

// --- calls --------------------------------------------------------------------------------------

absl::StatusOr<v1::Context> Contexts::Create(const v1::CreateContextRequest& request,
                                             const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  NamedContext context = {.number = 0,
                          .tenant = by.tenant,
                          .name = request.name(),
                          .tokens = {},
                          .policy = request.policy(),
                          .created_at_unix_s = absl::ToUnixSeconds(absl::Now())};
  {
    MutexLock lock(mu_);
    KVASIR_RETURN_IF_ERROR(CheckNew(context, by.caller.get()));  // before its text is worked on
  }
  v1::GenerateRequest prompt = PromptRequestOf(request);
  *prompt.mutable_policy() = request.policy();
  KVASIR_ASSIGN_OR_RETURN(context.tokens, engine_->PromptOf(prompt, 0));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> added,
                          Add(std::move(context), by.caller, Reading::kNow));
  return DescribeNow(*added);
}

absl::StatusOr<v1::Context> Contexts::Fork(const v1::ForkContextRequest& request,
                                           const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> from,
                          Find(by.tenant, request.name()));
  NamedContext context = *from;
  context.name = request.into();
  context.created_at_unix_s = absl::ToUnixSeconds(absl::Now());
  if (request.input_case() != v1::ForkContextRequest::INPUT_NOT_SET) {
    v1::GenerateRequest prompt = PromptRequestOf(request);
    *prompt.mutable_policy() = from->policy;
    KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> more,
                            engine_->PromptOf(prompt, std::ssize(from->tokens)));
    context.tokens.insert(context.tokens.end(), more.begin(), more.end());
  }
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> added,
                          Add(std::move(context), by.caller, Reading::kNow));
  return DescribeNow(*added);
}

absl::Status Contexts::CheckNew(const NamedContext& context, const Caller* caller) const {
  if (entries_.contains({context.tenant, context.name})) {
    return absl::AlreadyExistsError(
        absl::StrCat("there is a context ", context.name, "; choose another name, or delete it"));
  }
  if (std::ssize(entries_) >= options_.max_contexts) {
    return absl::ResourceExhaustedError(absl::StrCat("there are ", entries_.size(),
                                                     " contexts, as many as the server keeps; "
                                                     "delete some, or raise --max-contexts"));
  }
  const int64_t tokens = std::ssize(context.tokens);
  if (tokens_ + tokens <= options_.max_tokens) return CheckShare(context, caller);
  return absl::ResourceExhaustedError(
      absl::StrCat("context ", context.name, " has ", tokens, " tokens, all others have ", tokens_,
                   "; the server keeps ", options_.max_tokens,
                   ": delete some, shorten it, or raise --max-context-tokens"));
}

absl::Status Contexts::CheckShare(const NamedContext& context, const Caller* caller) const {
  uint64_t most = options_.max_tenant_contexts;
  uint64_t most_tokens = options_.max_tenant_tokens;
  if (caller != nullptr) {
    const CallerLimits& limits = caller->limits();
    if (limits.contexts > 0) most = limits.contexts;
    if (limits.context_tokens > 0) most_tokens = limits.context_tokens;
  }
  if (most == 0 && most_tokens == 0) return absl::OkStatus();
  uint64_t contexts = 0;
  uint64_t tokens = 0;
  ForEachOf(context.tenant, caller, [&](const Entry& entry) {
    ++contexts;
    tokens += entry.context->tokens.size();
  });
  if (most > 0 && contexts >= most) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the tenant has ", contexts, " contexts and may keep ", most,
                     "; delete some, or raise --max-tenant-contexts, or contexts of its API key"));
  }
  if (most_tokens == 0 || tokens + context.tokens.size() <= most_tokens) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("context ", context.name, " has ", context.tokens.size(),
                   " tokens, the tenant's others have ", tokens, "; it may keep ", most_tokens,
                   ": delete some, shorten it, or raise --max-tenant-context-tokens, or "
                   "context-tokens of its API key"));
}

void Contexts::ForEachOf(const std::string& tenant, const Caller* caller,
                         absl::FunctionRef<void(const Entry& entry)> visit) const {
  const std::string whose = caller != nullptr ? caller->Tenant("") : tenant;
  for (auto it = entries_.lower_bound({whose, ""});
       it != entries_.end() && it->first.first == whose; ++it) {
    visit(it->second);
  }
  if (caller == nullptr) return;
  const std::string parts = absl::StrCat(whose, ":");
  for (auto it = entries_.lower_bound({parts, ""});
       it != entries_.end() && absl::StartsWith(it->first.first, parts); ++it) {
    visit(it->second);
  }
}

absl::StatusOr<std::shared_ptr<const NamedContext>> Contexts::Add(
    NamedContext context, std::shared_ptr<const Caller> caller, Reading reading) {
  MutexLock files(files_mu_);
  Entry entry = {.context = nullptr, .caller = std::move(caller)};
  v1::ContextRecord record;
  {
    MutexLock lock(mu_);
    KVASIR_RETURN_IF_ERROR(CheckNew(context, entry.caller.get()));
    context.number = next_number_++;
    entry.context = std::make_shared<const NamedContext>(std::move(context));
    record = RecordOf(entry);
  }
  KVASIR_RETURN_IF_ERROR(Save(record));
  MutexLock lock(mu_);
  const std::shared_ptr<const NamedContext> added = entry.context;
  tokens_ += std::ssize(added->tokens);
  entries_[{added->tenant, added->name}] = std::move(entry);
  if (reading == Reading::kNow) to_read_.push_back(added);
  CountStates();
  changed_.NotifyAll();
  return added;
}

v1::Context Contexts::DescribeNow(const NamedContext& context) {
  MutexLock lock(mu_);
  const Entry* const entry = EntryOf(context);
  return entry != nullptr ? DescribeEntry(*entry) : Describe(context, v1::CONTEXT_STATE_WAITING);
}

absl::Status Contexts::Save(const v1::ContextRecord& record) {
  return folder_.has_value() ? folder_->Save(record) : absl::OkStatus();
}

v1::ContextRecord Contexts::RecordOf(const Entry& entry) const {
  const NamedContext& context = *entry.context;
  v1::ContextRecord record;
  record.set_tenant(context.tenant);
  record.set_name(context.name);
  record.mutable_tokens()->Assign(context.tokens.begin(), context.tokens.end());
  *record.mutable_policy() = context.policy;
  record.set_created_at_unix_s(context.created_at_unix_s);
  record.set_is_read(entry.state == v1::CONTEXT_STATE_READY);
  for (const auto& [tier, pin] : entry.pins) {
    v1::PinRecord& saved = *record.add_pins();
    saved.set_tier(tier);
    saved.set_expires_at_unix_ms(
        absl::ToUnixMillis(absl::Now() + Between(clock_.Now(), pin.expires)));
    saved.set_ttl_ms(absl::ToInt64Milliseconds(pin.ttl));
    saved.set_refresh_on_hit(pin.refresh);
    saved.set_granted_blocks(pin.blocks.granted);
  }
  return record;
}

absl::StatusOr<v1::Context> Contexts::Get(const v1::GetContextRequest& request,
                                          const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  MutexLock lock(mu_);
  KVASIR_ASSIGN_OR_RETURN(const Entry* entry, FindEntry(by.tenant, request.name()));
  return DescribeEntry(*entry);
}

v1::Context Contexts::DescribeEntry(const Entry& entry) const {
  v1::Context told = Describe(*entry.context, entry.state);
  told.set_state_reason(entry.reason);
  const bool is_ready = entry.state == v1::CONTEXT_STATE_READY;
  told.set_processed_tokens(is_ready ? told.tokens()
                                     : static_cast<uint32_t>(entry.processed_tokens));
  if (entry.eta.has_value()) *told.mutable_eta() = *entry.eta;
  for (const auto& [tier, pin] : entry.pins) {
    v1::ContextPin& added = *told.add_pins();
    added.set_tier(tier);
    added.set_granted_blocks(static_cast<uint32_t>(pin.blocks.granted));
    added.set_present_blocks(static_cast<uint32_t>(pin.blocks.present));
    added.mutable_expires_at()->set_seconds(
        absl::ToUnixSeconds(absl::Now() + Between(clock_.Now(), pin.expires)));
    added.set_refresh_on_hit(pin.refresh);
  }
  return told;
}

absl::StatusOr<v1::ListContextsResponse> Contexts::List(const v1::ListContextsRequest& request,
                                                        const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  v1::ListContextsResponse list;
  MutexLock lock(mu_);
  for (auto it = entries_.lower_bound({by.tenant, ""});
       it != entries_.end() && it->first.first == by.tenant; ++it) {
    *list.add_contexts() = DescribeEntry(it->second);
  }
  return list;
}

absl::Status Contexts::Delete(const v1::DeleteContextRequest& request, const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  MutexLock files(files_mu_);
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const NamedContext> context,
                          Find(by.tenant, request.name()));
  int64_t record_bytes = 0;
  return Forget(*context, absl::CancelledError("the context is deleted"), record_bytes);
}

absl::Status Contexts::Forget(const NamedContext& context, const absl::Status& why,
                              int64_t& record_bytes) {
  {
    MutexLock lock(mu_);
    if (EntryOf(context) == nullptr) return absl::OkStatus();
  }
  if (folder_.has_value()) {
    KVASIR_RETURN_IF_ERROR(folder_->Erase(context.tenant, context.name, record_bytes));
  }
  std::shared_ptr<ReadSink> abandoned;
  {
    MutexLock lock(mu_);
    tokens_ -= std::ssize(context.tokens);
    std::erase_if(to_read_, [&](const auto& waiting) { return waiting.get() == &context; });
    if (reading_ != nullptr && &reading_->context() == &context) abandoned = reading_;
    entries_.erase({context.tenant, context.name});
    CountStates();
  }
  LetGo(context);
  if (abandoned != nullptr) abandoned->Abandon(why);
  return absl::OkStatus();
}

void Contexts::LetGo(const NamedContext& context) {
  engine_->Unpin(context.number, v1::TIER_HOST);
  engine_->Unpin(context.number, v1::TIER_DISK);
  engine_->EndExchange(context.number);
}

absl::StatusOr<std::shared_ptr<const NamedContext>> Contexts::Find(const std::string& tenant,
                                                                   const std::string& name) const {
  MutexLock lock(mu_);
  KVASIR_ASSIGN_OR_RETURN(const Entry* entry, FindEntry(tenant, name));
  return entry->context;
}

absl::StatusOr<std::shared_ptr<const NamedContext>> Contexts::Use(const std::string& tenant,
                                                                  const std::string& name) {
  MutexLock lock(mu_);
  KVASIR_ASSIGN_OR_RETURN(const Entry* found, FindEntry(tenant, name));
  Entry& entry = *EntryOf(*found->context);
  for (auto& [tier, pin] : entry.pins) {
    if (!pin.refresh) continue;
    pin.expires = After(clock_.Now(), pin.ttl);
    if (Between(pin.recorded, pin.expires) < pin.ttl / 2) continue;
    entry.is_unsaved = true;  // not each time: records are files
    changed_.NotifyAll();
  }
  return entry.context;
}

absl::StatusOr<const Contexts::Entry*> Contexts::FindEntry(const std::string& tenant,
                                                           const std::string& name) const {
  const auto it = entries_.find({tenant, name});
  if (it != entries_.end()) return &it->second;
  return absl::NotFoundError(absl::StrCat("there is no context ", name,
                                          " of this tenant; create it, or list those that "
                                          "there are"));
}

Contexts::Entry* Contexts::EntryOf(const NamedContext& context) {
  const auto it = entries_.find({context.tenant, context.name});
  const bool is_same = it != entries_.end() && it->second.context.get() == &context;
  return is_same ? &it->second : nullptr;
}

void Contexts::CountStates() {
  std::map<v1::ContextState, int64_t> counts;
  for (const auto& [key, entry] : entries_) ++counts[entry.state];
  metrics_.ContextStates({.waiting = counts[v1::CONTEXT_STATE_WAITING],
                          .reading = counts[v1::CONTEXT_STATE_READING],
                          .ready = counts[v1::CONTEXT_STATE_READY],
                          .failed = counts[v1::CONTEXT_STATE_FAILED],
                          .evicted = counts[v1::CONTEXT_STATE_EVICTED]});
}

}  // namespace kvasir::coordinator
