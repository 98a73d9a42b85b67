#include "kvstore/tiers/manifest.h"

#include <cstring>
#include <rocksdb/db.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "kernels/base/status_macros.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvasir::kvstore {
namespace {

constexpr char kFingerprintKey[] = "meta/fingerprint";
constexpr char kEpochKey[] = "meta/epoch";
constexpr char kBlockPrefix = 'b';  // followed by the block's hash

// The value of a block's record.
struct Value {
  uint64_t generation;
  uint64_t segment;
  int64_t offset;
  uint64_t last_use;
  int32_t tokens[kBlockTokens];
  uint64_t checksum;  // XXH3_64bits of the key and everything before it
};
static_assert(sizeof(Value) == 296, "written as bytes: no padding");

std::string Key(const PrefixHash& hash) {
  std::string key(1, kBlockPrefix);
  key.append(reinterpret_cast<const char*>(hash.data()), hash.size());
  return key;
}

uint64_t ValueChecksum(absl::string_view key, const Value& value) {
  return XXH3_64bits_withSeed(&value, offsetof(Value, checksum),
                              XXH3_64bits(key.data(), key.size()));
}

std::string Encode(const std::string& key, const ManifestRecord& record) {
  Value value = {};
  value.generation = record.block.generation;
  value.segment = record.segment;
  value.offset = record.offset;
  value.last_use = record.last_use;
  std::memcpy(value.tokens, record.block.tokens.data(), sizeof(value.tokens));
  value.checksum = ValueChecksum(key, value);
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Returns false when the record is damaged.
bool Decode(absl::string_view key, absl::string_view bytes, ManifestRecord& record) {
  Value value;
  if (key.size() != 1 + record.block.hash.size() || bytes.size() != sizeof(value)) return false;
  std::memcpy(&value, bytes.data(), sizeof(value));
  if (value.checksum != ValueChecksum(key, value)) return false;
  std::memcpy(record.block.hash.data(), key.data() + 1, record.block.hash.size());
  std::memcpy(record.block.tokens.data(), value.tokens, sizeof(value.tokens));
  record.block.generation = value.generation;
  record.segment = value.segment;
  record.offset = value.offset;
  record.last_use = value.last_use;
  return true;
}

absl::Status FromRocks(const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat("manifest: ", status.ToString());
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(message);
  // A damaged CURRENT names a file that does not exist.
  if (status.IsCorruption() || status.IsInvalidArgument() || status.IsNotFound() ||
      status.IsPathNotFound()) {
    return absl::DataLossError(message);
  }
  return absl::UnavailableError(message);
}

absl::string_view View(const rocksdb::Slice& slice) { return {slice.data(), slice.size()}; }

class RocksManifest : public Manifest {
 public:
  explicit RocksManifest(std::unique_ptr<rocksdb::DB> db) : db_(std::move(db)) {}

  absl::Status Start(absl::string_view fingerprint);
  absl::Status Commit(absl::Span<const ManifestRecord> put,
                      absl::Span<const PrefixHash> removed) override;
  absl::Status Purge() override;
  absl::StatusOr<std::vector<ManifestRecord>> Load() override;
  uint64_t epoch() const override { return epoch_; }

 private:
  absl::Status Write(rocksdb::WriteBatch& batch) {
    rocksdb::WriteOptions options;
    options.sync = true;
    return FromRocks(db_->Write(options, &batch));
  }

  const std::unique_ptr<rocksdb::DB> db_;
  uint64_t epoch_ = 0;
};

absl::Status RocksManifest::Start(absl::string_view fingerprint) {
  std::string found;
  const rocksdb::Status read = db_->Get(rocksdb::ReadOptions(), kFingerprintKey, &found);
  if (read.IsNotFound()) {
    // Only a new database lacks it.
    const std::unique_ptr<rocksdb::Iterator> any(db_->NewIterator(rocksdb::ReadOptions()));
    any->SeekToFirst();
    if (any->Valid() || !any->status().ok()) {
      return absl::DataLossError("manifest: the record of its format is missing");
    }
  } else {
    KVASIR_RETURN_IF_ERROR(FromRocks(read));
    if (found != fingerprint) {
      return absl::FailedPreconditionError(
          absl::StrCat("holds KV of ", found, "; this worker's is ", fingerprint));
    }
    std::string epoch;
    KVASIR_RETURN_IF_ERROR(FromRocks(db_->Get(rocksdb::ReadOptions(), kEpochKey, &epoch)));
    if (epoch.size() != sizeof(epoch_)) {
      return absl::DataLossError("manifest: the record of its owners is damaged");
    }
    std::memcpy(&epoch_, epoch.data(), sizeof(epoch_));
  }
  ++epoch_;
  rocksdb::WriteBatch batch;
  batch.Put(kFingerprintKey, std::string(fingerprint));
  batch.Put(kEpochKey, rocksdb::Slice(reinterpret_cast<const char*>(&epoch_), sizeof(epoch_)));
  return Write(batch);
}

absl::Status RocksManifest::Commit(absl::Span<const ManifestRecord> put,
                                   absl::Span<const PrefixHash> removed) {
  rocksdb::WriteBatch batch;
  for (const PrefixHash& hash : removed) batch.Delete(Key(hash));
  for (const ManifestRecord& record : put) {
    const std::string key = Key(record.block.hash);
    batch.Put(key, Encode(key, record));
  }
  return Write(batch);
}

absl::Status RocksManifest::Purge() {
  // The log is begun again after the flush, and tables without removed records replace all others.
  KVASIR_RETURN_IF_ERROR(FromRocks(db_->Flush(rocksdb::FlushOptions())));
  rocksdb::CompactRangeOptions all;
  all.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForceOptimized;
  return FromRocks(db_->CompactRange(all, nullptr, nullptr));
}

absl::StatusOr<std::vector<ManifestRecord>> RocksManifest::Load() {
  std::vector<ManifestRecord> records;
  rocksdb::ReadOptions once;
  once.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(once));
  for (it->Seek(rocksdb::Slice(&kBlockPrefix, 1)); it->Valid(); it->Next()) {
    if (it->key().empty() || it->key()[0] != kBlockPrefix) break;
    ManifestRecord record;
    if (Decode(View(it->key()), View(it->value()), record)) records.push_back(record);
  }
  KVASIR_RETURN_IF_ERROR(FromRocks(it->status()));
  return records;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Manifest>> OpenManifest(const std::string& directory,
                                                       absl::string_view fingerprint) {
  rocksdb::Options options;
  options.create_if_missing = true;
  options.paranoid_checks = true;
  options.compression = rocksdb::kNoCompression;
  // A rank has one for each KV head. Their files are extended by this much at a time.
  options.write_buffer_size = size_t{1} << 20;
  options.manifest_preallocation_size = size_t{64} << 10;
  options.max_open_files = 64;
  options.max_file_opening_threads = 1;  // the tables are few and small; the default is 16
  options.keep_log_file_num = 1;
  options.info_log_level = rocksdb::ERROR_LEVEL;
  options.stats_dump_period_sec = 0;  // nobody reads its statistics
  options.stats_persist_period_sec = 0;
  // Otherwise everything after a damaged record of the log is lost silently. A log that a crash of
  // the machine cut short is refused too: the manifest is then rebuilt from the extents.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kAbsoluteConsistency;
  // Compactions start only after everything was read once: one that meets damage retries for ever,
  // once a second, and closing waits for it.
  options.disable_auto_compactions = true;
  rocksdb::DB* raw = nullptr;
  const rocksdb::Status opened = rocksdb::DB::Open(options, directory, &raw);
  std::unique_ptr<rocksdb::DB> db(raw);
  KVASIR_RETURN_IF_ERROR(FromRocks(opened));
  KVASIR_RETURN_IF_ERROR(FromRocks(db->VerifyChecksum()));
  KVASIR_RETURN_IF_ERROR(FromRocks(db->EnableAutoCompaction({db->DefaultColumnFamily()})));
  auto manifest = std::make_unique<RocksManifest>(std::move(db));
  KVASIR_RETURN_IF_ERROR(manifest->Start(fingerprint));
  return manifest;
}

}  // namespace kvasir::kvstore
