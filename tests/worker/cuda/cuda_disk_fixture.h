// An engine on a GPU over a real disk tier: its model, options, and a request of 3,000 tokens whose
// first ten chunks are whole blocks. Tests need a GPU and skip without.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/scratch_directory.h"
#include "tests/worker/model/golden.h"
#include "tests/worker/test_coordinator.h"
#include "tests/worker/test_worker.h"
#include "worker/disk.h"

namespace kvasir::worker {

inline constexpr int64_t kChunk = 256;
// Whole chunks, so that the rest of the prompt is computed in the same steps.
inline constexpr size_t kStoredBlocks = 10 * kChunk / kernels::kPageTokens;
inline constexpr uint64_t kRestoredIds = 100000;

struct DiskCase {
  std::string selector;
  float top_p = 0;
  kernels::DType kv_dtype = kernels::DType::kBFloat16;
};

class CudaDiskTest : public ::testing::TestWithParam<DiskCase> {
 protected:
  explicit CudaDiskTest(int num_threads) : num_threads_(num_threads) {}

  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine";
    }
    model_ = std::make_unique<TestModel>(TestWorkerOptions{.folder = "tests/model/needle-8k",
                                                           .dtype = kernels::DType::kBFloat16,
                                                           .max_model_len = 8192,
                                                           .num_threads = num_threads_,
                                                           .device = "cuda",
                                                           .edit_weights = {}});
  }
  static EngineOptions Options() {
    EngineOptions options = TestWorker::DefaultOptions();
    options.policies = {MakePolicy("all", GetParam().selector)};
    if (GetParam().top_p > 0) options.policies[0].mutable_decode()->set_top_p(1);
    options.kv_dtype = GetParam().kv_dtype;
    options.kv.device = 128 << 20;
    options.kv.host = 256 << 20;
    options.max_num_batched_tokens = kChunk;
    options.weights_hash = std::string(32, 'w');
    options.kv_form = "rotated/bfloat16";
    return options;
  }
  // All workers of a test have one disk.
  std::unique_ptr<TestWorker> Start(const EngineOptions& options) {
    v1::KvConfig config;
    config.set_kv_disk_path(scratch_.path() + "/kv");
    config.set_kv_disk_size_gb(1);
    auto disk = OpenDisk({.config = config, .shard = KvShardOf(options, model_->transformer())});
    return std::make_unique<TestWorker>(*model_, options, std::move(disk).value());
  }
  // Returns the part of the text from `begin` on.
  static TestRequest Request(int64_t begin, uint32_t window_tokens) {
    const std::vector<uint32_t> text =
        GoldenFile("tests/model/golden/needle-8k.safetensors").Run(8000).tokens;
    TestRequest request = {.prompt = {text.begin() + begin, text.begin() + begin + 3000},
                           .max_tokens = 16,
                           .policy = 0,
                           .prefill = MakeNumbers(32, window_tokens, 256),
                           .decode = MakeNumbers(16, window_tokens, 256),
                           .tail_tokens = 20,
                           .sampling = Greedy(),
                           .cached_blocks = {}};
    if (GetParam().top_p > 0) request.decode.set_top_p(GetParam().top_p);
    return request;
  }

  const int num_threads_;
  std::unique_ptr<TestModel> model_;
  kvasir::testing::ScratchDirectory scratch_;
};

}  // namespace kvasir::worker
