# Helpers of every folder's CMakeLists.txt, so that flags are written once.

# Flags for our own code (generated code is compiled without them).
add_library(kvasir_flags INTERFACE)
target_compile_options(kvasir_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wsign-compare
  -Wnon-virtual-dtor -Werror -fno-math-errno -ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Werror=all-warnings>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(kvasir_flags INTERFACE -Wthread-safety)
endif()
target_include_directories(kvasir_flags INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})

if(KVASIR_SANITIZE)
  # -O1 compiles a third faster than -O2, at which GCC takes empty optionals of Boost for
  # uninitialized ones.
  add_compile_options(-fsanitize=${KVASIR_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all -g1 -O1)
  add_link_options(-fsanitize=${KVASIR_SANITIZE})
  if(KVASIR_SANITIZE STREQUAL "thread")
    # ThreadSanitizer sees no fences, of which GCC warns. Those of Asio stand beside its locks.
    add_compile_definitions(BOOST_ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()

if(KVASIR_BUILD_FUZZERS)
  add_compile_options(-fsanitize=fuzzer-no-link)  # coverage of all our code, which guides the fuzzer
endif()

# kvasir_library(NAME SRCS a.cc b.cc [CUDA_SRCS a.cu] [DEPS ...]): adds a static library of our own code.
function(kvasir_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;CUDA_SRCS;DEPS" ${ARGN})
  if(KVASIR_WITH_CUDA)
    list(APPEND ARG_SRCS ${ARG_CUDA_SRCS})
  endif()
  add_library(${name} STATIC ${ARG_SRCS})
  target_link_libraries(${name} PUBLIC kvasir_flags ${ARG_DEPS})
  if(ARG_CUDA_SRCS AND KVASIR_WITH_CUDA)
    target_link_libraries(${name} PUBLIC CUDA::cudart_static)
  endif()
endfunction()

# Tests are most of all compilation, and -O1 takes a quarter less time than -O2. At -O1 GCC warns of bounds
# that it does not follow.
set(KVASIR_TEST_OPTIONS
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-maybe-uninitialized>")

# Builds the tests that run under ThreadSanitizer: those with the label 'tsan'.
add_custom_target(tsan_tests)

# kvasir_test(NAME SRCS x_test.cc [DEPS ...] [LABELS ...]): adds a GoogleTest binary and registers it in ctest.
function(kvasir_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)
  endif()
  if(KVASIR_SANITIZE)
    math(EXPR ARG_TIMEOUT "4 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SRCS})
  # kvasir_proto has the definitions that the precompiled headers were parsed with.
  target_link_libraries(${name} PRIVATE kvasir_flags ${ARG_DEPS} kvasir_proto kvasir_hang_report
                                        GTest::gmock GTest::gtest_main)
  target_compile_options(${name} PRIVATE ${KVASIR_TEST_OPTIONS})
  target_precompile_headers(${name} REUSE_FROM kvasir_precompiled)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  math(EXPR hang_seconds "${ARG_TIMEOUT} * 2 / 3")
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}"
                       ENVIRONMENT KVASIR_TEST_HANG_SECONDS=${hang_seconds})
  if("tsan" IN_LIST ARG_LABELS)
    add_dependencies(tsan_tests ${name})
  endif()
endfunction()
