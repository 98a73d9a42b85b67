#include "coordinator/files/draft_file.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/stat.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/scratch_directory.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;

class DraftFileTest : public ::testing::Test {
 protected:
  std::string Content() const {
    std::ifstream file(path_);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }
  int64_t NumFiles() const {
    return std::distance(std::filesystem::directory_iterator(folder_.path()),
                         std::filesystem::directory_iterator());
  }

  const testing::ScratchDirectory folder_;
  const std::string path_ = folder_.path() + "/file";
};

TEST_F(DraftFileTest, IsThereWholeOrAsItWasBefore) {
  std::ofstream(path_) << "before";
  std::ofstream(path_ + ".new") << "of a process that ended";
  {
    absl::StatusOr<DraftFile> file = DraftFile::Create(path_, DraftFile::Readers::kAll);
    ASSERT_EQ(file.status(), absl::OkStatus());
    EXPECT_EQ(file->Write("af"), absl::OkStatus());
    EXPECT_EQ(Content(), "before");
    EXPECT_EQ(file->Write("ter"), absl::OkStatus());
    EXPECT_EQ(file->MoveToPlace(), absl::OkStatus());
  }
  EXPECT_EQ(Content(), "after");
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(DraftFileTest, WhatIsNotMovedLeavesNothing) {
  {
    absl::StatusOr<DraftFile> file = DraftFile::Create(path_, DraftFile::Readers::kAll);
    ASSERT_EQ(file.status(), absl::OkStatus());
    EXPECT_EQ(file->Write("half"), absl::OkStatus());
    EXPECT_EQ(NumFiles(), 1);
  }
  EXPECT_EQ(NumFiles(), 0);
}

TEST_F(DraftFileTest, OnlyItsOwnerReadsIt) {
  absl::StatusOr<DraftFile> file = DraftFile::Create(path_, DraftFile::Readers::kOwner);
  ASSERT_EQ(file.status(), absl::OkStatus());
  ASSERT_EQ(file->MoveToPlace(), absl::OkStatus());
  struct stat found = {};
  ASSERT_EQ(stat(path_.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
}

TEST_F(DraftFileTest, WhatIsNoFileIsNotReplaced) {
  ASSERT_TRUE(std::filesystem::create_directory(path_));
  const absl::Status folder = DraftFile::Create(path_, DraftFile::Readers::kAll).status();
  EXPECT_TRUE(absl::IsUnavailable(folder)) << folder;
  EXPECT_THAT(folder.message(), HasSubstr("file cannot be written: it is no file"));
  const absl::Status nowhere =
      DraftFile::Create(folder_.path() + "/none/file", DraftFile::Readers::kAll).status();
  EXPECT_THAT(nowhere.message(), HasSubstr("No such file"));
}

}  // namespace
}  // namespace kvasir::coordinator
