// The request that `kvasir generate` makes of its flags, and the summary that it prints.
#include <map>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "coordinator/cli/generate_command.h"
#include "proto/load_config.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Bug: the summary said "unknown (not sampled)" in all of these cases.
TEST(FinishSummaryTest, SaysWhyMassWasNotMeasured) {
  std::set<std::string> told;
  for (int why = v1::MassUnmeasured_MIN; why <= v1::MassUnmeasured_MAX; ++why) {
    v1::Finish finish;
    finish.mutable_attention()->set_decode_mass_unmeasured(static_cast<v1::MassUnmeasured>(why));
    told.insert(FinishSummary(finish));
  }
  EXPECT_EQ(told.size(), static_cast<size_t>(v1::MassUnmeasured_ARRAYSIZE));
}

TEST(FinishSummaryTest, TellsMassesApartByPhaseAndBySource) {
  v1::Finish finish;
  v1::AttentionReport& attention = *finish.mutable_attention();
  attention.set_prefill_mass_unmeasured(v1::MASS_UNMEASURED_DENSE);
  attention.mutable_decode_measured_mass()->set_mean(0.25f);
  attention.mutable_decode_measured_mass()->set_samples(1200);
  EXPECT_THAT(
      FinishSummary(finish),
      HasSubstr("  attention mass kept      prefill: all: this part of the policy attends to "
                "everything\n"
                "                           decode: mean 0.2500, p1 0.000, min 0.0000 (1,200 "
                "samples, measured)\n"));
  EXPECT_THAT(FinishSummary(finish), Not(HasSubstr("estimated")));
  attention.mutable_estimated_mass()->set_mean(0.5f);
  EXPECT_THAT(FinishSummary(finish), HasSubstr("decode: mean 0.5000, p1 0.000, min 0.0000 "
                                               "(0 samples, estimated)\n"));
}

// Every sampling field of the API, and what says how text becomes tokens, is a flag of its name.
TEST(MakeGenerateRequestTest, EveryFieldOfTheApiIsAFlag) {
  const std::map<std::string, std::string> values = {{"stop-token-ids", "5,17"},
                                                     {"logit-bias", "5=-100,17=2.5"},
                                                     {"stop", "x"},
                                                     {"temperature", "0.5"},
                                                     {"top-p", "0.25"},
                                                     {"repetition-penalty", "2"}};
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  const auto* sampling = v1::SamplingParams::descriptor();
  for (int i = 0; i < sampling->field_count(); ++i) fields.push_back(sampling->field(i));
  for (const char* name : {"add_special_tokens", "parse_special_tokens", "request_id"}) {
    fields.push_back(v1::GenerateRequest::descriptor()->FindFieldByName(name));
  }
  proto::ConfigSources sources = {.args = {}, .getenv = [](const char*) { return nullptr; }};
  for (const auto* field : fields) {
    const std::string flag = absl::StrReplaceAll(field->name(), {{"_", "-"}});
    const bool is_switch = field->cpp_type() == field->CPPTYPE_BOOL;
    const auto value = values.find(flag);
    sources.args.push_back(absl::StrCat("--", flag, "=",
                                        value != values.end() ? value->second
                                        : is_switch           ? "true"
                                                              : "1"));
  }
  v1::GenerateCommandConfig config;
  const auto loaded = proto::LoadConfig(sources, config);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto request = MakeGenerateRequest(config, "prompt");
  ASSERT_TRUE(request.ok()) << request.status();
  for (const auto* field : fields) {
    const google::protobuf::Message& holder =
        field->containing_type() == sampling
            ? static_cast<const google::protobuf::Message&>(request->sampling())
            : *request;
    const bool is_set = field->is_repeated() ? holder.GetReflection()->FieldSize(holder, field) > 0
                                             : holder.GetReflection()->HasField(holder, field);
    EXPECT_TRUE(is_set) << field->name();
  }
  EXPECT_THAT(request->sampling().stop_token_ids(), ::testing::ElementsAre(5u, 17u));
  EXPECT_EQ(request->sampling().logit_bias(1).bias(), 2.5f);
  EXPECT_EQ(request->sampling().temperature(), 0.5f);
}

TEST(MakeGenerateRequestTest, ListsThatCannotBeParsedAreNamed) {
  v1::GenerateCommandConfig config;
  config.set_logit_bias("5=-100,17");
  EXPECT_THAT(MakeGenerateRequest(config, "p").status().message(),
              HasSubstr("--logit-bias has '17'"));
  config.clear_logit_bias();
  config.set_stop_token_ids("5,x");
  EXPECT_THAT(MakeGenerateRequest(config, "p").status().message(),
              HasSubstr("--stop-token-ids has 'x'"));
}

}  // namespace
}  // namespace kvasir::coordinator
