// Manifests that fail, are removed or are damaged.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "kvstore/tiers/disk_tier.h"
#include "tests/kvstore/test_blocks.h"
#include "tests/kvstore/tiers/disk_tier_fixture.h"
#include "tests/support/iterations.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

using ::testing::ElementsAre;
using testing::ScratchDirectory;

class FailingManifest : public Manifest {
 public:
  FailingManifest(std::unique_ptr<Manifest> base, const std::atomic<bool>& fails)
      : base_(std::move(base)), fails_(fails) {}
  absl::Status Commit(absl::Span<const ManifestRecord> put,
                      absl::Span<const PrefixHash> removed) override {
    if (fails_) return absl::UnavailableError("the manifest fails on purpose");
    return base_->Commit(put, removed);
  }
  absl::Status Purge() override {
    return fails_ ? absl::UnavailableError("the manifest fails on purpose") : base_->Purge();
  }
  absl::StatusOr<std::vector<ManifestRecord>> Load() override { return base_->Load(); }
  uint64_t epoch() const override { return base_->epoch(); }

 private:
  const std::unique_ptr<Manifest> base_;
  const std::atomic<bool>& fails_;
};

TEST_F(DiskTierTest, AFolderThatIsRemovedMakesItReadOnly) {
  ASSERT_TRUE(store_.Open().ok());
  ASSERT_TRUE(store_.Write(1).ok());
  std::filesystem::remove_all(directory_);
  EXPECT_EQ(store_.Write(2).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(store_.tier->stats().writable);
  store_.now_ms += 1001;
  EXPECT_EQ(store_.Write(3).code(), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(std::filesystem::exists(directory_));
}

// A write of the manifest that stopped halfway, as on a full disk, leaves a log that opening
// refuses.
TEST_F(DiskTierTest, AManifestThatCannotBeOpenedAnewIsMadeFromTheExtents) {
  std::atomic<bool> fails = false;
  std::atomic<bool> damaged = false;
  DiskTierOptions options = store_.Options(4);
  options.open_manifest =
      [&](const std::string& path,
          absl::string_view fingerprint) -> absl::StatusOr<std::unique_ptr<Manifest>> {
    if (damaged.exchange(false)) return absl::DataLossError("a torn log");
    auto base = OpenManifest(path, fingerprint);
    if (!base.ok()) return base.status();
    return std::make_unique<FailingManifest>(*std::move(base), fails);
  };
  store_.tier = OpenDiskTier(std::move(options)).value();
  for (uint32_t name = 1; name <= 3; ++name) EXPECT_TRUE(store_.Write(name).ok());
  fails = true;
  EXPECT_FALSE(store_.Write(4).ok());
  fails = false;
  damaged = true;
  store_.now_ms += 1001;
  EXPECT_TRUE(store_.Write(4).ok());
  ASSERT_TRUE(store_.Open(4).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(1, 2, 3, 4));
}

TEST_F(DiskTierTest, AFailingManifestMakesItReadOnlyAndIsOpenedAnew) {
  std::atomic<bool> fails = false;
  DiskTierOptions options = store_.Options(4);
  options.open_manifest =
      [&](const std::string& path,
          absl::string_view fingerprint) -> absl::StatusOr<std::unique_ptr<Manifest>> {
    auto base = OpenManifest(path, fingerprint);
    if (!base.ok()) return base.status();
    return std::make_unique<FailingManifest>(*std::move(base), fails);
  };
  store_.tier = OpenDiskTier(std::move(options)).value();
  for (uint32_t name = 1; name <= 4; ++name) EXPECT_TRUE(store_.Write(name).ok());
  fails = true;
  EXPECT_FALSE(store_.Write(5).ok()) << "1 was evicted for it";
  EXPECT_FALSE(store_.tier->stats().writable);
  EXPECT_TRUE(store_.Read(4).ok());
  fails = false;
  store_.now_ms += 1001;
  EXPECT_TRUE(store_.Write(6).ok());
  EXPECT_TRUE(store_.tier->stats().writable);
  EXPECT_THAT(store_.Names(), ElementsAre(2, 3, 4, 6)) << "the place of 5 was given back";
  ASSERT_TRUE(store_.Open(4).ok());
  EXPECT_THAT(store_.Names(), ElementsAre(2, 3, 4, 6)) << "the removal of 1 was recorded later";
}

// Every byte of the manifest, flipped or cut: the store opens with some of its blocks, or reports
// why not. A block's bytes are right or not returned.
TEST(DiskTierManifest, ADamagedOneGivesSomeBlocksOrARefusalButNeverWrongBytes) {
  const ScratchDirectory scratch(ScratchDirectory::On::kMemory);
  const std::string directory = scratch.path() + "/kv";
  TestStore store(directory);
  for (uint32_t name = 1; name <= 4; ++name) {  // the first two move from the log to a table
    ASSERT_TRUE(store.Open().ok());
    ASSERT_TRUE(store.Write(name).ok());
  }
  store.Close();
  const std::string backup = scratch.path() + "/backup";
  std::filesystem::copy(directory, backup, std::filesystem::copy_options::recursive);
  int64_t blocks = 0;
  int64_t trials = 0;
  const auto try_it = [&](const std::string& what, const std::string& name,
                          const std::string& bytes, size_t least_blocks) {
    std::filesystem::remove_all(directory);
    std::filesystem::copy(backup, directory, std::filesystem::copy_options::recursive);
    WriteFile(directory + "/manifest/" + name, bytes);
    ++trials;
    // The segments are whole, so a new manifest can be made.
    const absl::Status status = store.Open();
    EXPECT_TRUE(status.ok()) << what << ": " << status;
    if (!status.ok()) return;
    EXPECT_GE(store.Names().size(), least_blocks) << what;
    for (uint32_t block : store.Names()) {
      EXPECT_TRUE(block >= 1 && block <= 4);
      blocks += store.Read(block).ok() ? 1 : 0;  // compares the bytes
    }
    store.Close();
  };
  // CI takes every 307th byte.
  const size_t stride = static_cast<size_t>(std::max<int64_t>(1, 307 / testing::Iterations(1)));
  for (const auto& file : std::filesystem::directory_iterator(backup + "/manifest")) {
    const std::string name = file.path().filename();
    if (name.starts_with("LOG") || name == "LOCK") continue;  // RocksDB does not read them
    const std::string bytes = ReadFile(file.path());
    for (size_t i = 0; i < bytes.size(); i += stride) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
      // A flipped bit of the log lost all records after it silently.
      const std::string place = absl::StrCat(name, ", byte ", i);
      try_it(absl::StrCat(place, " flipped"), name, damaged, name.ends_with(".log") ? 4 : 0);
      if (i % (3 * stride) == 0) {
        try_it(absl::StrCat("cut before ", place), name, bytes.substr(0, i), 0);
      }
    }
  }
  EXPECT_GT(trials, 60);
  EXPECT_GT(blocks, 3 * trials);
  RecordProperty("trials", std::to_string(trials));
}

}  // namespace
}  // namespace kvasir::kvstore
