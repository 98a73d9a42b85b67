// The log of a process: lines on standard output, as text or as JSON, with the time in UTC, the
// process and, once it is known, its rank. It hides spdlog's loggers and the thread that writes, so
// that a reader who does not take the lines holds up nobody: when kMostWaiting lines wait the
// oldest gives way. A line has no control characters and, as JSON, is valid whatever its texts
// hold. Started by each server's main; everything else logs by spdlog::info and the like, or by
// LogEvent. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "spdlog/common.h"

#include "proto/kvasir/v1/config.pb.h"

namespace kvasir::proto {

class Logs {
 public:
  static constexpr size_t kMostWaiting = 8192;  // lines

  // From now on spdlog's default logger is this one. `sink` is for tests; null: standard output.
  // One object at a time. INVALID_ARGUMENT for an unknown level or format.
  static absl::StatusOr<std::unique_ptr<Logs>> Start(const std::string& process,
                                                     const v1::LogConfig& config,
                                                     spdlog::sink_ptr sink = nullptr);
  // Writes the waiting lines. Later ones go to the logger that was the default one before.
  virtual ~Logs() = default;
  // Names the rank of this process in all lines from now on.
  virtual void set_rank(int64_t rank) = 0;
};

// Returns the number of lines that have given way since the Logs began.
uint64_t LogLinesDropped();

// Name and value of a fact beside a line's message.
using LogField = std::pair<const char*, std::variant<std::string, int64_t, double>>;

// Logs a line with fields: members of the JSON object, or name=value after the message.
void LogEvent(spdlog::level::level_enum level, absl::string_view message,
              const std::vector<LogField>& fields);

}  // namespace kvasir::proto
