#include "coordinator/chat/values/python_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "coordinator/chat/values/text_operations.h"
#include "coordinator/tokenizer/unicode/utf8.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

using Source = MarkedText::Source;

// Both writers make text piece by piece; each piece is charged.
class Writer {
 public:
  explicit Writer(Budget* budget) : budget_(*budget) {}
  MarkedText Take() { return std::move(out_); }

 protected:
  absl::Status Put(absl::string_view text) {
    KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(text.size()));
    out_.Append(text, Source::kTemplate);
    return absl::OkStatus();
  }
  absl::Status Put(const MarkedText& text) {
    KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(text.size()));
    out_.Append(text);
    return absl::OkStatus();
  }

  Budget& budget_;
  MarkedText out_;
};

std::string ReprOf(absl::string_view text) {
  const bool has_single = text.find('\'') != absl::string_view::npos;
  const char quote = has_single && text.find('"') == absl::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Unit unit = CodePointAt(text, pos);
    const char32_t c = unit.value;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      absl::StrAppend(&out, "\\", text.substr(pos, 1));
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : (c == '\r' ? "\\r" : "\\t");
    } else if (IsPrintable(c)) {
      absl::StrAppend(&out, text.substr(pos, unit.length));
    } else if (c < 0x100) {
      absl::StrAppend(&out, "\\x", absl::Hex(static_cast<uint32_t>(c), absl::kZeroPad2));
    } else if (c < 0x10000) {
      absl::StrAppend(&out, "\\u", absl::Hex(static_cast<uint32_t>(c), absl::kZeroPad4));
    } else {
      absl::StrAppend(&out, "\\U", absl::Hex(static_cast<uint32_t>(c), absl::kZeroPad8));
    }
    pos += unit.length;
  }
  return out + quote;
}

class ReprWriter : public Writer {
 public:
  using Writer::Writer;

  absl::Status Write(const Value& value) {
    if (const MarkedText* text = value.text()) return Put(text->Remade(ReprOf(text->bytes())));
    if (const List* list = value.list()) {
      const bool tuple = list->kind == List::Kind::kTuple;
      KVASIR_RETURN_IF_ERROR(Put(tuple ? "(" : "["));
      for (size_t i = 0; i < list->elements.size(); ++i) {
        if (i > 0) KVASIR_RETURN_IF_ERROR(Put(", "));
        KVASIR_RETURN_IF_ERROR(Write(list->elements[i]));
      }
      return Put(tuple ? (list->elements.size() == 1 ? ",)" : ")") : "]");
    }
    if (const Dict* dict = value.dict()) {
      KVASIR_RETURN_IF_ERROR(Put("{"));
      for (size_t i = 0; i < dict->entries.size(); ++i) {
        if (i > 0) KVASIR_RETURN_IF_ERROR(Put(", "));
        KVASIR_RETURN_IF_ERROR(Write(dict->entries[i].first));
        KVASIR_RETURN_IF_ERROR(Put(": "));
        KVASIR_RETURN_IF_ERROR(Write(dict->entries[i].second));
      }
      return Put("}");
    }
    if (value.IsUndefined()) return Put("Undefined");
    return Put(Scalar(value));
  }

  static std::string Scalar(const Value& value) {
    if (const bool* boolean = value.boolean()) return *boolean ? "True" : "False";
    if (const int64_t* integer = value.integer()) return absl::StrCat(*integer);
    if (const double* real = value.real()) return PythonReal(*real);
    if (value.IsNone()) return "None";
    return absl::StrCat("<", value.TypeName(), ">");
  }
};

std::string JsonString(absl::string_view text, bool ensures_ascii) {
  std::string out = "\"";
  for (size_t pos = 0; pos < text.size();) {
    const Utf8Unit unit = CodePointAt(text, pos);
    const char32_t c = unit.value;
    constexpr absl::string_view kEscaped = "\"\\\n\r\t\f\b";
    constexpr absl::string_view kEscapes = "\"\\nrtfb";
    const size_t known = c < 0x80 ? kEscaped.find(static_cast<char>(c)) : absl::string_view::npos;
    if (known != absl::string_view::npos) {
      out += '\\';
      out += kEscapes[known];
    } else if (c >= 0x10000 && ensures_ascii) {
      const uint32_t rest = static_cast<uint32_t>(c) - 0x10000;
      absl::StrAppendFormat(&out, "\\u%04x\\u%04x", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
    } else if (c < 0x20 || (c > 0x7E && ensures_ascii)) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<uint32_t>(c));
    } else {
      absl::StrAppend(&out, text.substr(pos, unit.length));
    }
    pos += unit.length;
  }
  return out + '"';
}

