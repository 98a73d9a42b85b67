#include "coordinator/tokenizer/stop_matcher.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace kvasir::coordinator {
namespace {

using StopText = StopMatcher::StopText;

// Result for a whole text by the definition: the match that ends first, the longest of those.
struct Expected {
  std::string text;
  std::optional<int64_t> stopped_by;
};

Expected ByDefinition(const std::vector<std::string>& stops, const std::string& text,
                      StopText stop_text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<int64_t> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      const std::string& stop = stops[i];
      if (stop.size() > end || text.compare(end - stop.size(), stop.size(), stop) != 0) continue;
      if (!best.has_value() || stop.size() > stops[static_cast<size_t>(*best)].size()) {
        best = static_cast<int64_t>(i);
      }
    }
    if (!best.has_value()) continue;
    const size_t length = stops[static_cast<size_t>(*best)].size();
    return {text.substr(0, stop_text == StopText::kInclude ? end : end - length), best};
  }
  return {text, std::nullopt};
}

Expected Stream(const StopStrings& stops, const std::vector<std::string>& chunks,
                StopText stop_text) {
  StopMatcher matcher(stops, stop_text);
  Expected out;
  for (const std::string& chunk : chunks) {
    const StopMatcher::Output output = matcher.Push(chunk);
    out.text += output.text;
    if (output.stopped_by.has_value()) out.stopped_by = output.stopped_by;
  }
  out.text += matcher.Flush();
  return out;
}

TEST(StopMatcherTest, HoldsBackOnlyWhatMayBecomeAStopString) {
  const StopStrings stops = *StopStrings::Create({"END", "\n\n"});
  StopMatcher matcher(stops, StopText::kExclude);
  EXPECT_EQ(matcher.Push("some E").text, "some ");
  EXPECT_EQ(matcher.Push("N").text, "");
  EXPECT_EQ(matcher.Push("\n").text, "EN");
  EXPECT_EQ(matcher.Push("x\nE").text, "\nx\n");
  const StopMatcher::Output last = matcher.Push("ND and more");
  EXPECT_EQ(last.text, "");
  EXPECT_EQ(last.stopped_by, 0);
  EXPECT_EQ(matcher.Push("more").text, "");
  EXPECT_EQ(matcher.Flush(), "");
}

TEST(StopMatcherTest, MayIncludeTheStopString) {
  const StopStrings stops = *StopStrings::Create({"<|im_end|>"});
  EXPECT_EQ(Stream(stops, {"a<|im", "_end", "|>b"}, StopText::kInclude).text, "a<|im_end|>");
  EXPECT_EQ(Stream(stops, {"a<|im", "_end", "|>b"}, StopText::kExclude).text, "a");
}

TEST(StopMatcherTest, TheMatchThatIsCompleteFirstCountsThenTheLongest) {
  const StopStrings stops = *StopStrings::Create({"b", "abc", "xyz", "yz", "z"});
  EXPECT_EQ(Stream(stops, {"abc"}, StopText::kExclude).stopped_by, 0);
  EXPECT_EQ(Stream(stops, {"wxyz"}, StopText::kExclude).stopped_by, 2);
  EXPECT_EQ(Stream(stops, {"wxyz"}, StopText::kExclude).text, "w");
  EXPECT_EQ(Stream(stops, {"wyz"}, StopText::kExclude).stopped_by, 3);
  EXPECT_EQ(Stream(*StopStrings::Create({"dup", "dup"}), {"dup"}, StopText::kExclude).stopped_by,
            0);
}

TEST(StopMatcherTest, FlushGivesWhatWasHeldBack) {
  const StopStrings stops = *StopStrings::Create({"stop"});
  StopMatcher matcher(stops, StopText::kExclude);
  EXPECT_EQ(matcher.Push("a sto").text, "a ");
  EXPECT_EQ(matcher.Flush(), "sto");
  EXPECT_EQ(matcher.Flush(), "");
}

