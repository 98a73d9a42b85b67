// Rules of the door: marks, limits, refusals, the end of the text. Agreement with Jinja is in
// golden_test.cc.
#include "coordinator/chat/chat_template.h"

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::coordinator {
namespace {

using ::testing::HasSubstr;

constexpr char kHello[] = R"([{"role": "user", "content": "hello"}])";

absl::StatusOr<MarkedText> Render(absl::string_view source, const Conversation& conversation,
                                  const RenderLimits& limits = {}) {
  const auto parsed = ChatTemplate::Parse(source, {{"bos_token", "<s>"}});
  if (!parsed.ok()) return parsed.status();
  return (*parsed)->Render(conversation, absl::UnixEpoch(), limits);
}

// Returns the text with the client's parts in brackets.
std::string Marked(absl::string_view source, const Conversation& conversation) {
  const auto text = Render(source, conversation);
  if (!text.ok()) return text.status().ToString();
  std::string out;
  size_t done = 0;
  for (const TextSpan& span : text->client_spans()) {
    absl::StrAppend(&out, text->bytes().substr(done, span.begin - done), "[",
                    text->bytes().substr(span.begin, span.end - span.begin), "]");
    done = span.end;
  }
  return absl::StrCat(out, text->bytes().substr(done));
}

std::string MarkedContent(absl::string_view expression) {
  return Marked(absl::StrCat("{% set c = messages[0].content %}<", "{{ ", expression, " }}>"),
                {.messages = R"([{"role": "user", "content": " Ab,cd "}])"});
}

TEST(ChatTemplateTest, ClientTextKeepsItsMarkThroughEveryOperation) {
  EXPECT_EQ(MarkedContent("c"), "<[ Ab,cd ]>");
  EXPECT_EQ(MarkedContent("'x' + c ~ 'y'"), "<x[ Ab,cd ]y>");
  EXPECT_EQ(MarkedContent("c | trim"), "<[Ab,cd]>");
  EXPECT_EQ(MarkedContent("c.split(',')[1].rstrip()"), "<[cd]>");
  EXPECT_EQ(MarkedContent("c | replace(',', '|')"), "<[ Ab]|[cd ]>");
  EXPECT_EQ(MarkedContent("'x,y' | replace('x', c)"), "<[ Ab,cd ],y>");
  EXPECT_EQ(MarkedContent("('(' + c + ')')[0:3]"), "<([ A]>");
  EXPECT_EQ(MarkedContent("c | upper"), "<[ AB,CD ]>");
  EXPECT_EQ(MarkedContent("{'k': c} | tojson"), R"(<{"k": [" Ab,cd "]}>)");
  EXPECT_EQ(MarkedContent("[c]"), "<[[' Ab,cd ']]>");
  EXPECT_EQ(MarkedContent("[c, c] | join('-')"), "<[ Ab,cd ]-[ Ab,cd ]>");
  EXPECT_EQ(MarkedContent("c | list | first"), "<[ ]>");
  EXPECT_EQ(MarkedContent("c | length"), "<7>");
}

TEST(ChatTemplateTest, KeysToolsVariablesAndUnknownRolesAreTheClients) {
  EXPECT_EQ(Marked("{{ tools | tojson }}{{ v }}{% for k in messages[0] %}{{ k }}{% endfor %}",
                   {.messages = R"([{"role": "user", "x<s>": 1}])",
                    .tools = R"([{"a": "b"}])",
                    .variables = R"({"v": "w"})"}),
            R"([{["a"]: ["b"]}][wrolex<s>])");
  EXPECT_EQ(Marked("{% for m in messages %}<|{{ m.role }}|>{% endfor %}",
                   {.messages = R"([{"role": "user"}, {"role": "end"}])"}),
            "<|user|><|[end]|>");
}

TEST(ChatTemplateTest, TheTextEndsAsAsked) {
  constexpr char kSource[] =
      "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}{% if add_generation_prompt "
      "%}A{% "
      "endif %}";
  EXPECT_EQ(Marked(kSource, {.messages = kHello}), "<[hello]>A");
  EXPECT_EQ(Marked(kSource, {.messages = kHello, .end = Conversation::End::kLastMessage}),
            "<[hello]>");
  Conversation continued{.messages = R"([{"role": "assistant", "content": "I am "}])",
                         .end = Conversation::End::kContinuesLastMessage};
  EXPECT_EQ(Marked(kSource, continued), "<[I am]");
  EXPECT_EQ(Marked("{{ messages[0].content }}>", continued), "[I am ]");
  EXPECT_THAT(Marked("nothing", continued), HasSubstr("leaves out the end of the last message"));
  continued.messages = R"([{"role": "user", "content": [{"text": "a"}, {"type": "image"}]}])";
  EXPECT_EQ(Marked("{{ messages[0].content[0].text }}>", continued), "[a]");
}

TEST(ChatTemplateTest, ATemplateRefusesInItsOwnWords) {
  const auto refused =
      Render("{{ raise_exception('Not ' ~ messages[0].role) }}", {.messages = kHello});
  EXPECT_EQ(refused.status(), absl::InvalidArgumentError("Not user"));
}

// Logs leave out what is quoted (so it was: a client's text reached the log).
TEST(ChatTemplateTest, ARefusalQuotesTheClientsText) {
  const auto refused =
      Render("{{ raise_exception('Not ' ~ messages[0].role ~ '; ' ~ messages[0].content) }}",
             {.messages = R"([{"role": "robot", "content": "hello"}])"});
  EXPECT_EQ(refused.status(), absl::InvalidArgumentError("Not \"robot\"; \"hello\""));
}

TEST(ChatTemplateTest, ErrorsAreShort) {
  const std::string longest(100'000, 'x');
  const std::string messages = absl::StrCat(R"([{"role": ")", longest, R"("}])");
  for (const char* source :
       {"{{ raise_exception(messages[0].role) }}", "{{ messages[0][messages[0].role].a }}"}) {
    const auto refused = Render(source, {.messages = messages});
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_LT(refused.status().message().size(), 1100);
  }
}

// The quotation of an escape ended within a character; absl takes blanks for digits.
TEST(ChatTemplateTest, AnEscapeThatIsNoCharacterIsRefusedInUtf8) {
  EXPECT_THAT(Render("{{ '\\u0\u041A\u01A1' }}", {.messages = kHello}).status().message(),
              HasSubstr("the escape \\u0\u041A... is no character"));
  EXPECT_THAT(Render("{{ '\\x 1' }}", {.messages = kHello}).status().message(),
              HasSubstr("the escape \\x 1 is no character"));
}

TEST(ChatTemplateTest, ErrorsTellTheLine) {
  EXPECT_THAT(Render("a\n{{ 1 + }}", {.messages = kHello}).status().message(),
              HasSubstr("line 2: an expression is missing"));
  EXPECT_THAT(Render("a\nb\n{{ x.y }}", {.messages = kHello}).status().message(),
              HasSubstr("line 3: 'x' is undefined, so it has no y"));
  EXPECT_THAT(Render("{{ 1 | nope }}", {.messages = kHello}).status().message(),
              HasSubstr("no filter 'nope'"));
  EXPECT_THAT(Render("{% include 'x' %}", {.messages = kHello}).status().message(),
              HasSubstr("line 1: this statement is not one that chat templates use"));
}

TEST(ChatTemplateTest, ConversationsAreChecked) {
  const auto error = [](const Conversation& conversation) {
    return std::string(Render("x", conversation).status().message());
  };
  EXPECT_EQ(error({.messages = "[}"}), "messages: it is not JSON, at byte 2");
  EXPECT_EQ(error({.messages = "[]"}), "messages is not an array with at least one message");
  EXPECT_EQ(error({.messages = "[1]"}), "messages[0] is a int; it must be an object");
  EXPECT_EQ(error({.messages = R"([{"role": 1}])"}),
            "messages[0] has no role, which must be a string");
  EXPECT_EQ(error({.messages = R"([{"role": "a", "role": "b"}])"}),
            R"(messages: the key "role" is there twice)");
  EXPECT_EQ(error({.messages = "[18446744073709551616]"}),
            "messages: a number is larger than 64 bits hold");
  EXPECT_EQ(error({.messages = std::string(100'000, '[')}),
            "messages: it is nested more than 48 deep");
  EXPECT_EQ(error({.messages = kHello, .tools = "{}"}), "tools is not an array");
  EXPECT_EQ(error({.messages = kHello, .variables = "[]"}), "template_kwargs is not an object");
}

TEST(ChatTemplateTest, NoTemplateTakesMoreThanTheLimits) {
  const std::pair<const char*, const char*> hostile[] = {
      {"{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
       "too much text"},
      {"{{ range(1000000000) | length }}", "too much text"},
      {"{{ 'xxxxxxxxxxxxxxxx' * 1000000000 }}", "too much text"},
      {"{% set ns = namespace(a='x' * 1000) %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a "
       "%}{% endfor %}",
       "too much text"},
      {"{% set ns = namespace(a=[]) %}{% for i in range(999) %}{% set ns.a = [ns.a] %}{% endfor %}",
       "nested too deeply"},
      {"{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% "
       "endfor %}{{ ns.a == ns.a }}",
       "too many steps"},
      {"{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% "
       "endfor %}{{ ns.a | tojson }}",
       "too many steps"},
      {"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"},
  };
  for (const auto& [source, words] : hostile) {
    SCOPED_TRACE(source);
    const auto begin = std::chrono::steady_clock::now();
    const auto text =
        Render(source, {.messages = kHello}, {.max_steps = 2'000'000, .max_bytes = 16 << 20});
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(text.status().message(), HasSubstr(words));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  }
}

TEST(ChatTemplateTest, NestingOfTheSourceIsLimited) {
  const std::string many(100'000, '(');
  const auto repeated = [](absl::string_view part, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) absl::StrAppend(&text, part);
    return text;
  };
  const std::string sources[] = {"{{ " + many + "1" + std::string(100'000, ')') + " }}",
                                 "{{ " + std::string(100'000, '-') + "1 }}",
                                 "{{ 1" + repeated("+1", 10'000) + " }}",
                                 "{{ " + repeated("not ", 10'000) + "1 }}",
                                 "{{ x" + repeated(".a", 10'000) + " }}",
                                 "{{ x" + repeated("|trim", 10'000) + " }}",
                                 "{{ " + repeated("1 if 1 else ", 10'000) + "1 }}",
                                 repeated("{% if 1 %}", 10'000)};
  for (const std::string& source : sources) {
    SCOPED_TRACE(source.substr(0, 20));
    EXPECT_THAT(ChatTemplate::Parse(source, {}).status().message(), HasSubstr("nested too deeply"));
  }
}

TEST(ChatTemplateTest, NullMembersAreLeftOutAndReasoningHasItsNames) {
  EXPECT_EQ(Marked("{{ messages[0].a is defined }} {{ messages[0].reasoning_content }} {{ "
                   "messages[0].thinking }}",
                   {.messages = R"([{"role": "assistant", "a": null, "reasoning": "r"}])"}),
            "False [r] [r]");
}

TEST(ChatTemplateTest, PartsOfTextAreJoinedWhereTheTemplateTakesText) {
  const Conversation parts = {.messages =
                                  R"([{"role": "user", "content": [{"type": "text", "text": "a"},
                                                   {"type": "text", "text": "b"}]}])"};
  const Conversation image = {
      .messages =
          R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}])"};
  const char* text = "{{ messages[0].content }}";
  EXPECT_EQ(Marked(text, parts), "[a\nb]");
  EXPECT_THAT(Marked(text, image), HasSubstr("'type'"));
  EXPECT_EQ(Marked("{{ messages[0].content + '.' }}", parts), "[a\nb].");
  EXPECT_EQ(Marked("{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}", parts),
            "<[a]><[b]>");
  EXPECT_EQ(Marked("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
                   "{{ messages[0].content | map(attribute='text') | join('|') }}{% endif %}",
                   parts),
            "[a]|[b]");
}

}  // namespace
}  // namespace kvasir::coordinator
