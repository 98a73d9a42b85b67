#include "coordinator/security/api_keys_file.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sys/stat.h>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "yaml-cpp/yaml.h"

#include "kernels/base/status_macros.h"
#include "openssl/sha.h"
#include "proto/text_file.h"

namespace kvasir::coordinator {
namespace {

constexpr size_t kMostKeys = 10'000;
constexpr size_t kMostTenantBytes = 64;  // leaves room for a part within 128
constexpr size_t kMostNameBytes = 128;
constexpr double kMostKvGb = 1'000'000;

bool IsWord(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

bool IsSha256(const std::string& text) {
  return text.size() == 2 * SHA256_DIGEST_LENGTH &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return absl::ascii_isxdigit(c); });
}

// The limit that a field in GB sets; null: there is no such field.
int64_t* SizeOf(const std::string& field, CallerLimits& limits) {
  if (field == "kv-size-gb") return &limits.kv_bytes;
  if (field == "pin-host-gb") return &limits.pinned_host_bytes;
  return field == "pin-disk-gb" ? &limits.pinned_disk_bytes : nullptr;
}

// The limit that a field without a unit sets; null: there is no such field.
uint64_t* CountOf(const std::string& field, CallerLimits& limits) {
  if (field == "tokens-per-minute") return &limits.tokens_per_minute;
  if (field == "contexts") return &limits.contexts;
  return field == "context-tokens" ? &limits.context_tokens : nullptr;
}

absl::Status ReadField(const std::string& field, const YAML::Node& value, ApiKeyEntry& key) {
  const auto expected = [&](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat(field, " must be ", what...));
  };
  constexpr char kWord[] = " letters, digits, '.', '_' and '-'";
  if (field == "name") {
    key.name = value.as<std::string>();
    if (!IsWord(key.name) || key.name.size() > kMostNameBytes) {
      return expected("1 to ", kMostNameBytes, kWord);
    }
  } else if (field == "tenant") {
    key.tenant = value.as<std::string>();
    if (!IsWord(key.tenant) || key.tenant.size() > kMostTenantBytes) {
      return expected("1 to ", kMostTenantBytes, kWord);
    }
  } else if (field == "sha256") {
    const auto text = value.as<std::string>();
    if (!IsSha256(text)) return expected("64 hexadecimal digits");
    key.sha256 = absl::HexStringToBytes(text);
  } else if (field == "concurrent-requests") {
    key.limits.concurrent_requests = value.as<uint32_t>();
    if (key.limits.concurrent_requests == 0) return expected("at least 1");
  } else if (uint64_t* const count = CountOf(field, key.limits); count != nullptr) {
    *count = value.as<uint64_t>();
    if (*count == 0) return expected("at least 1");
  } else if (int64_t* const bytes = SizeOf(field, key.limits); bytes != nullptr) {
    const auto size = value.as<double>();
    *bytes = size > 0 && size <= kMostKvGb ? std::llround(size * 1e9) : 0;
    if (*bytes == 0) return expected("above 0 and at most ", kMostKvGb);
  } else {
    return absl::InvalidArgumentError(absl::StrCat("there is no field ", field));
  }
  return absl::OkStatus();
}

absl::StatusOr<ApiKeyEntry> ReadKey(const YAML::Node& node) {
  ApiKeyEntry key;
  for (const auto& field : node) {
    KVASIR_RETURN_IF_ERROR(ReadField(field.first.as<std::string>(), field.second, key));
  }
  if (key.name.empty() || key.sha256.empty() || key.tenant.empty()) {
    return absl::InvalidArgumentError("name, sha256 and tenant are needed");
  }
  return key;
}

absl::StatusOr<std::vector<ApiKeyEntry>> ReadList(const YAML::Node& file) {
  const YAML::Node list = file["keys"];
  if (!list || !list.IsSequence() || file.size() != 1) {
    return absl::InvalidArgumentError("it must hold a list 'keys' and nothing else");
  }
  if (list.size() > kMostKeys) {
    return absl::InvalidArgumentError(absl::StrCat(list.size(), " keys; at most ", kMostKeys));
  }
  std::vector<ApiKeyEntry> keys;
  std::set<std::string> names;
  std::set<std::string> hashes;
  for (size_t i = 0; i < list.size(); ++i) {
    absl::StatusOr<ApiKeyEntry> key = ReadKey(list[i]);
    const auto bad = [&](absl::string_view why) {
      return absl::InvalidArgumentError(absl::StrCat("key ", i + 1, ": ", why));
    };
    if (!key.ok()) return bad(key.status().message());
    if (!names.insert(key->name).second) return bad(absl::StrCat(key->name, " is there twice"));
    if (!hashes.insert(key->sha256).second) return bad("its sha256 is there twice");
    keys.push_back(*std::move(key));
  }
  return keys;
}

}  // namespace

absl::StatusOr<std::vector<ApiKeyEntry>> ReadApiKeys(const std::string& path) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("--api-keys-file ", path, ": ", why));
  };
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return bad("it cannot be read");
  if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) return bad("others may write it; chmod go-w it");
  KVASIR_ASSIGN_OR_RETURN(const std::string text, proto::ReadTextFile("--api-keys-file", path));
  try {
    absl::StatusOr<std::vector<ApiKeyEntry>> keys = ReadList(YAML::Load(text));
    return keys.ok() ? std::move(keys) : bad(keys.status().message());
  } catch (const YAML::Exception& error) {
    return bad(error.what());
  }
}

}  // namespace kvasir::coordinator
