#include "coordinator/http/requests/generate_fields.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "google/protobuf/util/json_util.h"

#include "coordinator/http/transport/error_reply.h"

namespace kvasir::coordinator {
namespace {

using nlohmann::json;

constexpr size_t kMostStopIds = 256;

void ReadStops(JsonFields& fields, v1::SamplingParams& sampling) {
  constexpr char kExpected[] = "expected a string or a list of strings";
  if (const json* stop = fields.Find("stop"); stop != nullptr) {
    if (stop->is_string()) {
      sampling.add_stop(stop->get_ref<const std::string&>());
    } else if (!stop->is_array()) {
      fields.Refuse("stop", kExpected);
    } else {
      for (const json& element : *stop) {
        if (!element.is_string()) return fields.Refuse("stop", kExpected);
        sampling.add_stop(element.get_ref<const std::string&>());
      }
    }
  }
  for (const uint32_t id : fields.Ids("stop_token_ids", kMostStopIds)) {
    sampling.add_stop_token_ids(id);
  }
}

void ReadLogitBias(JsonFields& fields, v1::SamplingParams& sampling) {
  const json* biases = fields.Find("logit_bias");
  if (biases == nullptr) return;
  constexpr char kExpected[] = "expected an object of token ids and numbers";
  if (!biases->is_object()) return fields.Refuse("logit_bias", kExpected);
  for (const auto& [token, bias] : biases->items()) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(token, &id) || !bias.is_number()) {
      return fields.Refuse("logit_bias", kExpected);
    }
    v1::LogitBias& added = *sampling.add_logit_bias();
    added.set_token_id(id);
    added.set_bias(bias.get<float>());
  }
}

void ReadSampling(JsonFields& fields, v1::SamplingParams& sampling) {
  if (const auto value = fields.Number("temperature")) {
    sampling.set_temperature(static_cast<float>(*value));
  }
  if (const auto value = fields.Number("top_p")) sampling.set_top_p(static_cast<float>(*value));
  if (const auto value = fields.Integer("top_k", -1, std::numeric_limits<int32_t>::max())) {
    sampling.set_top_k(static_cast<uint32_t>(std::max<int64_t>(*value, 0)));  // -1 is off, too
  }
  if (const auto value = fields.Number("min_p")) sampling.set_min_p(static_cast<float>(*value));
  if (const auto value = fields.Number("frequency_penalty")) {
    sampling.set_frequency_penalty(static_cast<float>(*value));
  }
  if (const auto value = fields.Number("presence_penalty")) {
    sampling.set_presence_penalty(static_cast<float>(*value));
  }
  if (const auto value = fields.Number("repetition_penalty")) {
    sampling.set_repetition_penalty(static_cast<float>(*value));
  }
  if (const auto value = fields.Count("min_tokens")) sampling.set_min_tokens(*value);
  if (const auto value = fields.Bool("skip_special_tokens")) {
    sampling.set_skip_special_tokens(*value);
  }
  if (const auto value = fields.Bool("ignore_eos")) sampling.set_ignore_eos(*value);
  if (const auto value = fields.Bool("include_stop_str_in_output")) {
    sampling.set_include_stop_str_in_output(*value);
  }
  if (const auto value = fields.Integer("seed", std::numeric_limits<int64_t>::min(),
                                        std::numeric_limits<int64_t>::max())) {
    sampling.set_seed(static_cast<uint64_t>(*value));
  }
  ReadStops(fields, sampling);
  ReadLogitBias(fields, sampling);
}

// "sparsity" is the name of a policy, or a PolicyChoice; "quality" the least share of attention
// mass.
void ReadPolicy(JsonFields& fields, v1::PolicyChoice& policy) {
  if (const json* sparsity = fields.Find("sparsity"); sparsity != nullptr) {
    if (sparsity->is_string()) {
      policy.set_name(sparsity->get<std::string>());
    } else if (!sparsity->is_object() ||
               !google::protobuf::util::JsonStringToMessage(
                    sparsity->dump(-1, ' ', true, json::error_handler_t::replace), &policy)
                    .ok()) {
      fields.Refuse("sparsity",
                    "expected the name of a policy, or an object with name, prefill_overrides and "
                    "decode_overrides as PolicyChoice in sparsity.proto has them");
    }
  }
  if (const auto quality = fields.Number("quality")) {
    policy.mutable_decode_overrides()->mutable_quality()->set_min_mass(
        static_cast<float>(*quality));
  }
}

}  // namespace

void ReadGenerateFields(JsonFields& fields, v1::GenerateRequest& request) {
  ReadSampling(fields, *request.mutable_sampling());
  ReadPolicy(fields, *request.mutable_policy());
  // Prefixes are shared only among requests with the same salt.
  if (const auto salt = fields.String("cache_salt")) request.set_tenant_id(*salt);
  if (const auto name = fields.String("context")) request.set_context(*name);
  if (fields.Bool("use_beam_search").value_or(false)) {
    fields.Refuse("use_beam_search", "beam search is not served; drop it");
  }
}

AnswerOptions ReadAnswerOptions(JsonFields& fields) {
  AnswerOptions options;
  options.stream = fields.Bool("stream").value_or(false);
  options.n = fields.Integer("n", 1, kMostChoices).value_or(1);
  if (fields.Integer("best_of", 1, kMostChoices).value_or(options.n) != options.n) {
    fields.Refuse("best_of", "expected the number of n: the best of several are not chosen");
  }
  if (const json* stream = fields.Find("stream_options"); stream != nullptr) {
    if (!stream->is_object()) {
      fields.Refuse("stream_options", "expected an object");
      return options;
    }
    JsonFields stream_fields(*stream, "stream_options");
    options.include_usage = stream_fields.Bool("include_usage").value_or(false);
    options.continuous_usage = stream_fields.Bool("continuous_usage_stats").value_or(false);
    options.event_ids = stream_fields.Bool("event_ids").value_or(false);
    fields.Keep(stream_fields.status());
  }
  return options;
}

absl::Status InHttpWords(const absl::Status& status, absl::string_view prompt_field) {
  if (!absl::IsInvalidArgument(status)) return status;
  std::string message =
      absl::StrReplaceAll(status.message(), {{"sampling.", ""}, {"token_ids.ids", prompt_field}});
  if (absl::string_view rest = message; absl::ConsumePrefix(&rest, "text: ")) {
    message = absl::StrCat(prompt_field, ": ", rest);
  }
  const size_t end = static_cast<size_t>(
      std::find_if(
          message.begin(), message.end(),
          [](char c) { return !absl::ascii_isalnum(static_cast<unsigned char>(c)) && c != '_'; }) -
      message.begin());
  const std::string field = message.substr(0, end);
  const absl::string_view rest = absl::string_view(message).substr(end);
  const bool names_field = absl::StartsWith(rest, " is ") || absl::StartsWith(rest, " has ") ||
                           absl::StartsWith(rest, " names ") || absl::StartsWith(rest, "[") ||
                           absl::StartsWith(rest, ":");
  absl::Status said = absl::InvalidArgumentError(message);
  return names_field && field != "the" ? AboutField(said, field) : said;
}

}  // namespace kvasir::coordinator
