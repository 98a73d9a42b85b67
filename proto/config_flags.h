// The fields of a configuration as flags: their names, accepted values, texts, and setting one from
// a text. Internal to load_config.cc, which reads files, environment and arguments, and completion.cc.
// Thread-compatible.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::proto {

// One settable field: the flag's name, its schema and the message that holds it.
struct Flag {
  std::string name;   // "max-model-len"
  std::string group;  // "scheduler"; empty for fields of the top message
  const google::protobuf::FieldDescriptor* field = nullptr;
  google::protobuf::Message* holder = nullptr;

  const v1::FlagOptions& options() const { return field->options().GetExtension(v1::flag); }
};

std::vector<Flag> FlagsOf(google::protobuf::Message& message);
std::string VariableName(const google::protobuf::FieldDescriptor& field);
bool IsBool(const Flag& flag);
// Returns the accepted values of a text; empty: any.
std::vector<std::string> Choices(const v1::FlagOptions& options);
// Returns "[64, 1048576] tokens"; empty when there is no limit.
std::string RangeText(const v1::FlagOptions& options);
absl::Status BadValue(const Flag& flag, absl::string_view value, absl::string_view expected);
absl::Status SetValue(const Flag& flag, absl::string_view value);
// A flag that is not set and has no default has no text.
bool HasText(const Flag& flag);
std::vector<std::string> RepeatedStrings(const Flag& flag);
// REQUIRES: HasText, and the flag is not repeated.
std::string ValueText(const Flag& flag);

}  // namespace kvasir::proto
