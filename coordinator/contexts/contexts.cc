#include "coordinator/contexts/contexts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "spdlog/spdlog.h"

#include "coordinator/policy/limits.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/process/named_thread.h"

namespace kvasir::coordinator {
namespace {

using kernels::MutexLock;

// Pauses before a read that was refused is tried again: the first, each further one twice as long,
// the longest.
constexpr absl::Duration kFirstPause = absl::Seconds(1);
constexpr absl::Duration kLongestPause = absl::Seconds(60);

v1::Context Describe(const NamedContext& context, v1::ContextState state) {
  v1::Context told;
  told.set_name(context.name);
  told.set_state(state);
  told.set_tokens(static_cast<uint32_t>(context.tokens.size()));
  told.mutable_created_at()->set_seconds(context.created_at_unix_s);
  *told.mutable_policy() = context.policy;
  return told;
}

v1::GenerateRequest ReadRequestOf(const NamedContext& context) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Assign(context.tokens.begin(), context.tokens.end());
  *request.mutable_policy() = context.policy;
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(1);
  return request;
}

// A request whose prompt is the input of `create`, as Generate takes it.
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

// Takes what the engine says of a request that reads a context.
class Contexts::ReadSink final : public ClientSink {
 public:
  ReadSink(Contexts& contexts, std::shared_ptr<const NamedContext> context)
      : contexts_(contexts), context_(std::move(context)) {}

  const NamedContext& context() const { return *context_; }
  void Abandon(const absl::Status& why) { Cancel(why); }

  void Write(v1::GenerateResponse response) override {
    if (!response.has_progress()) return;
    began_ = true;
    contexts_.OnProgress(*context_, response.progress());
  }
  void Close(const absl::Status& status) override {
    contexts_.OnEnd({.context = context_, .status = status, .began = began_});
  }

 private:
  Contexts& contexts_;
  const std::shared_ptr<const NamedContext> context_;
  bool began_ = false;  // by the thread that writes
};

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
    tokens_ += std::ssize(context->tokens);
    Entry& entry = entries_[{context->tenant, context->name}];
    entry.context = context;
    if (record.is_read()) {
      entry.state = v1::CONTEXT_STATE_READY;
    } else {
      to_read_.push_back(context);
    }
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
  changed_.NotifyAll();
}

void Contexts::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (reader_.joinable()) reader_.join();
}

// --- calls --------------------------------------------------------------------------------------

absl::StatusOr<v1::Context> Contexts::Create(const v1::CreateContextRequest& request,
                                             const ContextCaller& by) {
  KVASIR_RETURN_IF_ERROR(CheckLimits("", request));
  NamedContext context = {.tenant = by.tenant,
                          .name = request.name(),
                          .tokens = {},
                          .policy = request.policy(),
                          .created_at_unix_s = absl::ToUnixSeconds(absl::Now())};
  {
    MutexLock lock(mu_);
    KVASIR_RETURN_IF_ERROR(CheckNew(context));  // before its text is worked on
  }
  v1::GenerateRequest prompt = PromptRequestOf(request);
  *prompt.mutable_policy() = request.policy();
  KVASIR_ASSIGN_OR_RETURN(context.tokens, engine_->PromptOf(prompt, 0));
  return Add(std::move(context), by.caller);
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
  return Add(std::move(context), by.caller);
}

absl::Status Contexts::CheckNew(const NamedContext& context) const {
  if (entries_.contains({context.tenant, context.name})) {
    return absl::AlreadyExistsError(absl::StrCat("there is a context ", context.name,
                                                 "; choose another name, or delete it"));
  }
  if (std::ssize(entries_) >= options_.max_contexts) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", entries_.size(), " contexts, as many as the server keeps; "
                     "delete some, or raise --max-contexts"));
  }
  const int64_t tokens = std::ssize(context.tokens);
  if (tokens_ + tokens <= options_.max_tokens) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "context ", context.name, " has ", tokens, " tokens, all others have ", tokens_,
      "; the server keeps ", options_.max_tokens,
      ": delete some, shorten it, or raise --max-context-tokens"));
}

absl::StatusOr<v1::Context> Contexts::Add(NamedContext context,
                                          std::shared_ptr<const Caller> caller) {
  const auto added = std::make_shared<const NamedContext>(std::move(context));
  MutexLock files(files_mu_);
  {
    MutexLock lock(mu_);
    KVASIR_RETURN_IF_ERROR(CheckNew(*added));
  }
  KVASIR_RETURN_IF_ERROR(Save(*added, /*is_read=*/false));
  MutexLock lock(mu_);
  tokens_ += std::ssize(added->tokens);
  entries_[{added->tenant, added->name}] = {.context = added, .caller = std::move(caller)};
  to_read_.push_back(added);
  CountStates();
  changed_.NotifyAll();
  return Describe(*added, v1::CONTEXT_STATE_WAITING);
}

