#include "kvstore/peers/ucx_log.h"

#include <array>
#include <cstdarg>
#include <cstdio>

#include "spdlog/spdlog.h"

#include "ucs/debug/log_def.h"

namespace kvasir::kvstore {
namespace {

ucs_log_func_rc_t Log(const char* /*file*/, unsigned /*line*/, const char* /*function*/,
                      ucs_log_level_t level, const ucs_log_component_config_t* /*component*/,
                      const char* format, va_list arguments) {
  // It warns of peers that went away, which links tell, and of requests that ended with them.
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_STOP;
  std::array<char, 512> text = {};
  std::vsnprintf(text.data(), text.size(), format, arguments);
  spdlog::log(level <= UCS_LOG_LEVEL_ERROR ? spdlog::level::warn : spdlog::level::debug, "UCX: {}",
              text.data());
  return UCS_LOG_FUNC_RC_STOP;
}

}  // namespace

void RouteUcxLogs() {
  static const bool routed = [] {
    ucs_log_push_handler(Log);
    return true;
  }();
  static_cast<void>(routed);
}

}  // namespace kvasir::kvstore
