#include "worker/checkpoint/safetensors.h"

#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <map>
#include <string>
#include <sys/stat.h>
#include <utility>

#include "absl/strings/str_cat.h"

#include "tests/worker/model/test_files.h"

namespace kvasir::worker {
namespace {

using ::testing::HasSubstr;

constexpr char kCorpus[] = "tests/fuzz/corpus/safetensors";

// File of the corpus -> text that the message must contain.
constexpr std::pair<const char*, const char*> kExpectedMessages[] = {
    {"bad_empty", "has 0 bytes, expected a safetensors file of at least 8"},
    {"bad_three_bytes", "has 3 bytes, expected a safetensors file of at least 8"},
    {"bad_length_beyond_file", "the header claims 100 bytes, expected at most 54"},
    {"bad_length_above_limit", "the header claims 16777217 bytes"},
    {"bad_length_100_mb", "the header claims 104857600 bytes"},
    {"bad_length_2_63", "the header claims 9223372036854775808 bytes"},
    {"bad_length_2_64", "the header claims 18446744073709551615 bytes"},
    {"bad_length_zero", "expected it to begin with {"},
    {"bad_length_too_short", "not valid JSON at byte 2"},
    {"bad_not_json", "not valid JSON at byte 2"},
    {"bad_cut", "not valid JSON at byte 3"},
    {"bad_second_value", "not valid JSON at byte 62"},
    {"bad_nul_then_more", "not valid JSON at byte 61: a NUL byte"},
    {"bad_comment", "not valid JSON at byte 2"},
    {"bad_byte_order_mark", "expected it to begin with {"},
    {"bad_leading_space", "expected it to begin with {"},
    {"bad_array", "expected it to begin with {"},
    {"bad_deep_nesting", "\"a\" is an array, expected an object"},
    {"bad_deep_objects", "\"a\": has the field \"a\", expected dtype, shape, data_offsets"},
    {"bad_deep_metadata", "\"__metadata__\": holds an array, expected texts only"},
    {"bad_utf8_in_name", "ill-formed UTF-8 byte"},
    {"bad_utf8_overlong", "ill-formed UTF-8 byte"},
    {"bad_utf8_in_metadata", "ill-formed UTF-8 byte"},
    {"bad_lone_surrogate", "surrogate"},
    {"bad_number_overflow", "not valid JSON"},
    {"bad_duplicate_name", "the name \"a\" appears twice among the tensors"},
    {"bad_duplicate_name_escaped", "the name \"a\" appears twice among the tensors"},
    {"bad_duplicate_metadata", "the name \"__metadata__\" appears twice among the tensors"},
    {"bad_duplicate_metadata_key", "the name \"k\" appears twice among the entries"},
    {"bad_duplicate_field", "\"a\": has the field \"dtype\" twice"},
    {"bad_metadata_text", "\"__metadata__\" is a text, expected an object"},
    {"bad_metadata_number", "\"__metadata__\": holds the number 1, expected texts only"},
    {"bad_metadata_object", "\"__metadata__\": holds an object, expected texts only"},
    {"bad_metadata_null", "\"__metadata__\": holds null, expected texts only"},
    {"bad_tensor_null", "\"a\" is null, expected an object"},
    {"bad_tensor_list", "\"a\" is an array, expected an object"},
    {"bad_tensor_empty", "\"a\": expected a dtype, a shape and data_offsets of two numbers"},
    {"bad_unknown_field", "\"a\": has the field \"strides\", expected dtype, shape"},
    {"bad_missing_dtype", "\"a\": expected a dtype, a shape and data_offsets"},
    {"bad_missing_shape", "\"a\": expected a dtype, a shape and data_offsets"},
    {"bad_missing_offsets", "\"a\": expected a dtype, a shape and data_offsets"},
    {"bad_dtype_unknown", "\"a\": dtype is \"F31\", expected a dtype of the safetensors format"},
    {"bad_dtype_lower_case", "\"a\": dtype is \"f32\", expected"},
    {"bad_dtype_number", "\"a\": dtype is the number 32, expected a text"},
    {"bad_rank_9", "\"a\": shape has more than 8 numbers"},
    {"bad_rank_huge", "\"a\": shape has more than 8 numbers"},
    {"bad_shape_negative", "\"a\": shape holds the number -2, expected whole numbers"},
    {"bad_shape_fraction", "\"a\": shape holds the number \"2.0\", expected whole numbers"},
    {"bad_shape_exponent", "\"a\": shape holds the number \"2e0\", expected whole numbers"},
    {"bad_shape_text", "\"a\": shape holds a text, expected whole numbers"},
    {"bad_shape_nested", "\"a\": shape holds an array, expected whole numbers"},
    {"bad_shape_bool", "\"a\": shape holds true, expected whole numbers"},
    {"bad_shape_number", "\"a\": shape is the number 2, expected an array"},
    {"bad_shape_2_63", "\"a\": shape holds the number 9223372036854775808, expected"},
    {"bad_shape_2_64", "\"a\": shape holds the number \"18446744073709551616\", expected"},
    {"bad_shape_wraps_to_zero", "the size of F32[4294967296, 4294967296] passes 2^63 bits"},
    {"bad_shape_wraps_to_size", "the size of F32[4611686018427387906] passes 2^63 bits"},
    {"bad_shape_wraps_before_zero", "the size of F32[4611686018427387904, 0] passes 2^63"},
    {"bad_offsets_reversed", "\"a\": data_offsets are [8, 0], expected a range within the 8"},
    {"bad_offsets_beyond_data", "data_offsets are [0, 16], expected a range within the 8 bytes"},
    {"bad_offsets_far_beyond", "expected a range within the 8 bytes of data"},
    {"bad_offsets_2_64", "data_offsets holds the number 18446744073709551615, expected whole"},
    {"bad_offsets_negative", "data_offsets holds the number -8, expected whole numbers"},
    {"bad_offsets_one", "expected a dtype, a shape and data_offsets of two numbers"},
    {"bad_offsets_three", "data_offsets has more than 2 numbers"},
    {"bad_size_too_small", "\"a\": data_offsets hold 8 bytes, expected 96 bits for F32[3]"},
    {"bad_size_too_large", "\"a\": data_offsets hold 8 bytes, expected 32 bits for F32[1]"},
    {"bad_bits_not_whole_bytes", "data_offsets hold 1 bytes, expected 12 bits for F4[3]"},
    {"bad_overlap", "\"b\": begins at byte 4 of the data, expected 8 (an overlap)"},
    {"bad_inside", "\"b\": begins at byte 4 of the data, expected 16 (an overlap)"},
    {"bad_same_range", "\"b\": begins at byte 0 of the data, expected 8 (an overlap)"},
    {"bad_zero_size_inside", "\"b\": begins at byte 4 of the data, expected 8 (an overlap)"},
    {"bad_hole", "\"b\": begins at byte 12 of the data, expected 8 (a hole)"},
    {"bad_hole_at_begin", "\"a\": begins at byte 4 of the data, expected 0 (a hole)"},
    {"bad_trailing_bytes", "the tensors end at byte 8 of the data, expected 9: trailing bytes"},
    {"bad_data_without_tensors", "the tensors end at byte 0 of the data, expected 8"},
};
std::map<std::string, std::string> ExpectedMessages() {
  return {std::begin(kExpectedMessages), std::end(kExpectedMessages)};
}

std::vector<std::byte> ReadAll(const SafetensorsFolder& folder, const std::string& name,
                               const MatrixSlice& slice, int64_t element_bytes) {
  std::vector<std::byte> out(static_cast<size_t>(slice.rows() * slice.cols() * element_bytes));
  const absl::Status status = folder.ReadSlice(name, slice, out);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

TEST(SafetensorsCorpus, EveryHostileFileIsRefusedWithItsReason) {
  const std::map<std::string, std::string> messages = ExpectedMessages();
  int num_bad = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kCorpus)) {
    const std::string name = entry.path().filename();
    const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(entry.path());
    if (name.starts_with("ok_")) {
      EXPECT_TRUE(file.ok()) << name << ": " << file.status();
      continue;
    }
    ++num_bad;
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << name;
    const auto expected = messages.find(name);
    ASSERT_NE(expected, messages.end()) << name << " has no expected message";
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(expected->second)) << name;
    EXPECT_THAT(std::string(file.status().message()), HasSubstr(entry.path())) << name;
  }
  EXPECT_EQ(num_bad, static_cast<int>(messages.size()));
}

