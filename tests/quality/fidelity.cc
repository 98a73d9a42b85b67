// Compares what sparse policies select with what a model attends to, on its own queries. Reads one
// job from standard input and prints JSON lines: one a policy, in their order (methods.h), then the
// facts (facts.h), if they are asked for, each with {"answer_tokens", "right"}: how many tokens of
// the answers there were and how many the model chooses itself.
//
//   {"model": folder, "threads": 2, "document": as documents.py prints it,
//    "policies": [SparsityPolicy, ...],
//    "facts": AttentionPolicy whose numbers they are about, or null}
//
// Called by fidelity.py.
#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/util/json_util.h"

#include "coordinator/tokenizer/tokenizer.h"
#include "kernels/base/status_macros.h"
#include "tests/quality/facts.h"
#include "tests/quality/methods.h"
#include "tests/quality/reference_model.h"
#include <nlohmann/json.hpp>

namespace kvasir::quality {
namespace {

using coordinator::Tokenizer;

struct Question {
  std::vector<int32_t> tokens;  // with the answer
  int64_t num_answer = 0;
};

struct Job {
  std::vector<int32_t> document;
  std::vector<Question> questions;
  std::vector<Method> methods;
  std::optional<Facts> facts;
};

absl::StatusOr<Method> ParseMethod(const nlohmann::json& json) {
  v1::SparsityPolicy policy;
  const auto status = google::protobuf::util::JsonStringToMessage(json.dump(), &policy);
  if (!status.ok()) return absl::InvalidArgumentError(status.ToString());
  return Method::Create(policy);
}

// A line end closes a token, so document and question may be encoded apart.
absl::StatusOr<Question> ParseQuestion(const nlohmann::json& json, const Tokenizer& tokenizer) {
  const std::string prompt = json.at("prompt").get<std::string>();
  const std::string answer = json.at("answer").get<std::string>();
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> asked,
                          tokenizer.Encode(prompt, {.add_special_tokens = false}));
  Question question;
  KVASIR_ASSIGN_OR_RETURN(question.tokens,
                          tokenizer.Encode(prompt + answer, {.add_special_tokens = false}));
  question.num_answer = std::ssize(question.tokens) - std::ssize(asked);
  return question;
}

absl::StatusOr<Job> ParseJob(const nlohmann::json& json) {
  Job job;
  KVASIR_ASSIGN_OR_RETURN(const auto tokenizer,
                          Tokenizer::Load(json.at("model").get<std::string>()));
  const nlohmann::json& document = json.at("document");
  const std::string text = document.at("text").get<std::string>();
  KVASIR_ASSIGN_OR_RETURN(job.document, tokenizer->Encode(text));
  for (const nlohmann::json& question : document.at("questions")) {
    KVASIR_ASSIGN_OR_RETURN(Question parsed, ParseQuestion(question, *tokenizer));
    job.questions.push_back(std::move(parsed));
  }
  for (const nlohmann::json& policy : json.at("policies")) {
    KVASIR_ASSIGN_OR_RETURN(Method method, ParseMethod(policy));
    job.methods.push_back(std::move(method));
  }
  if (const nlohmann::json& facts = json.at("facts"); !facts.is_null()) {
    job.facts.emplace(
        kernels::PolicyNumbers{.sink_tokens = facts.at("sink_tokens").get<int64_t>(),
                               .window_tokens = facts.at("window_tokens").get<int64_t>(),
                               .budget_tokens = facts.at("token_budget").get<int64_t>()});
  }
  return job;
}

absl::Status Run(const nlohmann::json& json) {
  KVASIR_ASSIGN_OR_RETURN(Job job, ParseJob(json));
  v1::ModelConfig config;
  config.set_model(json.at("model").get<std::string>());
  KVASIR_ASSIGN_OR_RETURN(
      const auto model,
      ReferenceModel::Load(config, {}, std::ssize(job.document), json.at("threads").get<int>()));
  KVASIR_RETURN_IF_ERROR(model->Read(job.document));
  int64_t right = 0, answer_tokens = 0;
  for (size_t i = 0; i < job.questions.size(); ++i) {
    const auto observe = [&](const kernels::SelectParams& params) -> absl::Status {
      const LayerAttention truth(params, model->executor());
      for (Method& method : job.methods) {
        KVASIR_RETURN_IF_ERROR(method.Compare(params, truth, model->executor()));
      }
      if (job.facts) job.facts->Add(truth);
      if (job.facts && i == 0) job.facts->AddBits(truth, model->executor());
      return absl::OkStatus();
    };
    const Question& question = job.questions[i];
    KVASIR_ASSIGN_OR_RETURN(const int64_t chosen,
                            model->Answer(question.tokens, question.num_answer, observe));
    right += chosen;
    answer_tokens += question.num_answer;
  }
  const auto print = [&](nlohmann::json line) {
    line["answer_tokens"] = answer_tokens;
    line["right"] = right;
    std::cout << line << "\n";
  };
  for (const Method& method : job.methods) print(method.ToJson());
  if (job.facts) print(job.facts->ToJson());
  return absl::OkStatus();
}

int Main() {
  const nlohmann::json job = nlohmann::json::parse(std::cin);
  const absl::Status status = Run(job);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}

}  // namespace
}  // namespace kvasir::quality

int main() { return kvasir::quality::Main(); }
