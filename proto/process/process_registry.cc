#include "proto/process/process_registry.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

#include "proto/process/logs.h"
#include "proto/process/version.h"

namespace kvasir::proto {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

MetricFamily Family(const char* name, const char* help, MetricType type, double value) {
  ClientMetric metric;
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  return {.name = name, .help = help, .type = type, .metric = {std::move(metric)}};
}

std::string Read(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Fields of /proc/self/stat after the program's name, which is in parentheses and may hold blanks:
// fields[0] is field 3 of proc(5).
struct Stat {
  std::vector<std::string> fields;

  double Field(size_t number) const {
    double value = 0;
    const size_t index = number - 3;
    return index < fields.size() && absl::SimpleAtod(fields[index], &value) ? value : 0;
  }
};

Stat ReadStat() {
  const std::string text = Read("/proc/self/stat");
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return {};
  return {absl::StrSplit(text.substr(end + 1), ' ', absl::SkipWhitespace())};
}

// Seconds since 1970 at which the machine started.
double BootTime() {
  for (const absl::string_view line : absl::StrSplit(Read("/proc/stat"), '\n')) {
    double seconds = 0;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() == 2 && words[0] == "btime" && absl::SimpleAtod(words[1], &seconds)) {
      return seconds;
    }
  }
  return 0;
}

double OpenFiles() {
  std::error_code error;
  const std::filesystem::directory_iterator files("/proc/self/fd", error);
  if (error) return 0;
  return static_cast<double>(std::distance(begin(files), end(files)) - 1);  // without its own
}

double MostFiles() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<double>(limit.rlim_cur);
}

MetricFamily BuildInfo() {
  MetricFamily info =
      Family("kvasir_build_info", "Constant 1; the label is the release.", MetricType::Gauge, 1);
  info.metric[0].label = {{"version", Version()}};
  return info;
}

}  // namespace

std::vector<MetricFamily> ProcessRegistry::Collect() const {
  std::vector<MetricFamily> families = Registry::Collect();
  const Stat stat = ReadStat();
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
  const auto add = [&](const char* name, const char* help, MetricType type, double value) {
    families.push_back(Family(name, help, type, value));
  };
  add("process_cpu_seconds_total", "Processor time of the process, user and system.",
      MetricType::Counter, (stat.Field(14) + stat.Field(15)) / ticks);
  add("process_virtual_memory_bytes", "Virtual memory of the process.", MetricType::Gauge,
      stat.Field(23));
  add("process_resident_memory_bytes", "Resident memory of the process.", MetricType::Gauge,
      stat.Field(24) * page_bytes);
  add("process_start_time_seconds", "Start of the process, in seconds since 1970.",
      MetricType::Gauge, BootTime() + stat.Field(22) / ticks);
  add("process_open_fds", "Open file descriptors.", MetricType::Gauge, OpenFiles());
  add("process_max_fds", "Most file descriptors that may be open.", MetricType::Gauge, MostFiles());
  add("kvasir_log_lines_dropped_total",
      "Lines of the log that gave way to later ones, because its reader was too slow.",
      MetricType::Counter, static_cast<double>(LogLinesDropped()));
  families.push_back(BuildInfo());
  return families;
}

}  // namespace kvasir::proto
