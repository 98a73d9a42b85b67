// GET /: the status page (status_page.html, embedded by the build), and the security policy that
// lets a browser run this page's own script and style and nothing else. Made by the HTTP front.
// Thread-safe.
#pragma once

#include <memory>

#include "absl/strings/string_view.h"

#include "coordinator/http/transport/exchange.h"

namespace kvasir::coordinator {

// Returns the text of status_page.html.
absl::string_view StatusPageText();

class StatusPage {
 public:
  StatusPage();

  void Answer(Exchange& exchange) const { exchange.Reply(reply_); }

 private:
  HttpReply reply_;  // constant after construction
};

}  // namespace kvasir::coordinator
