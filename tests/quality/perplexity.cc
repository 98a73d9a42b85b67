// Perplexity of a model on a text, as the CPU worker computes it:
//
//   cat /usr/share/common-licenses/GPL-3 | quality_perplexity --model /tmp/smollm2 --max-model-len
//   2048
//
// Reads text from standard input, cuts its tokens into windows of --max-model-len, reads each
// window dense and by itself, and prints the mean nats of a token (the first of each window is
// given) and the perplexity, e to that power. The flags are those of `kvasir serve` that tell of
// the model and of the type of its KV, so whatever changes the weights, their type or the KV's can
// be compared with what it came from.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "coordinator/tokenizer/tokenizer.h"
#include "kernels/base/status_macros.h"
#include "proto/kvasir/v1/config.pb.h"
#include "proto/load_config.h"
#include "tests/quality/reference_model.h"

namespace kvasir::quality {
namespace {

constexpr int64_t kDefaultWindow = 2048;  // tokens

const proto::CommandInfo kCommand = {
    .name = "quality_perplexity",
    .summary =
        "Prints the perplexity of a model on the text of standard input, read in windows of "
        "--max-model-len tokens (0: 2,048).",
    .example = "quality_perplexity --model /tmp/smollm2 < /usr/share/common-licenses/GPL-3"};

absl::Status Run(const v1::ModelConfig& config, const v1::KvConfig& kv, const std::string& text) {
  KVASIR_ASSIGN_OR_RETURN(const auto tokenizer, coordinator::Tokenizer::Load(config.model()));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                          tokenizer->Encode(text, {.add_special_tokens = false}));
  const int64_t window = config.max_model_len() > 0 ? config.max_model_len() : kDefaultWindow;
  const int64_t size = std::ssize(tokens);
  if (window < 2 || size < 2) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", size, " tokens, a window ",
                                                   window, "; both must be 2 or more"));
  }
  KVASIR_ASSIGN_OR_RETURN(
      const auto model,
      ReferenceModel::Load(config, kv, window,
                           static_cast<int>(std::thread::hardware_concurrency())));
  double nats = 0;
  int64_t counted = 0;
  for (int64_t begin = 0; begin + 1 < size; begin += window) {
    const int64_t end = std::min(begin + window, size);
    KVASIR_ASSIGN_OR_RETURN(const double added,
                            model->Nats({tokens.begin() + begin, tokens.begin() + end}));
    nats += added;
    counted += end - begin - 1;
    std::fprintf(stderr, "%lld of %lld tokens: %.4f nats\n", static_cast<long long>(end),
                 static_cast<long long>(size), nats / static_cast<double>(counted));
  }
  const double mean = nats / static_cast<double>(counted);
  std::printf("%lld tokens in windows of %lld: %.5f nats a token, perplexity %.4f\n",
              static_cast<long long>(counted), static_cast<long long>(window), mean,
              std::exp(mean));
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  v1::ServeConfig config;
  KVASIR_ASSIGN_OR_RETURN(const proto::NextStep next,
                          proto::Configure(kCommand, argc, argv, 1, config));
  if (next == proto::NextStep::kExit) return absl::OkStatus();
  return Run(config.model(), config.kv(),
             std::string(std::istreambuf_iterator<char>(std::cin), {}));
}

}  // namespace
}  // namespace kvasir::quality

int main(int argc, char** argv) {
  const absl::Status status = kvasir::quality::Main(argc, argv);
  if (status.ok()) return EXIT_SUCCESS;
  std::cerr << "quality_perplexity: " << status.message() << "\n";
  return EXIT_FAILURE;
}
