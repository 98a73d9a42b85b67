#include "kernels/sampling/sampling_cuda.h"

#include <algorithm>
#include <vector>

#include "kernels/base/cuda_status.h"
#include "kernels/base/device_check.h"
#include "kernels/sampling/philox.h"
#include "kernels/base/scratch.h"
#include "kernels/base/shape_check.h"
#include "kernels/base/status_macros.h"
#include "kernels/sampling/sampling_launch.h"
#include "kernels/sampling/sampling_row.h"

namespace kvasir::kernels {
namespace {

int64_t NumTop(const SamplingOptions& options, int64_t vocab) {
  return std::min<int64_t>(std::ssize(options.top), vocab);
}

// Returns the most changes that one row can have.
int64_t MostChanges(const SamplingOptions& options, int64_t vocab) {
  const int64_t seen = std::ssize(options.prompt) + std::ssize(options.output);
  return std::ssize(options.biases) + std::ssize(options.banned) +
         (HasPenalties(options) ? std::min(seen, vocab) : 0);
}

// Places of records and results. They depend only on the number of rows, and so does a launch.
struct RowPieces {
  SamplingRecord* records;
  FoundToken* found;
};

RowPieces PiecesOf(std::byte* block, int64_t rows) {
  ScratchPieces pieces(block);
  SamplingRecord* const records = pieces.Take<SamplingRecord>(rows);
  return {.records = records, .found = pieces.Take<FoundToken>(rows)};
}

// The parts of a block, in this order.
struct Block {
  SamplingRecord* records;
  FoundToken* found;
  TokenLogit* top;
  TokenChange* changes;
  int64_t bytes;
};

Block LayOut(std::byte* memory, std::span<const SamplingOptions> options, int64_t vocab) {
  int64_t num_top = 0, num_changes = 0;
  for (const SamplingOptions& row : options) {
    num_top += NumTop(row, vocab);
    num_changes += MostChanges(row, vocab);
  }
  ScratchPieces pieces(memory);
  Block block;
  block.records = pieces.Take<SamplingRecord>(std::ssize(options));
  block.found = pieces.Take<FoundToken>(std::ssize(options));
  block.top = pieces.Take<TokenLogit>(num_top);
  block.changes = pieces.Take<TokenChange>(num_changes);
  block.bytes = pieces.bytes();
  return block;
}

int32_t WritePenalized(const SamplingOptions& options, int64_t vocab, TokenChange* to) {
  if (!HasPenalties(options)) return 0;
  std::vector<int32_t> occurrences(static_cast<size_t>(vocab));
  CountOccurrences(options, occurrences);
  int32_t count = 0;
  for (int32_t id = 0; id < static_cast<int32_t>(vocab); ++id) {
    const int32_t times = occurrences[static_cast<size_t>(id)];
    if (times >= 0) to[count++] = {.token = id, .amount = static_cast<float>(times)};
  }
  return count;
}

SamplingRecord RecordOf(const SamplingOptions& options, int64_t vocab, TokenChange* changes) {
  if (!CheckOptions(options, vocab).ok()) return {};
  if (options.given >= 0) {
    return {.num_top = static_cast<int32_t>(NumTop(options, vocab)),
            .given = options.given,
            .wants_logprob = WantsLogprobs(options),
            .is_valid = 1};
  }
  SamplingRecord record = {
      .uniform = UniformAt(options.seed, static_cast<uint64_t>(options.position)),
      .min_weight = MinWeight(options.min_p),
      .top_k = options.top_k,
      .temperature = options.temperature,
      .top_p = options.top_p,
      .penalties = PenaltiesOf(options),
      .changes = changes,
      .num_biases = static_cast<int32_t>(options.biases.size()),
      .num_banned = static_cast<int32_t>(options.banned.size()),
      .num_top = static_cast<int32_t>(NumTop(options, vocab)),
      .wants_logprob = WantsLogprobs(options),
      .is_valid = 1};
  for (const TokenBias& bias : options.biases) {
    *changes++ = {.token = bias.token, .amount = bias.bias};
  }
  record.num_penalized = WritePenalized(options, vocab, changes);
  changes += record.num_penalized;
  for (const int32_t id : options.banned) *changes++ = {.token = id};
  return record;
}

}  // namespace

int64_t SamplingBlockBytes(std::span<const SamplingOptions> options, int64_t vocab) {
  return LayOut(nullptr, options, vocab).bytes;
}

bool ChangesLogits(std::span<const SamplingOptions> options) {
  return std::any_of(options.begin(), options.end(), [](const SamplingOptions& row) {
    if (row.given >= 0) return false;
    return !row.biases.empty() || !row.banned.empty() || HasPenalties(row);
  });
}

void FillSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* memory) {
  Block block = LayOut(memory, options, vocab);
  for (const SamplingOptions& row : options) {
    *block.records = RecordOf(row, vocab, block.changes);
    block.records++->top = block.top;
    block.top += NumTop(row, vocab);
    block.changes += MostChanges(row, vocab);
  }
}

absl::Status Sample(const DeviceSamplingParams& params, cudaStream_t stream) {
  ShapeCheck check("sampling");
  check.Match("logits", params.logits, {"rows", "vocab"}, DType::kFloat32);
  const int64_t rows = params.logits.dim(0);
  const int64_t vocab = params.logits.dim(1);
  check.Require(vocab > 0 && vocab <= kMaxVocab, "the vocabulary is empty, or above 2^22");
  KVASIR_RETURN_IF_ERROR(check.status());
  KVASIR_RETURN_IF_ERROR(RequireDeviceMemory("sampling", {params.logits}));
  if (rows == 0) return absl::OkStatus();
  KVASIR_CHECK(params.first_row >= 0 && params.first_row + rows <= params.block_rows);
  const RowPieces pieces = PiecesOf(params.block, params.block_rows);
  const SamplingLaunch launch = {.logits = params.logits.As<float>(),
                                 .vocab = vocab,
                                 .changed = params.changed,
                                 .records = pieces.records + params.first_row,
                                 .found = pieces.found + params.first_row};
  return CudaStatus(LaunchSampling(launch, rows, stream), "launching sampling");
}

absl::Status FeedTokens(const FeedParams& params, cudaStream_t stream) {
  if (params.tokens.empty()) return absl::OkStatus();
  KVASIR_CHECK(params.fed_by.size() == params.tokens.size());
  const RowPieces pieces = PiecesOf(params.block, params.rows);
  const FeedLaunch launch = {.found = pieces.found,
                             .fed_by = params.fed_by.data(),
                             .tokens = params.tokens.data(),
                             .num_tokens = std::ssize(params.tokens)};
  return CudaStatus(LaunchFeed(launch, stream), "launching the feed of tokens");
}

void ReadSamplingBlock(std::span<const SamplingOptions> options, int64_t vocab, std::byte* memory,
                       std::span<SampledToken> tokens) {
  const Block block = LayOut(memory, options, vocab);
  for (size_t r = 0; r < options.size(); ++r) {
    const SamplingRecord& record = block.records[r];
    tokens[r] = {.status = CheckOptions(options[r], vocab)};
    if (!tokens[r].status.ok()) continue;
    tokens[r] =
        FinishRow(block.found[r], options[r], {record.top, static_cast<size_t>(record.num_top)});
  }
}

}  // namespace kvasir::kernels