TEST(SafetensorsCorpus, EveryPrefixOfAGoodFileIsRefused) {
  const TemporaryFolder folder;
  const std::string whole = ReadFile(std::string(kCorpus) + "/ok_metadata");
  for (size_t size = 0; size < whole.size(); ++size) {
    WriteFile(folder.File("cut"), whole.substr(0, size));
    EXPECT_FALSE(SafetensorsFile::Open(folder.File("cut")).ok()) << "cut after " << size;
  }
}

TEST(SafetensorsCorpus, EveryFlippedBitIsAnErrorOrAnotherGoodFile) {
  const TemporaryFolder folder;
  const std::string whole = ReadFile(std::string(kCorpus) + "/ok_not_in_order");
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    WriteFile(folder.File("model.safetensors"), flipped);
    const absl::StatusOr<SafetensorsFolder> model = SafetensorsFolder::Open(folder.path());
    if (!model.ok()) continue;
    for (const auto& [name, info] : model->tensors()) {
      EXPECT_LE(info.data_end, model->files()[0].data_size_bytes());
    }
  }
}

TEST(SafetensorsHeader, LimitsAreExact) {
  const auto header_of = [](int64_t num_tensors) {
    std::string header = "{";
    for (int64_t i = 0; i < num_tensors; ++i) {
      absl::StrAppend(&header, i > 0 ? "," : "", "\"t", i,
                      "\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[", i, ",", i + 1, "]}");
    }
    return header + "}";
  };
  EXPECT_TRUE(
      ParseSafetensorsHeader(header_of(kMaxSafetensorsTensors), kMaxSafetensorsTensors).ok());
  const auto too_many =
      ParseSafetensorsHeader(header_of(kMaxSafetensorsTensors + 1), kMaxSafetensorsTensors + 1);
  EXPECT_THAT(std::string(too_many.status().message()), HasSubstr("more than 20000 tensors"));

  std::string padded(kMaxSafetensorsHeaderBytes, ' ');
  padded.replace(0, 2, "{}");
  EXPECT_TRUE(ParseSafetensorsHeader(padded, 0).ok());
  padded += ' ';
  EXPECT_FALSE(ParseSafetensorsHeader(padded, 0).ok());
}

