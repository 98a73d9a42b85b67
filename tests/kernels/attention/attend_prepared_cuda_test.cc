// Attention over prepared pages: the bits of attention over pages where they lie.
#include <algorithm>

#include "tests/kernels/attention/attend_cuda_fixture.h"

namespace kvasir::kernels {
namespace {

// A prompt's last queries, in tiles of 64 from a page's edge on.
void AddPrompt(AttentionBatch& batch, int64_t slot, int64_t tokens, int64_t first) {
  batch.FillContext(slot, tokens);
  for (int64_t begin = first; begin < tokens; begin += kPageTokens) {
    batch.AddBlock(slot, begin, std::min(kPageTokens, tokens - begin));
  }
}

// Attends over prepared pages of so many tokens of all heads, or of fewer heads of more tokens.
DeviceAttentionBatch::Implementation Prepared(const AttentionBatch& batch, int64_t room_tokens) {
  return
      [&batch, room_tokens](const CudaAttendParams& params, const KvTensorMaps&) -> absl::Status {
        KVASIR_ASSIGN_OR_RETURN(const PreparedMemory memory,
                                PreparedMemory::Create(params.kv.layout, room_tokens));
        const auto pages = PlanPreparedPages(batch.blocks(), params.kv.layout, memory.bytes);
        if (!pages.has_value()) return absl::InternalError("nothing is prepared");
        KVASIR_RETURN_IF_ERROR(AttendPrepared(params, *pages, memory, nullptr));
        return CudaStatus(cudaDeviceSynchronize(), "running the kernels");
      };
}

std::vector<float> Attended(AttentionBatch& batch,
                            const DeviceAttentionBatch::Implementation& implementation) {
  const absl::Status status = DeviceAttentionBatch(batch).Run(implementation);
  EXPECT_TRUE(status.ok()) << status;
  return Outputs(batch);
}

TEST_P(AttendCudaTest, PreparedPagesGiveTheSameBits) {
  for (const bool compact : {false, true}) {
    AttentionBatch batch(Shape(), 3, 1500, 51);
    if (compact) batch.UseCompactPositions(1.25);
    AddPrompt(batch, 0, 1337, 0);
    AddPrompt(batch, 1, 1500, 704);
    AddPrompt(batch, 2, 640, 64);
    const std::vector<float> expected = Attended(batch, Prefill);
    SCOPED_TRACE(compact);
    EXPECT_EQ(Attended(batch, Prepared(batch, 4096)), expected);
  }
}

// There is room for one of two KV heads.
TEST_P(AttendCudaTest, PreparedPagesOfOneHeadAfterTheOtherGiveTheSameBits) {
  AttentionBatch batch(Shape(), 1, 1024, 52);
  batch.UseCompactPositions();
  AddPrompt(batch, 0, 1024, 0);
  const std::vector<float> expected = Attended(batch, Prefill);
  EXPECT_EQ(PlanPreparedPages(batch.blocks(), batch.kv().View().layout,
                              PreparedBytes(batch.kv().View().layout, 512))
                ->num_heads,
            1);
  EXPECT_EQ(Attended(batch, Prepared(batch, 512)), expected);
}

// Every page is read once, whatever the number of tiles.
TEST_P(AttendCudaTest, PreparedPagesOfTheHostTierAreReadOnce) {
  AttentionBatch batch(Shape(), 1, 1000, 53);
  AddPrompt(batch, 0, 1000, 0);
  for (const int64_t page : {0, 5, 15}) {
    batch.kv().SetTier(0, page, AttentionBatch::kLayer, 1, PageTier::kHost);
  }
  const std::vector<float> expected = Attended(batch, Prefill);
  DeviceAttentionBatch device(batch);
  const absl::Status status = device.Run(Prepared(batch, 1024));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Outputs(batch), expected);
  const PagedKv kv = batch.kv().View();
  int64_t touched = 0, missed = 0;
  for (size_t page = 0; page < device.missed_bytes().size(); ++page) {
    missed += device.missed_bytes()[page];
    touched += device.last_touched()[page] == *kv.accesses.step ? 1 : 0;
  }
  EXPECT_EQ(missed, 3 * kv.layout.page_bytes());
  EXPECT_EQ(touched, 16 * 2);  // pages of two KV heads
}

TEST_P(AttendCudaTest, PagesThatCannotBePreparedSetTheFaultOfTheirSlotOnly) {
  AttentionBatch batch(Shape(), 2, 700, 54);
  AddPrompt(batch, 0, 700, 0);
  AddPrompt(batch, 1, 700, 0);
  const std::vector<float> expected = Attended(batch, Prefill);
  batch.kv().SetTier(1, 2, AttentionBatch::kLayer, 0, PageTier::kAbsent);
  const std::vector<float> found = Attended(batch, Prepared(batch, 2048));
  EXPECT_EQ(batch.fault(0), 0);
  EXPECT_EQ(batch.fault(1), 1);
  const auto own = 700 * batch.heads() * batch.shape().head_dim;
  EXPECT_TRUE(std::equal(found.begin(), found.begin() + own, expected.begin()));
}

TEST_P(AttendCudaTest, PreparedPagesHaveOnePositionAKey) {
  AttentionBatch batch(Shape(), 1, 700, 55);
  batch.UseGroupedPositions({.group_size = 4, .window = 128});
  AddPrompt(batch, 0, 700, 0);
  const absl::Status status = DeviceAttentionBatch(batch).Run(Prepared(batch, 1024));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

}  // namespace
}  // namespace kvasir::kernels
