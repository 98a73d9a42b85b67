#include "coordinator/cli/local_gpus.h"

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvasir::coordinator {
namespace {

namespace fs = std::filesystem;

constexpr char kDriverList[] = "/proc/driver/nvidia/gpus";

absl::Status TooFew(int64_t workers, int64_t found, absl::string_view where) {
  return absl::InvalidArgumentError(absl::StrCat(
      "--tensor-parallel-size=", workers, " with --device=cuda needs a GPU for each, ", where, " ",
      found, "; use --tensor-parallel-size=", found > 0 ? found : 1, " or less"));
}

}  // namespace

LocalGpus LookForGpus() {
  LocalGpus gpus;
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    gpus.visible = absl::StrSplit(visible, ',', absl::SkipWhitespace());
  }
  std::error_code error;
  const fs::directory_iterator list(kDriverList, error);
  if (!error) gpus.count = std::distance(fs::begin(list), fs::end(list));
  return gpus;
}

absl::StatusOr<std::vector<std::string>> ChooseGpus(int64_t workers, const LocalGpus& gpus) {
  std::vector<std::string> chosen;
  if (gpus.visible.has_value()) {
    const auto found = static_cast<int64_t>(gpus.visible->size());
    if (found < workers) return TooFew(workers, found, "CUDA_VISIBLE_DEVICES names");
    chosen.assign(gpus.visible->begin(), gpus.visible->begin() + workers);
    return chosen;
  }
  if (gpus.count.has_value() && *gpus.count < workers) {
    return TooFew(workers, *gpus.count, "this machine has");
  }
  for (int64_t rank = 0; rank < workers; ++rank) chosen.push_back(absl::StrCat(rank));
  return chosen;
}

}  // namespace kvasir::coordinator
