#include "kvstore/tiers/manifest.h"

#include <gtest/gtest.h>
#include <map>
#include <random>
#include <rocksdb/db.h>

#include "tests/support/scratch_directory.h"

namespace kvasir::kvstore {
namespace {

constexpr char kFingerprint[] = "version 1, some model";

ManifestRecord Record(uint8_t name, uint64_t generation) {
  ManifestRecord record = {.block = {.hash = {}, .generation = generation, .tokens = {}},
                           .segment = name * uint64_t{3},
                           .offset = name * 4096,
                           .last_use = generation + 1};
  record.block.hash.fill(name);
  record.block.tokens.fill(-name);
  return record;
}

class ManifestTest : public ::testing::Test {
 protected:
  std::unique_ptr<Manifest> Open() { return OpenManifest(path_, kFingerprint).value(); }
  std::map<uint8_t, ManifestRecord> Load(Manifest& manifest) {
    std::map<uint8_t, ManifestRecord> records;
    const std::vector<ManifestRecord> loaded = manifest.Load().value();
    for (const ManifestRecord& record : loaded) {
      records[record.block.hash[7]] = record;
    }
    return records;
  }

  testing::ScratchDirectory scratch_;
  const std::string path_ = scratch_.path() + "/manifest";
};

TEST_F(ManifestTest, KeepsRecordsOverRestartsAndCountsThem) {
  for (uint8_t round = 1; round <= 3; ++round) {
    const auto manifest = Open();
    EXPECT_EQ(manifest->epoch(), round);
    EXPECT_EQ(Load(*manifest).size(), round - 1u);
    const ManifestRecord record = Record(round, 100);
    ASSERT_TRUE(manifest->Commit({&record, 1}, {}).ok());
  }
  const auto manifest = Open();
  const ManifestRecord record = Load(*manifest).at(2);
  EXPECT_EQ(record.block.hash, Record(2, 100).block.hash);
  EXPECT_EQ(record.block.tokens, Record(2, 100).block.tokens);
  EXPECT_EQ(record.block.generation, 100u);
  EXPECT_EQ(record.segment, 6u);
  EXPECT_EQ(record.offset, 8192);
  EXPECT_EQ(record.last_use, 101u);
}

TEST_F(ManifestTest, ARemovalAndANewRecordOfOneBlockInOneGroupLeaveTheRecord) {
  const auto manifest = Open();
  const ManifestRecord first = Record(1, 1);
  const ManifestRecord second = Record(1, 2);
  ASSERT_TRUE(manifest->Commit({&first, 1}, {}).ok());
  ASSERT_TRUE(manifest->Commit({&second, 1}, {&second.block.hash, 1}).ok());
  EXPECT_EQ(Load(*manifest).at(1).block.generation, 2u);
  ASSERT_TRUE(manifest->Commit({}, {&second.block.hash, 1}).ok());
  EXPECT_TRUE(Load(*manifest).empty());
}

TEST_F(ManifestTest, RefusesAStoreOfAnotherModel) {
  Open();
  EXPECT_EQ(OpenManifest(path_, "version 1, another model").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Open()->epoch(), 2u);
}

// RocksDB has checksums of its own: this tests damage that they would miss.
TEST_F(ManifestTest, DamagedRecordsAreLeftOutAndMissingMetadataIsDataLoss) {
  {
    const auto manifest = Open();
    const std::vector<ManifestRecord> records = {Record(1, 1), Record(2, 1), Record(3, 1)};
    ASSERT_TRUE(manifest->Commit(records, {}).ok());
  }
  const auto edit = [&](const auto& change) {
    rocksdb::DB* raw = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), path_, &raw).ok());
    const std::unique_ptr<rocksdb::DB> db(raw);
    change(*db);
  };
  const auto key = [](char name) { return "b" + std::string(32, name); };
  edit([&](rocksdb::DB& db) {
    std::string value;
    ASSERT_TRUE(db.Get({}, key(1), &value).ok());
    ASSERT_TRUE(db.Put({}, key(2), value).ok());  // the value of another block
    value[20] ^= 1;
    ASSERT_TRUE(db.Put({}, key(1), value).ok());
    ASSERT_TRUE(db.Put({}, "b", "short").ok());
  });
  EXPECT_EQ(Load(*Open()).size(), 1u);
  edit([&](rocksdb::DB& db) { ASSERT_TRUE(db.Delete({}, "meta/epoch").ok()); });
  EXPECT_EQ(OpenManifest(path_, kFingerprint).status().code(), absl::StatusCode::kDataLoss);
  edit([&](rocksdb::DB& db) { ASSERT_TRUE(db.Delete({}, "meta/fingerprint").ok()); });
  EXPECT_EQ(OpenManifest(path_, kFingerprint).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace kvasir::kvstore
