#include "coordinator/cli/bench_prompts.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "grpcpp/client_context.h"
#include "nlohmann/json.hpp"

#include "coordinator/cli/calls/connect.h"
#include "kernels/base/status_macros.h"
#include "proto/grpc_status.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

absl::Status NotDocuments(const std::string& path, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("--documents ", path, " ", what,
                   "; it must hold what tests/model/documents.py --format json writes"));
}

absl::Status AddPrompts(const std::string& path, const json& document,
                        std::vector<std::string>& prompts) {
  const auto text = document.find("text");
  const auto questions = document.find("questions");
  if (text == document.end() || !text->is_string() || questions == document.end() ||
      !questions->is_array() || questions->empty()) {
    return NotDocuments(path, "has a document without text or questions");
  }
  for (const json& question : *questions) {
    const auto prompt = question.find("prompt");
    if (prompt == question.end() || !prompt->is_string()) {
      return NotDocuments(path, "has a question without a prompt");
    }
    prompts.push_back(
        absl::StrCat(text->get_ref<const std::string&>(), prompt->get_ref<const std::string&>()));
  }
  return absl::OkStatus();
}

}  // namespace

std::string RandomText(int64_t bytes, uint64_t seed) {
  constexpr absl::string_view kConsonants = "bdfghklmnprstvwz";
  constexpr absl::string_view kVowels = "aeiou";
  std::mt19937_64 random(seed);
  std::string text;
  while (static_cast<int64_t>(text.size()) < bytes) {
    const uint64_t bits = random();
    const int syllables = 1 + static_cast<int>(bits % 3);
    for (int i = 0; i < syllables; ++i) {
      text.push_back(kConsonants[(bits >> (8 + 8 * i)) % kConsonants.size()]);
      text.push_back(kVowels[(bits >> (12 + 8 * i)) % kVowels.size()]);
    }
    text.push_back(bits % 11 == 0 ? '\n' : ' ');
  }
  return text;
}

absl::StatusOr<std::vector<uint32_t>> RandomTokens(v1::Generation::Stub& stub, int64_t num_tokens,
                                                   uint64_t seed, absl::Duration timeout) {
  // A token has at least one byte, most have more: make the text longer until it is enough.
  for (int64_t bytes = 4 * num_tokens + 64;; bytes *= 2) {
    v1::TokenizeRequest request;
    request.set_text(RandomText(bytes, seed));
    v1::TokenizeResponse response;
    grpc::ClientContext context;
    SetTimeout(timeout, context);
    KVASIR_RETURN_IF_ERROR(proto::FromGrpcStatus(stub.Tokenize(&context, request, &response)));
    if (response.token_ids_size() < num_tokens) continue;
    return std::vector<uint32_t>(response.token_ids().begin(),
                                 response.token_ids().begin() + num_tokens);
  }
}

absl::StatusOr<std::vector<std::string>> DocumentPrompts(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(const std::string text, proto::ReadTextFile("--documents", path));
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object() && !parsed.is_array()) return NotDocuments(path, "is not JSON");
  const json documents = parsed.is_array() ? parsed : json::array({parsed});
  std::vector<std::string> prompts;
  for (const json& document : documents) {
    KVASIR_RETURN_IF_ERROR(AddPrompts(path, document, prompts));
  }
  if (prompts.empty()) return NotDocuments(path, "holds no document");
  return prompts;
}

}  // namespace kvasir::coordinator
