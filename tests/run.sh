#!/usr/bin/env bash
# Builds and runs the tests.
#
#   tests/run.sh                 release build without CUDA, every test
#   tests/run.sh --sanitize      also unit tests under ASan+UBSan, and the threaded parts under TSan
#   tests/run.sh -R NAME ...     further arguments go to ctest
set -euo pipefail
cd "$(dirname "$0")/.."

sanitize=0
if [[ "${1:-}" == "--sanitize" ]]; then
  sanitize=1
  shift
fi

# Set again, because the quick start configures the same folder without tests.
cmake --preset cpu -DKVASIR_BUILD_TESTS=ON >/dev/null
cmake --build --preset cpu
# Unit tests run in pairs; those that start services run alone.
ctest --preset cpu --no-tests=error --parallel 2 "$@"

if ((sanitize)); then
  cmake --preset asan >/dev/null
  cmake --build --preset asan
  ctest --preset asan -LE e2e "$@"
  cmake --preset tsan >/dev/null
  cmake --build --preset tsan --target tsan_tests
  ctest --preset tsan -L tsan "$@"
fi
