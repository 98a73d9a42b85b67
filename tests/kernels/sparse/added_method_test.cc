// Adding a method takes one folder (newest/) and two lines of kernels/sparse/methods.cc: its header
// and its name. Built with these, this test finds it by name, and the tests that run over all
// methods (conformance_test.cc, selector_test.cc) find it in the list.
#include <algorithm>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/sparse/policy.h"
#include "tests/support/sparse_methods.h"

namespace kvasir::kernels {
namespace {

TEST(AddedMethodTest, IsMadeByItsName) {
  const auto selector = MakeSelector("newest");
  ASSERT_TRUE(selector.ok()) << selector.status();
  EXPECT_EQ((*selector)->MaxEntries({.budget_tokens = 130}, 1000), 3);
}

TEST(AddedMethodTest, TestsOfAllMethodsPairItWithEveryStage) {
  std::vector<std::string> names;
  for (const SparseMethod& method : AllSparseMethods()) {
    if (method.selector == "newest") names.push_back(method.Name());
  }
  EXPECT_THAT(names, testing::UnorderedElementsAre("newest", "newest+art", "newest+interval",
                                                   "newest+cosine", "newest+both", "newest+top_p",
                                                   "newest+top_p+art"));
}

}  // namespace
}  // namespace kvasir::kernels
