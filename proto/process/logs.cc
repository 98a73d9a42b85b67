#include "proto/process/logs.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <pthread.h>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"
#include "spdlog/async.h"
#include "spdlog/formatter.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

#include "proto/process/grpc_log.h"

namespace kvasir::proto {
namespace {

using Json = nlohmann::ordered_json;

// The logger whose messages are members of a JSON object already. Only the JSON format has it.
constexpr char kMembersLogger[] = "kvasir.members";
constexpr int64_t kNoRank = -1;

// Returns JSON in ASCII; bytes that are not UTF-8 become U+FFFD.
std::string Dump(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace);
}

Json ValueOf(const LogField& field) {
  return std::visit([](const auto& value) { return Json(value); }, field.second);
}

// Returns "name":value,... without braces.
std::string Members(absl::string_view message, const std::vector<LogField>& fields) {
  Json object = {{"message", std::string(message)}};
  for (const LogField& field : fields) object[field.first] = ValueOf(field);
  const std::string text = Dump(object);
  return text.substr(1, text.size() - 2);
}

std::string TextWithFields(absl::string_view message, const std::vector<LogField>& fields) {
  std::string text(message);
  for (const LogField& field : fields) {
    absl::StrAppend(&text, " ", field.first, "=", Dump(ValueOf(field)));
  }
  return text;
}

std::string UtcTime(std::chrono::system_clock::time_point time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::FromChrono(time), absl::UTCTimeZone());
}

// As the choices of --log-level, by spdlog's level. Nothing is logged at "critical".
constexpr std::array<absl::string_view, spdlog::level::n_levels> kLevels = {
    "trace", "debug", "info", "warn", "error", "critical", "off"};

absl::string_view LevelName(spdlog::level::level_enum level) {
  return kLevels[static_cast<size_t>(level)];
}

struct Speaker {
  std::string process;
  std::atomic<int64_t> rank{kNoRank};
};

void Append(absl::string_view text, spdlog::memory_buf_t& line) {
  line.append(text.data(), text.data() + text.size());
}

class TextFormatter final : public spdlog::formatter {
 public:
  explicit TextFormatter(std::shared_ptr<const Speaker> speaker) : speaker_(std::move(speaker)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const int64_t rank = speaker_->rank;
    Append(absl::StrCat(UtcTime(message.time), " ", LevelName(message.level), " ",
                        speaker_->process, rank == kNoRank ? "" : absl::StrCat(" ", rank), ": "),
           line);
    for (const char c : message.payload) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0x20 && byte != 0x7f) {
        line.push_back(c);
      } else {
        Append(absl::StrCat("\\x", absl::Hex(byte, absl::kZeroPad2)), line);
      }
    }
    line.push_back('\n');
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<TextFormatter>(speaker_);
  }

 private:
  const std::shared_ptr<const Speaker> speaker_;
};

class JsonFormatter final : public spdlog::formatter {
 public:
  explicit JsonFormatter(std::shared_ptr<const Speaker> speaker) : speaker_(std::move(speaker)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& line) override {
    const absl::string_view payload(message.payload.data(), message.payload.size());
    const int64_t rank = speaker_->rank;
    Append(absl::StrCat("{\"time\":\"", UtcTime(message.time), "\",\"level\":\"",
                        LevelName(message.level), "\",\"process\":\"", speaker_->process, "\",",
                        rank == kNoRank ? "" : absl::StrCat("\"rank\":", rank, ",")),
           line);
    const bool are_members = message.logger_name == kMembersLogger;
    Append(are_members ? std::string(payload) : Members(payload, {}), line);
    Append("}\n", line);
  }
  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<JsonFormatter>(speaker_);
  }

 private:
  const std::shared_ptr<const Speaker> speaker_;
};

std::unique_ptr<spdlog::formatter> MakeFormatter(const std::string& format,
                                                 std::shared_ptr<const Speaker> speaker) {
  if (format == "text") return std::make_unique<TextFormatter>(std::move(speaker));
  if (format == "json") return std::make_unique<JsonFormatter>(std::move(speaker));
  return nullptr;
}

class LogsImpl final : public Logs {
 public:
  LogsImpl(std::shared_ptr<Speaker> speaker, spdlog::level::level_enum level, bool has_members,
           const spdlog::sink_ptr& sink)
      : speaker_(std::move(speaker)), before_(spdlog::default_logger()) {
    spdlog::init_thread_pool(kMostWaiting, 1, [] { pthread_setname_np(pthread_self(), "log"); });
    spdlog::set_default_logger(MakeLogger("kvasir", level, sink));
    if (has_members) spdlog::register_logger(MakeLogger(kMembersLogger, level, sink));
  }
  ~LogsImpl() override {
    // They outlive the thread that writes by them.
    const std::shared_ptr<spdlog::logger> lines = spdlog::default_logger();
    const std::shared_ptr<spdlog::logger> members = spdlog::get(kMembersLogger);
    spdlog::drop(kMembersLogger);
    spdlog::set_default_logger(before_);
    spdlog::details::registry::instance().set_tp(nullptr);  // after what waits is written
  }

  void set_rank(int64_t rank) override { speaker_->rank = rank; }

 private:
  static std::shared_ptr<spdlog::logger> MakeLogger(const std::string& name,
                                                    spdlog::level::level_enum level,
                                                    const spdlog::sink_ptr& sink) {
    auto logger = std::make_shared<spdlog::async_logger>(
        name, sink, spdlog::thread_pool(), spdlog::async_overflow_policy::overrun_oldest);
    logger->set_level(level);
    return logger;
  }

  const std::shared_ptr<Speaker> speaker_;
  const std::shared_ptr<spdlog::logger> before_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Logs>> Logs::Start(const std::string& process,
                                                  const v1::LogConfig& config,
                                                  spdlog::sink_ptr sink) {
  const auto* const level = std::find(kLevels.begin(), kLevels.end(), config.log_level());
  if (level == kLevels.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--log-level is '", config.log_level(), "', which is no level"));
  }
  auto speaker = std::make_shared<Speaker>();
  speaker->process = process;
  std::unique_ptr<spdlog::formatter> formatter = MakeFormatter(config.log_format(), speaker);
  if (formatter == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("--log-format is '", config.log_format(), "'; it is text or json"));
  }
  if (sink == nullptr) sink = std::make_shared<spdlog::sinks::stdout_sink_mt>();
  sink->set_formatter(std::move(formatter));
  RouteGrpcLog();
  return std::make_unique<LogsImpl>(std::move(speaker),
                                    static_cast<spdlog::level::level_enum>(level - kLevels.begin()),
                                    config.log_format() == "json", sink);
}

uint64_t LogLinesDropped() {
  const std::shared_ptr<spdlog::details::thread_pool> writer = spdlog::thread_pool();
  return writer == nullptr ? 0 : writer->overrun_counter();
}

void LogEvent(spdlog::level::level_enum level, absl::string_view message,
              const std::vector<LogField>& fields) {
  if (!spdlog::should_log(level)) return;
  if (const std::shared_ptr<spdlog::logger> members = spdlog::get(kMembersLogger)) {
    members->log(level, Members(message, fields));
  } else {
    spdlog::log(level, TextWithFields(message, fields));
  }
}

}  // namespace kvasir::proto
