#include "coordinator/cli/chat_command.h"

#include <iostream>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

#include "coordinator/cli/calls/connect.h"
#include "coordinator/cli/check_text.h"
#include "coordinator/cli/terminal/interrupt_watch.h"
#include "kernels/base/status_macros.h"
#include "proto/finish_numbers.h"
#include "proto/grpc_status.h"
#include "proto/kvasir/v1/generation.grpc.pb.h"

namespace kvasir::coordinator {
namespace {

constexpr char kPrompt[] = "> ";
constexpr char kHelp[] =
    "  /system TEXT   a new system message; without TEXT: none\n"
    "  /policy NAME   answers under this policy; without NAME: lists them\n"
    "  /context       tokens of the conversation, and how many the server had cached\n"
    "  /clear         forgets the conversation\n"
    "  /help          this list\n"
    "  /quit          ends; so does Ctrl-D. Ctrl-C stops an answer\n";

nlohmann::ordered_json Message(absl::string_view role, absl::string_view text) {
  return {{"role", std::string(role)}, {"content", std::string(text)}};
}

class Chat {
 public:
  Chat(const v1::ChatCommandConfig& config, const std::shared_ptr<grpc::Channel>& channel,
       InterruptWatch* interrupts)
      : config_(config),
        interrupts_(interrupts),
        stub_(v1::Generation::NewStub(channel)),
        policy_(config.policy()) {
    system_ = config.system();
  }

  absl::Status Run() {
    KVASIR_RETURN_IF_ERROR(AskModelInfo());
    Say(absl::StrCat(model_.served_model_name(), ", ", model_.max_context_length(),
                     " tokens. /help lists the commands.\n"));
    std::string line;
    while (!quits_) {
      Say(kPrompt);
      if (!std::getline(std::cin, line)) break;
      const absl::Status status = Take(std::string(absl::StripAsciiWhitespace(line)));
      if (status.ok()) continue;
      if (interrupts_ == nullptr) return status;
      Say(absl::StrCat(status.message(), "\n"));
    }
    return absl::OkStatus();
  }

 private:
  // Speaks to a person; nothing in a pipe.
  void Say(absl::string_view text) const {
    if (interrupts_ != nullptr) std::cerr << text << std::flush;
  }

  absl::Status AskModelInfo() {
    grpc::ClientContext context;
    SetTimeout(absl::Seconds(config_.timeout()), context);
    return proto::FromGrpcStatus(stub_->GetModelInfo(&context, {}, &model_));
  }

  absl::Status Take(const std::string& line) {
    if (line.empty()) return absl::OkStatus();
    KVASIR_RETURN_IF_ERROR(CheckUtf8("the message", line));
    return line[0] == '/' ? TakeCommand(line) : Ask(line);
  }

  absl::Status TakeCommand(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string text(space == std::string::npos
                               ? absl::string_view()
                               : absl::StripAsciiWhitespace(line.substr(space)));
    if (name == "/policy") return TakePolicy(text);
    if (name == "/system") {
      system_ = text;
    } else if (name == "/context") {
      std::cerr << context_ << std::flush;
    } else if (name == "/clear") {
      messages_.clear();
      context_ = kNoContext;
    } else if (name == "/help") {
      std::cerr << kHelp << std::flush;
    } else if (name == "/quit") {
      quits_ = true;
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no command ", name, "; /help lists them"));
    }
    return absl::OkStatus();
  }

  absl::Status TakePolicy(const std::string& name) {
    std::string names;
    for (const v1::SparsityPolicy& policy : model_.policies()) {
      if (policy.name() == name) {
        policy_ = name;
        return absl::OkStatus();
      }
      absl::StrAppend(&names, names.empty() ? "" : ", ", policy.name());
    }
    if (!name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("there is no policy ", name, "; use ", names));
    }
    std::cerr << "policies: " << names << "\n" << std::flush;
    return absl::OkStatus();
  }

