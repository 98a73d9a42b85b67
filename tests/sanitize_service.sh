#!/usr/bin/env bash
# Builds the service with AddressSanitizer and UBSan (asan) or with ThreadSanitizer (tsan), and runs the end-to-end tests
# that have the label "sanitized" against it.
#
#   tests/sanitize_service.sh asan            all of them
#   tests/sanitize_service.sh tsan -R http    those whose name contains http
#
# A report of a sanitizer ends the process that it is about with another status than 0, which fails the test. It stands
# in the server's log, which the test prints.
set -euo pipefail
cd "$(dirname "$0")/.."

preset="${1:?asan or tsan}"
shift
cmake --preset "$preset" -DKVASIR_BUILD_TESTS=ON >/dev/null
cmake --build --preset "$preset" --target kvasir kvasir-worker kvasir_python_proto
ctest --preset "$preset" -L sanitized --no-tests=error "$@"
