// The records of contexts as files in a folder, one for each, so that they outlive the coordinator.
// A record is whole or not there: it is written beside its place, made durable and then moved. It
// hides names and checksums of files. Called by Contexts, under its mutex. Thread-compatible.
//
//   file := "KVCTX001" SHA-256 of the rest (32) ContextRecord
//   name := hexadecimal SHA-256 of tenant and name, ".context"
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/kvasir/v1/context_record.pb.h"

namespace kvasir::coordinator {

class RecordFolder {
 public:
  // The folder is made with its first record, for its owner alone, so that a server without
  // contexts leaves no trace. UNAVAILABLE when it cannot be made, or written.
  static absl::StatusOr<RecordFolder> Open(std::string path);

  // Returns all records. Damaged files are left out, and named in the log. What a process that
  // ended was writing is erased.
  std::vector<v1::ContextRecord> Load() const;
  // Replaces the record of the same tenant and name. It is durable when this returns OK;
  // UNAVAILABLE otherwise.
  absl::Status Save(const v1::ContextRecord& record) const;
  // Overwrites the file with zeros and removes it, durably. OK when there is none. Adds its size to
  // `bytes`.
  absl::Status Erase(const std::string& tenant, const std::string& name, int64_t& bytes) const;

 private:
  explicit RecordFolder(std::string path) : path_(std::move(path)) {}
  absl::Status MakeFolder() const;
  absl::Status EraseFile(const std::string& path, int64_t& bytes) const;
  std::string PathOf(const std::string& tenant, const std::string& name) const;

  std::string path_;
};

}  // namespace kvasir::coordinator