  v1::GenerateRequest MakeRequest() const {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    if (!system_.empty()) all.push_back(Message("system", system_));
    for (const nlohmann::ordered_json& message : messages_) all.push_back(message);
    v1::GenerateRequest request;
    request.mutable_chat()->set_messages(all.dump());
    request.set_tenant_id(config_.tenant());
    request.mutable_policy()->set_name(policy_);
    request.set_context(config_.context());
    v1::SamplingParams& sampling = *request.mutable_sampling();
    sampling.set_max_tokens(config_.max_tokens());
    sampling.set_temperature(static_cast<float>(config_.temperature()));
    sampling.set_top_p(static_cast<float>(config_.top_p()));
    if (config_.has_seed()) sampling.set_seed(config_.seed());
    return request;
  }

  // Asks and shows the answer. An answer that was stopped stays in the conversation as far as it
  // was shown; after an error the question is taken back.
  absl::Status Ask(const std::string& text) {
    messages_.push_back(Message("user", text));
    const v1::GenerateRequest request = MakeRequest();
    std::string answer;
    absl::Status status = CheckSize(request);
    if (status.ok()) status = ReadAnswer(request, &answer);
    const bool stopped = absl::IsCancelled(status) && interrupts_ != nullptr;
    if (status.ok() || stopped) {
      messages_.push_back(Message("assistant", answer));
      std::cout << std::endl;
      return absl::OkStatus();
    }
    messages_.pop_back();
    return status;
  }

  absl::Status ReadAnswer(const v1::GenerateRequest& request, std::string* answer) {
    grpc::ClientContext context;
    SetTimeout(absl::Seconds(config_.timeout()), context);
    const auto reader = stub_->Generate(&context, request);
    if (interrupts_ != nullptr) interrupts_->SetCall(&context);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.has_tokens()) {
        *answer += response.tokens().text();
        std::cout << response.tokens().text() << std::flush;
      } else if (response.has_finish()) {
        TakeFinish(response.finish());
      }
    }
    if (interrupts_ != nullptr) interrupts_->SetCall(nullptr);
    return proto::FromGrpcStatus(reader->Finish());
  }

  void TakeFinish(const v1::Finish& finish) {
    const v1::Usage& usage = finish.usage();
    context_ =
        absl::StrFormat("%d of %d tokens: %d read, of which %d were cached, and %d answered\n",
                        usage.prompt_tokens() + usage.completion_tokens(),
                        model_.max_context_length(), usage.prompt_tokens(),
                        proto::TokensOfAllTiers(usage.cached_tokens()), usage.completion_tokens());
    if (finish.reason() == v1::FINISH_REASON_LENGTH) {
      Say("\n[the answer reached --max-tokens or the end of the context]");
    }
  }

  static constexpr char kNoContext[] = "nothing has been said\n";

  const v1::ChatCommandConfig& config_;
  InterruptWatch* const interrupts_;  // null: standard input is no terminal
  const std::unique_ptr<v1::Generation::Stub> stub_;
  v1::GetModelInfoResponse model_;
  std::string system_;
  std::vector<nlohmann::ordered_json> messages_;  // without the system's
  std::string policy_;
  std::string context_ = kNoContext;
  bool quits_ = false;
};

}  // namespace

absl::Status RunChat(const v1::ChatCommandConfig& config) {
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--system", config.system()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--tenant", config.tenant()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--policy", config.policy()));
  KVASIR_RETURN_IF_ERROR(CheckUtf8("--context", config.context()));
  // In a pipe Ctrl-C ends the program, as it ends others.
  std::unique_ptr<InterruptWatch> interrupts;
  if (isatty(STDIN_FILENO) != 0) {
    interrupts = std::make_unique<InterruptWatch>([] {
      std::cerr << "\n(/quit or Ctrl-D ends)\n" << kPrompt << std::flush;
    });
  }
  // After the watch, which Ctrl-C must reach and not a thread of the channel.
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel,
                          Connect(config.server(), config.api_key_file(), config.tls()));
  return Chat(config, channel, interrupts.get()).Run();
}

}  // namespace kvasir::coordinator
