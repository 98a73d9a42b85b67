// Tokens and log probabilities that the engine samples on a GPU, against the CPU's sampling of the
// logits that the GPU computed.
#include <gtest/gtest.h>
#include <set>
#include <vector>

#include "kernels/base/buffer.h"
#include "kernels/sampling/sampling.h"
#include "tests/worker/cuda/cuda_engine_fixture.h"
#include "worker/batch/row_sampling.h"

namespace kvasir::worker {
namespace {

// Requests of all kinds in turn, and in steps together.
std::vector<v1::RowSampling> Samplings() {
  std::vector<v1::RowSampling> samplings(6, Greedy());
  samplings[1].set_logprobs(5);
  samplings[2].set_temperature(0.8f);
  samplings[2].set_top_p(0.9f);
  samplings[2].set_seed(7);
  samplings[3] = samplings[2];
  samplings[3].set_logprobs(0);
  samplings[3].set_top_k(40);
  samplings[3].set_repetition_penalty(1.3f);
  samplings[3].set_frequency_penalty(0.2f);
  samplings[3].set_presence_penalty(0.1f);
  samplings[4] = samplings[3];
  samplings[4].set_min_p(0.02f);
  samplings[4].set_logprobs(20);
  samplings[4].set_min_tokens(9);
  for (uint32_t token = 0; token < 64; ++token) {
    samplings[4].add_stop_token_ids(token);
    v1::LogitBias& bias = *samplings[4].add_logit_bias();
    bias.set_token_id(token + 32);
    bias.set_bias(token % 2 == 0 ? 3.0f : -3.0f);
  }
  samplings[5].set_frequency_penalty(1.5f);
  return samplings;
}

// Returns what the CPU's op makes of the logits that the GPU computed.
kernels::SampledToken SampleOnCpu(const Sequence& sequence, int64_t position,
                                  TestWorker::Logits logits, RowSamplingBuffers& buffers) {
  const int64_t vocab = std::ssize(logits);
  const kernels::SamplingOptions options = MakeSamplingOptions(sequence, position, vocab, buffers);
  kernels::SampledToken token;
  kernels::SerialExecutor executor;
  const kernels::HostBuffer scratch =
      kernels::HostBuffer::Allocate(kernels::SamplingScratchBytes(vocab, 1)).value();
  EXPECT_TRUE(
      kernels::Sample(
          {.logits = kernels::TensorView(logits.data(), kernels::DType::kFloat32, {1, vocab}),
           .options = {&options, 1},
           .tokens = {&token, 1},
           .scratch = {scratch.data(), static_cast<size_t>(scratch.size_bytes())}},
          executor)
          .ok());
  return token;
}

// Sampled on the device, within the step's graph; the same tokens as where nobody reads the logits.
TEST_F(CudaEngineTest, TokensAndLogprobsAreThoseThatTheCpuSamplesFromTheSameLogits) {
  std::vector<TestRequest> requests;
  const std::vector<v1::RowSampling> samplings = Samplings();
  for (size_t r = 0; r < 2 * samplings.size(); ++r) {
    requests.push_back(MakeRequest(100 + 30 * static_cast<int64_t>(r), 300, 0));
    requests.back().sampling = samplings[r % samplings.size()];
  }
  const ServedRun run = Serve(*models_.gpu, requests);
  std::set<uint32_t> drawn;
  for (size_t r = 0; r < requests.size(); ++r) {
    Sequence sequence;
    sequence.sampling = requests[r].sampling;
    sequence.prompt_size = std::ssize(requests[r].prompt);
    sequence.tokens.assign(requests[r].prompt.begin(), requests[r].prompt.end());
    const TestResult& result = run.results[r];
    ASSERT_TRUE(result.status.ok()) << result.status;
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "request " << r << ", token " << i);
      RowSamplingBuffers buffers;
      const int64_t position = std::ssize(sequence.tokens);
      const kernels::SampledToken token = SampleOnCpu(
          sequence, position, run.logits.at({static_cast<int64_t>(r), position - 1}), buffers);
      EXPECT_EQ(result.tokens[i], static_cast<uint32_t>(token.token));
      if (sequence.sampling.has_logprobs()) {
        EXPECT_EQ(result.logprobs[i].SerializeAsString(),
                  Logprobs(token, buffers).SerializeAsString());
      }
      sequence.tokens.push_back(static_cast<int32_t>(result.tokens[i]));
      drawn.insert(result.tokens[i]);
    }
  }
  EXPECT_GT(drawn.size(), 30u) << "premise: answers differ";
  EXPECT_EQ(run.results[4].logprobs.size(), static_cast<size_t>(kAnswer));

  TestWorker untapped(*models_.gpu, Options());
  untapped.engine().set_logits_tap(nullptr);
  TestCoordinator coordinator({.num_slots = kSlots, .chunk = kChunk});
  for (const TestRequest& request : requests) coordinator.Add(request);
  untapped.Run(coordinator);
  for (size_t r = 0; r < requests.size(); ++r) {
    EXPECT_EQ(coordinator.result(r).tokens, run.results[r].tokens) << "request " << r;
  }
}

}  // namespace
}  // namespace kvasir::worker
