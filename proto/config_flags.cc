#include "proto/config_flags.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

#include "kernels/base/status_macros.h"
#include "proto/kvasir/v1/sparsity.pb.h"

namespace kvasir::proto {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

namespace {

void CollectFlags(Message& message, const std::string& group, std::vector<Flag>& flags) {
  const Descriptor& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor* field = descriptor.field(i);
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      CollectFlags(*message.GetReflection()->MutableMessage(&message, field), field->name(), flags);
    } else {
      flags.push_back({.name = absl::StrReplaceAll(field->name(), {{"_", "-"}}),
                       .group = group,
                       .field = field,
                       .holder = &message});
    }
  }
}

}  // namespace

std::vector<Flag> FlagsOf(Message& message) {
  std::vector<Flag> flags;
  CollectFlags(message, "", flags);
  return flags;
}

std::string VariableName(const FieldDescriptor& field) {
  return absl::StrCat("KVASIR_", absl::AsciiStrToUpper(field.name()));
}

bool IsBool(const Flag& flag) { return flag.field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL; }

std::vector<std::string> Choices(const v1::FlagOptions& options) {
  std::vector<std::string> choices(options.choices().begin(), options.choices().end());
  const auto* methods = v1::AttentionPolicy::descriptor()->FindOneofByName(options.methods());
  for (int i = 0; methods != nullptr && i < methods->field_count(); ++i) {
    choices.push_back(methods->field(i)->name());
  }
  return choices;
}

std::string RangeText(const v1::FlagOptions& options) {
  std::string text;
  if (options.has_min() || options.has_max()) {
    const std::string low = options.has_min() ? absl::StrCat(options.min()) : "";
    const std::string high =
        options.has_max() ? absl::StrCat(static_cast<int64_t>(options.max())) : "";
    text = absl::StrCat("[", low.empty() ? "0" : low, ", ", high.empty() ? "..." : high, "]");
  }
  const std::vector<std::string> choices = Choices(options);
  if (!choices.empty()) text = absl::StrJoin(choices, "|");
  if (!options.unit().empty()) absl::StrAppend(&text, text.empty() ? "" : " ", options.unit());
  return text;
}

absl::Status BadValue(const Flag& flag, absl::string_view value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag.name, " is '", value, "', expected ", expected));
}

namespace {

absl::Status CheckRange(const Flag& flag, double number, absl::string_view value) {
  const v1::FlagOptions& options = flag.options();
  const bool in_range = std::isfinite(number) && (!options.has_min() || number >= options.min()) &&
                        (!options.has_max() || number <= options.max());
  return in_range ? absl::OkStatus() : BadValue(flag, value, RangeText(options));
}

absl::Status SetUnsigned(const Flag& flag, absl::string_view value) {
  uint64_t number = 0;
  const bool is_32_bits = flag.field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
  const uint64_t limit =
      is_32_bits ? std::numeric_limits<uint32_t>::max() : std::numeric_limits<uint64_t>::max();
  if (!absl::SimpleAtoi(value, &number) || number > limit) {
    return BadValue(flag, value, "a whole number");
  }
  KVASIR_RETURN_IF_ERROR(CheckRange(flag, static_cast<double>(number), value));
  if (is_32_bits) {
    flag.holder->GetReflection()->SetUInt32(flag.holder, flag.field, static_cast<uint32_t>(number));
  } else {
    flag.holder->GetReflection()->SetUInt64(flag.holder, flag.field, number);
  }
  return absl::OkStatus();
}

absl::Status SetDouble(const Flag& flag, absl::string_view value) {
  double number = 0;
  if (!absl::SimpleAtod(value, &number)) return BadValue(flag, value, "a number");
  KVASIR_RETURN_IF_ERROR(CheckRange(flag, number, value));
  flag.holder->GetReflection()->SetDouble(flag.holder, flag.field, number);
  return absl::OkStatus();
}

absl::Status SetBool(const Flag& flag, absl::string_view value) {
  bool on = false;
  if (!absl::SimpleAtob(value, &on)) return BadValue(flag, value, "true or false");
  flag.holder->GetReflection()->SetBool(flag.holder, flag.field, on);
  return absl::OkStatus();
}

// A repeated flag takes one value each time it is given.
absl::Status SetString(const Flag& flag, absl::string_view value) {
  const std::vector<std::string> choices = Choices(flag.options());
  const std::string text(value);
  if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
    return BadValue(flag, value, absl::StrCat("one of ", absl::StrJoin(choices, ", ")));
  }
  const auto* reflection = flag.holder->GetReflection();
  if (flag.field->is_repeated()) {
    reflection->AddString(flag.holder, flag.field, text);
  } else {
    reflection->SetString(flag.holder, flag.field, text);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SetValue(const Flag& flag, absl::string_view value) {
  switch (flag.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return SetUnsigned(flag, value);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return SetDouble(flag, value);
    case FieldDescriptor::CPPTYPE_BOOL:
      return SetBool(flag, value);
    case FieldDescriptor::CPPTYPE_STRING:
      return SetString(flag, value);
    default:
      return absl::InternalError(absl::StrCat("config.proto: field ", flag.field->full_name(),
                                              " has a type that flags cannot set"));
  }
}

bool HasText(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  if (flag.field->is_repeated()) return reflection->FieldSize(*flag.holder, flag.field) > 0;
  return !flag.field->has_presence() || reflection->HasField(*flag.holder, flag.field);
}

std::vector<std::string> RepeatedStrings(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  std::vector<std::string> values;
  for (int i = 0; i < reflection->FieldSize(*flag.holder, flag.field); ++i) {
    values.push_back(reflection->GetRepeatedString(*flag.holder, flag.field, i));
  }
  return values;
}

std::string ValueText(const Flag& flag) {
  const auto* reflection = flag.holder->GetReflection();
  switch (flag.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(reflection->GetUInt32(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection->GetUInt64(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrCat(reflection->GetDouble(*flag.holder, flag.field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(*flag.holder, flag.field) ? "true" : "false";
    default:
      return reflection->GetString(*flag.holder, flag.field);
  }
}

}  // namespace kvasir::proto