TEST(SafetensorsFile, HeaderAboveTheLimitIsRefusedThoughTheFileHasIt) {
  const TemporaryFolder folder;
  const std::string path = folder.File("sparse");
  WriteFile(path, LittleEndian64(100 << 20));
  std::filesystem::resize_file(path, 200 << 20);
  EXPECT_THAT(
      std::string(SafetensorsFile::Open(path).status().message()),
      HasSubstr("claims 104857600 bytes, expected at most 16777216 (the limit of headers)"));
}

TEST(SafetensorsFile, OnlyRegularFiles) {
  const TemporaryFolder folder;
  EXPECT_EQ(SafetensorsFile::Open(folder.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(mkfifo(folder.File("fifo").c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::Open(folder.File("fifo")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open(folder.File("none")).status().code(),
            absl::StatusCode::kNotFound);
}

class SafetensorsFolderTest : public testing::Test {
 protected:
  void WriteIndex(const std::string& weight_map) {
    WriteFile(folder_.File("model.safetensors.index.json"),
              "{\"metadata\":{\"total_size\":16},\"weight_map\":" + weight_map + "}");
  }
  // Two shards with one tensor each.
  void WriteTwoShards() {
    WriteFile(folder_.File("one.safetensors"), SafetensorsBytes({{"a", "F32", {2}, "aaaaAAAA"}}));
    WriteFile(folder_.File("two.safetensors"), SafetensorsBytes({{"b", "F32", {2}, "bbbbBBBB"}}));
  }
  std::string OpenError() {
    const absl::Status status = SafetensorsFolder::Open(folder_.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  }

  TemporaryFolder folder_;
};

TEST_F(SafetensorsFolderTest, ReadsAnySliceOfAMatrix) {
  std::string data;
  for (char c = 0; c < 24; ++c) data += {c, static_cast<char>(c + 100)};
  WriteFile(folder_.File("model.safetensors"),
            SafetensorsBytes({{"before", "F16", {1}, "xx"}, {"m", "BF16", {4, 6}, data}}));
  const auto model = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->Find("m")->DebugString(), "BF16[4, 6]");
  EXPECT_EQ(model->Find("n"), nullptr);
  for (int64_t r0 = 0; r0 <= 4; ++r0) {
    for (int64_t r1 = r0; r1 <= 4; ++r1) {
      for (int64_t c0 = 0; c0 <= 6; ++c0) {
        for (int64_t c1 = c0; c1 <= 6; ++c1) {
          std::vector<std::byte> expected;
          for (int64_t r = r0; r < r1; ++r) {
            for (int64_t c = c0; c < c1; ++c) {
              expected.push_back(static_cast<std::byte>(r * 6 + c));
              expected.push_back(static_cast<std::byte>(r * 6 + c + 100));
            }
          }
          ASSERT_EQ(ReadAll(*model, "m", {r0, r1, c0, c1}, 2), expected);
        }
      }
    }
  }
}

TEST_F(SafetensorsFolderTest, VectorsAndScalarsAreMatricesToo) {
  WriteFile(folder_.File("model.safetensors"),
            SafetensorsBytes({{"scalar", "BF16", {}, "ab"}, {"vector", "BF16", {2}, "cdef"}}));
  const auto model = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(ReadAll(*model, "scalar", {0, 1, 0, 1}, 2),
            (std::vector<std::byte>{std::byte{'a'}, std::byte{'b'}}));
  EXPECT_EQ(ReadAll(*model, "vector", {1, 2, 0, 1}, 2),
            (std::vector<std::byte>{std::byte{'e'}, std::byte{'f'}}));
}

TEST_F(SafetensorsFolderTest, OtherDtypesAreListedButNotRead) {
  WriteFile(folder_.File("model.safetensors"), ReadFile(std::string(kCorpus) + "/ok_all_dtypes"));
  const auto model = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::byte> out(16);
  EXPECT_EQ(model->Find("F64")->DebugString(), "F64[2]");
  const absl::Status status = model->ReadSlice("F64", {0, 2, 0, 1}, out);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()), HasSubstr("\"F64\" is F64[2], expected F32"));
}

TEST_F(SafetensorsFolderTest, AFileThatShrinksIsDataLoss) {
  WriteFile(folder_.File("model.safetensors"), SafetensorsBytes({{"a", "F32", {2}, "aaaaAAAA"}}));
  const auto model = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(model.ok()) << model.status();
  std::filesystem::resize_file(folder_.File("model.safetensors"),
                               std::filesystem::file_size(folder_.File("model.safetensors")) - 1);
  std::vector<std::byte> out(8);
  const absl::Status status = model->ReadSlice("a", {0, 2, 0, 1}, out);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("was changed since"));
}

TEST_F(SafetensorsFolderTest, ReadsShards) {
  WriteTwoShards();
  WriteIndex(R"({"a": "one.safetensors", "b": "two.safetensors"})");
  const auto model = SafetensorsFolder::Open(folder_.path());
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_EQ(model->files().size(), 2u);
  EXPECT_EQ(ReadAll(*model, "a", {0, 1, 0, 1}, 4)[0], std::byte{'a'});
  EXPECT_EQ(ReadAll(*model, "b", {1, 2, 0, 1}, 4)[0], std::byte{'B'});
}

TEST_F(SafetensorsFolderTest, IndexAndShardsMustAgree) {
  WriteTwoShards();
  WriteIndex(R"({"a": "two.safetensors", "b": "two.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("says that \"a\" lies in two.safetensors, but it does not"));
  WriteIndex(R"({"a": "one.safetensors", "b": "one.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("says that \"b\" lies in one.safetensors, but it does not"));
  WriteFile(folder_.File("two.safetensors"),
            SafetensorsBytes({{"b", "F32", {1}, "bbbb"}, {"c", "F32", {1}, "cccc"}}));
  WriteIndex(R"({"a": "one.safetensors", "b": "two.safetensors"})");
  EXPECT_THAT(OpenError(),
              HasSubstr("\"c\" lies in two.safetensors, but the index does not list it"));
  WriteIndex(R"({"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})");
  EXPECT_THAT(OpenError(),
              HasSubstr("\"c\" lies in two.safetensors, but the index says one.safetensors"));
}