class JsonWriter : public Writer {
 public:
  JsonWriter(const JsonFormat& format, Budget* budget) : Writer(budget), format_(format) {}

  absl::Status Write(const Value& value, int64_t level) {
    if (const MarkedText* text = value.text()) {
      return Put(text->Remade(JsonString(text->bytes(), format_.ensures_ascii)));
    }
    if (const List* list = value.list(); list != nullptr && list->kind != List::Kind::kGenerator) {
      return WriteParts("[", "]", list->elements.size(), level,
                        [&](size_t i) { return Write(list->elements[i], level + 1); });
    }
    if (const Dict* dict = value.dict()) return WriteDict(*dict, level);
    if (const bool* boolean = value.boolean()) return Put(*boolean ? "true" : "false");
    if (const double* real = value.real()) {
      if (std::isnan(*real)) return Put("NaN");
      if (std::isinf(*real)) return Put(*real > 0 ? "Infinity" : "-Infinity");
    }
    if (value.AsNumber().has_value()) return Put(ReprWriter::Scalar(value));
    if (value.IsNone()) return Put("null");
    return absl::InvalidArgumentError(
        absl::StrCat("tojson: JSON has no form for a value of type ", value.TypeName()));
  }

 private:
  template <typename WritePart>
  absl::Status WriteParts(absl::string_view open, absl::string_view close, size_t count,
                          int64_t level, WritePart write) {
    KVASIR_RETURN_IF_ERROR(Put(open));
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) {
        KVASIR_RETURN_IF_ERROR(
            Put(format_.item_separator.value_or(format_.indent.has_value() ? "," : ", ")));
      }
      KVASIR_RETURN_IF_ERROR(PutLine(level + 1));
      KVASIR_RETURN_IF_ERROR(write(i));
    }
    if (count > 0) KVASIR_RETURN_IF_ERROR(PutLine(level));
    return Put(close);
  }

  absl::Status PutLine(int64_t level) {
    if (!format_.indent.has_value()) return absl::OkStatus();
    const auto width = static_cast<size_t>(*format_.indent * level);
    KVASIR_RETURN_IF_ERROR(budget_.SpendBytes(width));
    return Put(absl::StrCat("\n", std::string(width, ' ')));
  }

  absl::Status WriteDict(const Dict& dict, int64_t level) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (format_.sorts_keys) {
      std::stable_sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
        const absl::StatusOr<int> order = Compare(a->first, b->first);
        return order.ok() && *order < 0;
      });
    }
    return WriteParts("{", "}", entries.size(), level, [&](size_t i) -> absl::Status {
      const Value& key = entries[i]->first;
      if (key.text() != nullptr) {
        KVASIR_RETURN_IF_ERROR(Write(key, level));
      } else {
        KVASIR_RETURN_IF_ERROR(Put("\""));
        KVASIR_RETURN_IF_ERROR(Write(key, level));
        KVASIR_RETURN_IF_ERROR(Put("\""));
      }
      KVASIR_RETURN_IF_ERROR(Put(format_.key_separator));
      return Write(entries[i]->second, level + 1);
    });
  }

  const JsonFormat& format_;
};

}  // namespace

absl::StatusOr<MarkedText> PythonText(const Value& value, Budget* budget) {
  if (value.IsUndefined()) return MarkedText();
  if (const MarkedText* text = value.text()) {
    KVASIR_RETURN_IF_ERROR(budget->SpendBytes(text->size()));
    return *text;
  }
  ReprWriter writer(budget);
  KVASIR_RETURN_IF_ERROR(writer.Write(value));
  return writer.Take();
}

absl::StatusOr<MarkedText> JsonText(const Value& value, const JsonFormat& format, Budget* budget) {
  JsonWriter writer(format, budget);
  KVASIR_RETURN_IF_ERROR(writer.Write(value, 0));
  return writer.Take();
}

std::string PythonReal(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double size = std::abs(value);
  const bool plain = value == 0 || (size >= 1e-4 && size < 1e16);
  const auto end = std::to_chars(std::begin(buffer), std::end(buffer), value,
                                 plain ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, end.ptr);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::optional<double> ParseReal(absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value)) return std::nullopt;
  return value;
}

}  // namespace kvasir::coordinator
