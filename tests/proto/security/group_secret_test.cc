// The group secret's file, its proofs, and the handshake of both ends.
#include "proto/security/group_secret.h"

#include <fstream>
#include <memory>
#include <string>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/security/group_handshake.h"
#include "tests/support/scratch_directory.h"

namespace kvasir::proto {
namespace {

using Side = GroupSecret::Side;
using Secret = std::shared_ptr<const GroupSecret>;
using ::testing::HasSubstr;

class GroupSecretTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& text, mode_t mode = 0600) {
    const std::string path = absl::StrCat(folder_.path(), "/", ++files_);
    std::ofstream(path) << text;
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  Secret Read(const std::string& text) { return GroupSecret::Read(Write(text)).value(); }
  absl::Status Refusal(const std::string& text, mode_t mode = 0600) {
    return GroupSecret::Read(Write(text, mode)).status();
  }

  const kvasir::testing::ScratchDirectory folder_;
  int files_ = 0;
  const std::string text_ = std::string(32, 'a');
  const GroupSecret::Nonces nonces_ = {std::string(32, 'w'), std::string(32, 'c')};
};

TEST_F(GroupSecretTest, FilesThatHoldNoSecretAreRefusedByName) {
  EXPECT_THAT(std::string(Refusal(std::string(31, 'a')).message()), HasSubstr("31 bytes"));
  EXPECT_THAT(std::string(Refusal(std::string(31, 'a') + "\n\n").message()), HasSubstr("31 bytes"));
  EXPECT_THAT(std::string(Refusal(std::string(4097, 'a')).message()), HasSubstr("more than 4096"));
  for (const mode_t open : {0604u, 0602u, 0620u, 0601u}) {
    EXPECT_THAT(std::string(Refusal(text_, open).message()), HasSubstr("chmod 600")) << open;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(GroupSecret::Read(folder_.path() + "/none").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(GroupSecret::Read(folder_.path()).status()));
  EXPECT_TRUE(Refusal(text_, 0440).ok()) << "as Kubernetes mounts secrets";
  EXPECT_TRUE(Refusal(std::string(4096, 'a')).ok());
}

TEST_F(GroupSecretTest, AProofIsOfOneSideOneStreamAndOneSecret) {
  const Secret secret = Read(text_);
  const std::string proof = secret->Proof(Side::kCoordinator, nonces_);
  EXPECT_TRUE(Read(text_ + "\n")->Proves(Side::kCoordinator, nonces_, proof));
  EXPECT_FALSE(secret->Proves(Side::kWorker, nonces_, proof)) << "sent back to its sender";
  EXPECT_FALSE(
      secret->Proves(Side::kCoordinator, {std::string(32, 'x'), nonces_.coordinator}, proof));
  EXPECT_FALSE(secret->Proves(Side::kCoordinator, {nonces_.worker, std::string(32, 'x')}, proof));
  EXPECT_FALSE(Read(text_ + "a")->Proves(Side::kCoordinator, nonces_, proof));
  EXPECT_FALSE(GroupSecret::Read("").value()->Proves(Side::kCoordinator, nonces_, proof));
  EXPECT_FALSE(secret->Proves(Side::kCoordinator, nonces_, ""));
  EXPECT_FALSE(secret->Proves(Side::kCoordinator, nonces_, proof.substr(0, 31)));
  // Bytes that move from one nonce to the other.
  EXPECT_FALSE(
      secret->Proves(Side::kCoordinator, {std::string(31, 'w'), std::string(33, 'c')}, proof));
}

TEST_F(GroupSecretTest, MadeSecretsDifferAndAreTheirOwnersAlone) {
  const std::string a = folder_.path() + "/made-a", b = folder_.path() + "/made-b";
  ASSERT_TRUE(GroupSecret::Make(a).ok());
  ASSERT_TRUE(GroupSecret::Make(b).ok());
  EXPECT_FALSE(GroupSecret::Make(a).ok()) << "a secret that is there stays";
  struct stat made = {};
  ASSERT_EQ(stat(a.c_str(), &made), 0);
  EXPECT_EQ(made.st_mode & 0777, 0600u);
  EXPECT_NE(GroupSecret::Read(a).value()->Proof(Side::kWorker, nonces_),
            GroupSecret::Read(b).value()->Proof(Side::kWorker, nonces_));
}

// Whether the secret lies elsewhere too is for tests/e2e/security_test.py, from outside.
TEST_F(GroupSecretTest, CoreDumpsLeaveItsMemoryOut) {
  const auto undumped = [] {
    std::ifstream maps("/proc/self/smaps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) {
      count += line.rfind("VmFlags:", 0) == 0 && line.find(" dd") != line.npos;
    }
    return count;
  };
  const int before = undumped();
  Secret secret = Read(text_);
  EXPECT_EQ(undumped(), before + 1);
  secret.reset();
  EXPECT_EQ(undumped(), before);
}

TEST_F(GroupSecretTest, BothEndsProveTheSecretAndARecordedProofServesOnce) {
  const Secret secret = Read(text_);
  WorkerHandshake worker(secret);
  CoordinatorHandshake coordinator(secret);
  const v1::CoordinatorMessage proof = coordinator.OnMessage(worker.Challenge()).value().value();
  EXPECT_FALSE(coordinator.done());
  const v1::WorkerMessage answer = worker.Answer(proof).value();
  EXPECT_FALSE(coordinator.OnMessage(answer).value().has_value());
  EXPECT_TRUE(coordinator.done());

  WorkerHandshake later(secret);
  EXPECT_TRUE(absl::IsUnauthenticated(later.Answer(proof).status()));
  CoordinatorHandshake another(secret);
  ASSERT_TRUE(another.OnMessage(worker.Challenge()).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(another.OnMessage(answer).status()));
}

TEST_F(GroupSecretTest, NeitherEndTakesAnythingElseForAProof) {
  const Secret secret = Read(text_);
  WorkerHandshake worker(secret);
  v1::CoordinatorMessage plan;
  plan.mutable_shard_plan()->set_group_epoch(1);
  EXPECT_TRUE(absl::IsFailedPrecondition(worker.Answer(plan).status()));
  v1::WorkerMessage ready;
  ready.mutable_ready();
  EXPECT_TRUE(absl::IsUnauthenticated(CoordinatorHandshake(secret).OnMessage(ready).status()));
  v1::WorkerMessage empty;
  empty.mutable_challenge();
  EXPECT_TRUE(absl::IsUnauthenticated(CoordinatorHandshake(secret).OnMessage(empty).status()));
  CoordinatorHandshake twice(secret);
  ASSERT_TRUE(twice.OnMessage(worker.Challenge()).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(twice.OnMessage(worker.Challenge()).status()));
}

}  // namespace
}  // namespace kvasir::proto