TEST_F(SafetensorsFolderTest, ShardNamesCannotLeaveTheFolder) {
  const TemporaryFolder outside;
  WriteTwoShards();
  WriteFile(outside.File("x.safetensors"), SafetensorsBytes({{"a", "F32", {1}, "aaaa"}}));
  for (const std::string& name :
       {outside.File("x.safetensors"), std::string("../x.safetensors"),
        std::string("./x.safetensors"), std::string(".."), std::string(""),
        std::string("x/../one.safetensors"), std::string("one.safetensors\\u0000"),
        std::string("one.bin"), std::string(300, 'a')}) {
    WriteIndex("{\"a\": \"" + name + "\"}");
    EXPECT_THAT(OpenError(), HasSubstr("expected the plain name of a .safetensors file")) << name;
  }
  WriteIndex(R"({"a": 1})");
  EXPECT_THAT(OpenError(), HasSubstr("\"a\" is in 1, expected the plain name"));
}

TEST_F(SafetensorsFolderTest, MalformedIndices) {
  WriteTwoShards();
  for (const std::string& index :
       {std::string("[]"), std::string("{}"), std::string("{\"weight_map\":[]}"),
        std::string("{\"weight_map\":{"), std::string(100, '[')}) {
    WriteFile(folder_.File("model.safetensors.index.json"), index);
    OpenError();
  }
  WriteIndex(R"({"a": "one.safetensors", "a": "two.safetensors"})");
  EXPECT_THAT(OpenError(), HasSubstr("the key \"a\" appears twice in one object"));
}

TEST_F(SafetensorsFolderTest, MissingFilesAreNamed) {
  EXPECT_THAT(std::string(SafetensorsFolder::Open(folder_.path()).status().message()),
              HasSubstr("expected model.safetensors or model.safetensors.index.json"));
  WriteIndex(R"({"a": "one.safetensors"})");
  const absl::Status status = SafetensorsFolder::Open(folder_.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/one.safetensors"));
}

TEST_F(SafetensorsFolderTest, LongAndBinaryNamesAreShownCutAndEscaped) {
  const std::string name = "\n\x1b[31m" + std::string(10'000, 'a');
  WriteFile(folder_.File("model.safetensors"), SafetensorsBytes({{name, "F32", {3}, "aaaa"}}));
  const std::string message = OpenError();
  EXPECT_THAT(message, HasSubstr("\"\\n\\x1b[31maaa"));
  EXPECT_LT(message.size(), 500u);
}

}  // namespace
}  // namespace kvasir::worker