absl::Status Contexts::Save(const NamedContext& context, bool is_read) {
  if (!folder_.has_value()) return absl::OkStatus();
  v1::ContextRecord record;
  record.set_tenant(context.tenant);
  record.set_name(context.name);
  record.mutable_tokens()->Assign(context.tokens.begin(), context.tokens.end());
  *record.mutable_policy() = context.policy;
  record.set_created_at_unix_s(context.created_at_unix_s);
  record.set_is_read(is_read);
  return folder_->Save(record);
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
  told.set_processed_tokens(
      is_ready ? told.tokens() : static_cast<uint32_t>(entry.processed_tokens));
  if (entry.eta.has_value()) *told.mutable_eta() = *entry.eta;
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
  KVASIR_RETURN_IF_ERROR(Find(by.tenant, request.name()).status());
  if (folder_.has_value()) {
    int64_t bytes = 0;
    KVASIR_RETURN_IF_ERROR(folder_->Erase(by.tenant, request.name(), bytes));
  }
  std::shared_ptr<ReadSink> abandoned;
  {
    MutexLock lock(mu_);
    const auto it = entries_.find({by.tenant, request.name()});
    const std::shared_ptr<const NamedContext> context = it->second.context;
    tokens_ -= std::ssize(context->tokens);
    std::erase(to_read_, context);
    if (reading_ != nullptr && &reading_->context() == context.get()) abandoned = reading_;
    entries_.erase(it);
    CountStates();
  }
  if (abandoned != nullptr) abandoned->Abandon(absl::CancelledError("the context is deleted"));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const NamedContext>> Contexts::Find(const std::string& tenant,
                                                                   const std::string& name) const {
  MutexLock lock(mu_);
  KVASIR_ASSIGN_OR_RETURN(const Entry* entry, FindEntry(tenant, name));
  return entry->context;
}

absl::StatusOr<const Contexts::Entry*> Contexts::FindEntry(const std::string& tenant,
                                                           const std::string& name) const {
  const auto it = entries_.find({tenant, name});
  if (it != entries_.end()) return &it->second;
  return absl::NotFoundError(
      absl::StrCat("there is no context ", name, " of this tenant; create it, or list those that "
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
                          .failed = counts[v1::CONTEXT_STATE_FAILED]});
}

// --- reading ------------------------------------------------------------------------------------

void Contexts::RunReader() {
  for (;;) {
    std::optional<Ended> ended;
    std::optional<Entry> next;
    {
      MutexLock lock(mu_);
      while (!stopping_ && !ended_.has_value()) {
        const bool waits = reading_ == nullptr && !to_read_.empty();
        if (waits && clock_.Now() >= next_try_) break;
        if (waits) {
          clock_.Wait(mu_, changed_, next_try_);
        } else {
          changed_.Wait(mu_);
        }
      }
      if (stopping_) return;
      ended = std::exchange(ended_, std::nullopt);
      if (!ended.has_value()) {
        const std::shared_ptr<const NamedContext> context = to_read_.front();
        to_read_.pop_front();
        reading_ = std::make_shared<ReadSink>(*this, context);
        next = *EntryOf(*context);
      }
    }
    if (ended.has_value()) {
      TakeEnd(*ended);
    } else {
      Read(*next);
    }
  }
}

void Contexts::Read(const Entry& entry) {
  std::shared_ptr<ReadSink> sink;
  {
    MutexLock lock(mu_);
    sink = reading_;
  }
  const v1::GenerateRequest request = ReadRequestOf(*entry.context);
  engine_->Read(request,
                {.request_id = absl::StrCat("context-", entry.context->name, "-", ++reads_),
                 .caller = entry.caller,
                 .tenant = entry.context->tenant,
                 .arrived = clock_.Now()},
                sink);
}

void Contexts::OnProgress(const NamedContext& context, const v1::Progress& progress) {
  MutexLock lock(mu_);
  Entry* const entry = EntryOf(context);
  if (entry == nullptr) return;
  entry->state = v1::CONTEXT_STATE_READING;
  entry->processed_tokens = progress.processed_tokens();
  entry->eta.reset();
  if (progress.has_eta()) entry->eta = progress.eta();
  CountStates();
}

void Contexts::OnEnd(Ended ended) {
  MutexLock lock(mu_);
  ended_ = std::move(ended);
  changed_.NotifyAll();
}

// A read that was refused before it began is tried again: there is no group, or no room just now.
// One that began and failed may be the cause.
void Contexts::TakeEnd(const Ended& ended) {
  const bool is_passing = absl::IsUnavailable(ended.status) ||
                          proto::RetryDelay(ended.status).has_value();
  bool is_read = false;
  MutexLock files(files_mu_);
  {
    MutexLock lock(mu_);
    reading_ = nullptr;
    Entry* const entry = EntryOf(*ended.context);
    if (entry == nullptr) return;
    entry->eta.reset();
    if (ended.status.ok()) {
      entry->state = v1::CONTEXT_STATE_READY;
      pause_ = absl::ZeroDuration();
      is_read = true;
    } else if (is_passing && !ended.began) {
      to_read_.push_front(ended.context);
      pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
      next_try_ = After(clock_.Now(), pause_);
    } else {
      entry->state = v1::CONTEXT_STATE_FAILED;
      entry->reason = std::string(ended.status.message());
    }
    CountStates();
  }
  if (!is_read) return;
  const absl::Status saved = Save(*ended.context, /*is_read=*/true);
  if (!saved.ok()) spdlog::warn("{}", std::string(saved.message()));
}

}  // namespace kvasir::coordinator
