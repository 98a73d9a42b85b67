// Bytes uploaded to the device in pieces, and host memory pinned in pieces.
#include <atomic>
#include <cstring>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kvstore/host/host_memory.h"
#include "worker/backend/cuda/memory/pinned_region.h"
#include "worker/make_backend.h"
#include "worker/thread_pool.h"

namespace kvasir::worker {
namespace {

class CudaUploadTest : public testing::Test {
 protected:
  // Pieces of 0, 1000, ..., 9000 bytes, repeatedly, one after the other.
  void MakePieces(int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) bytes += SizeOf(i);
    memory_ = backend_->Allocate(bytes).value();
    std::byte* next = memory_.data();
    for (int64_t i = 0; i < count; ++i) {
      pieces_.push_back({.begin = next, .size_bytes = SizeOf(i)});
      next += SizeOf(i);
    }
  }
  static int64_t SizeOf(int64_t piece) { return piece % 10 * 1000; }
  static std::byte ByteOf(int64_t piece) { return static_cast<std::byte>(piece * 37 % 251 + 1); }

  ThreadPool executor_{7};
  std::unique_ptr<Backend> backend_ = MakeBackend("cuda", executor_).value();
  Memory memory_;
  std::vector<MemoryPiece> pieces_;
};

TEST_F(CudaUploadTest, EveryPieceComesToItsPlace) {
  MakePieces(3000);
  const absl::Status filled = backend_->FillPieces(pieces_, [](int64_t piece, int, std::byte* out) {
    std::memset(out, static_cast<int>(ByteOf(piece)), static_cast<size_t>(SizeOf(piece)));
    return absl::OkStatus();
  });
  ASSERT_TRUE(filled.ok()) << filled;
  std::vector<std::byte> found(static_cast<size_t>(memory_.size_bytes()));
  ASSERT_EQ(cudaMemcpy(found.data(), memory_.data(), found.size(), cudaMemcpyDeviceToHost),
            cudaSuccess);
  size_t at = 0;
  for (int64_t i = 0; i < std::ssize(pieces_); ++i) {
    for (int64_t byte = 0; byte < SizeOf(i); ++byte) ASSERT_EQ(found[at++], ByteOf(i)) << i;
  }
}

TEST_F(CudaUploadTest, TheFirstErrorIsTold) {
  MakePieces(300);
  const absl::Status filled = backend_->FillPieces(pieces_, [](int64_t piece, int, std::byte*) {
    return piece < 100 ? absl::OkStatus() : absl::DataLossError(absl::StrCat("piece ", piece));
  });
  EXPECT_EQ(filled, absl::DataLossError("piece 100"));
}

TEST_F(CudaUploadTest, NoPiecesAreNoError) {
  EXPECT_TRUE(backend_->FillPieces({}, WritePiece()).ok());
}

// Memory of the host tier, with a byte in its last part as an earlier process may have left it.
class PinnedRegionTest : public testing::Test {
 protected:
  static constexpr int64_t kParts = 700;

  std::unique_ptr<PinnedRegion> Pin() {
    return PinnedRegion::Over(*memory_, format_.extent_bytes(), kParts, "--flag").value();
  }

  const kvstore::ExtentFormat format_ =
      kvstore::ExtentFormat::Create({.layout = {.num_layers = 16,
                                                .num_kv_heads = 4,
                                                .head_dim = 64,
                                                .dtype = kernels::DType::kBFloat16}})
          .value();
  const std::unique_ptr<kvstore::HostMemory> memory_ = kvstore::HostMemory::Open("").value();
};

TEST_F(PinnedRegionTest, EveryPartComesAsItIs) {
  ASSERT_TRUE(memory_->Fit(format_, "", kParts).ok());
  ASSERT_TRUE(memory_->Reserve(kParts - 1).ok());
  std::byte* const last = memory_->extents() + kParts * format_.extent_bytes() - 1;
  *last = std::byte{7};
  const auto region = Pin();
  ASSERT_TRUE(region->Start().ok());
  for (int64_t part = 0; part < kParts; ++part) {
    ASSERT_TRUE(region->Await(part).ok());
    std::byte* const host = region->data() + part * format_.extent_bytes();
    void* device = nullptr;
    ASSERT_EQ(cudaHostGetDevicePointer(&device, host, 0), cudaSuccess);
    EXPECT_EQ(device, host);
    EXPECT_EQ(host[0], std::byte{0});
  }
  EXPECT_EQ(*last, std::byte{7});
}

// A step may ask for the last part while blocks that come from elsewhere have the others.
TEST_F(PinnedRegionTest, APartThatIsAwaitedDoesNotWaitForThoseBeforeIt) {
  ASSERT_TRUE(memory_->Fit(format_, "", kParts).ok());
  const auto region = Pin();
  ASSERT_TRUE(region->Start().ok());
  region->GiveWay();
  EXPECT_FALSE(region->IsThere(kParts - 1));
  ASSERT_TRUE(region->Await(kParts - 1).ok());
  EXPECT_TRUE(region->IsThere(kParts - 1));
  EXPECT_FALSE(region->IsThere(kParts / 2));
  EXPECT_TRUE(region->Await(kParts / 2).ok());
}

TEST_F(PinnedRegionTest, ARegionMayGoWhileItIsPinned) {
  ASSERT_TRUE(memory_->Fit(format_, "", kParts).ok());
  EXPECT_TRUE(Pin()->Start().ok());
}

}  // namespace
}  // namespace kvasir::worker
