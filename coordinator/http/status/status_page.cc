#include "coordinator/http/status/status_page.h"

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "coordinator/security/sha256.h"
#include "kernels/base/status_macros.h"

namespace kvasir::coordinator {
namespace {

// Returns what stands between <name> and </name>.
absl::string_view ContentOf(absl::string_view name, absl::string_view page) {
  const std::string opening = absl::StrCat("<", name, ">");
  const size_t begin = page.find(opening);
  const size_t end = page.find(absl::StrCat("</", name, ">"));
  KVASIR_CHECK(begin != page.npos && end != page.npos);
  return page.substr(begin + opening.size(), end - begin - opening.size());
}

// Returns the source by which a Content-Security-Policy allows exactly this text.
std::string HashSource(absl::string_view text) {
  return absl::StrCat("'sha256-", absl::Base64Escape(Sha256(text)), "'");
}

}  // namespace

StatusPage::StatusPage() {
  const absl::string_view page = StatusPageText();
  reply_.body = std::string(page);
  reply_.content_type = "text/html; charset=utf-8";
  reply_.headers = {
      {"Content-Security-Policy",
       absl::StrCat("default-src 'none'; script-src ", HashSource(ContentOf("script", page)),
                    "; style-src ", HashSource(ContentOf("style", page)),
                    "; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
                    "frame-ancestors 'none'")},
      {"X-Content-Type-Options", "nosniff"},
      {"Referrer-Policy", "no-referrer"},
      {"Cache-Control", "no-cache"},
  };
}

}  // namespace kvasir::coordinator