TEST(StopMatcherTest, WithoutStopStringsAllTextPasses) {
  const StopStrings stops = *StopStrings::Create({});
  StopMatcher matcher(stops, StopText::kExclude);
  EXPECT_EQ(matcher.Push("text").text, "text");
  EXPECT_EQ(matcher.Flush(), "");
}

TEST(StopMatcherTest, RefusesAnEmptyStopString) {
  const auto stops = StopStrings::Create({"a", ""});
  EXPECT_EQ(stops.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stops.status().message(), "stop string 1 is empty; leave it out or give it text");
}

TEST(StopMatcherTest, AgreesWithTheDefinitionHoweverTheTextIsCut) {
  std::mt19937 random(3);
  const auto random_text = [&](size_t max_length) {
    std::string s;
    const char* letters[] = {"a", "b", "é", "ê"};  // the last two share their first byte
    for (size_t n = 1 + random() % max_length; n > 0; --n) s += letters[random() % 4];
    return s;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::string> stop_strings(1 + random() % 5);
    for (std::string& stop : stop_strings) stop = random_text(6);
    const StopStrings stops = *StopStrings::Create(stop_strings);
    std::vector<std::string> chunks(random() % 8);
    std::string text;
    for (std::string& chunk : chunks) {
      chunk = random() % 4 == 0 ? "" : random_text(4);
      text += chunk;
    }
    for (const StopText stop_text : {StopText::kExclude, StopText::kInclude}) {
      const Expected expected = ByDefinition(stop_strings, text, stop_text);
      const Expected found = Stream(stops, chunks, stop_text);
      ASSERT_EQ(found.text, expected.text) << "round " << round;
      ASSERT_EQ(found.stopped_by, expected.stopped_by) << "round " << round;
    }
  }
}

// After every push the text held back is the longest suffix that begins a stop string.
TEST(StopMatcherTest, HoldsBackNoByteTooMany) {
  std::mt19937 random(4);
  for (int round = 0; round < 1000; ++round) {
    std::vector<std::string> stop_strings(1 + random() % 4);
    for (std::string& stop : stop_strings) {
      for (size_t n = 2 + random() % 6; n > 0; --n) stop += static_cast<char>('a' + random() % 2);
    }
    const StopStrings stops = *StopStrings::Create(stop_strings);
    StopMatcher matcher(stops, StopText::kExclude);
    std::string text;
    size_t emitted = 0;
    for (int i = 0; i < 12; ++i) {
      const std::string chunk(1, static_cast<char>('a' + random() % 3));
      text += chunk;
      const StopMatcher::Output output = matcher.Push(chunk);
      if (output.stopped_by.has_value()) break;
      emitted += output.text.size();
      size_t held = 0;
      for (const std::string& stop : stop_strings) {
        for (size_t n = 1; n < stop.size() && n <= text.size(); ++n) {
          if (text.compare(text.size() - n, n, stop, 0, n) == 0) held = std::max(held, n);
        }
      }
      ASSERT_EQ(text.size() - emitted, held) << text;
    }
  }
}

// 10,000 stop strings of a megabyte in all, and one of a megabyte that nearly matches at every
// byte. Work that is not linear takes minutes here.
TEST(StopMatcherTest, ManyAndLongStopStringsTakeLinearTime) {
  constexpr size_t kTextBytes = 1 << 20;
  std::vector<std::string> many;
  for (int i = 0; i < 10'000; ++i) many.push_back(std::string(100, 'a') + std::to_string(i));
  const StopStrings many_stops = *StopStrings::Create(many);
  EXPECT_EQ(
      Stream(many_stops, std::vector<std::string>(kTextBytes, "a"), StopText::kExclude).text.size(),
      kTextBytes);
  const StopStrings long_stop = *StopStrings::Create({std::string(kTextBytes, 'a') + "b"});
  const Expected found =
      Stream(long_stop, std::vector<std::string>(3 * kTextBytes, "a"), StopText::kExclude);
  EXPECT_EQ(found.text.size(), 3 * kTextBytes);
  EXPECT_EQ(found.stopped_by, std::nullopt);
}

}  // namespace
}  // namespace kvasir::coordinator
