# Decides whether .cu files are compiled, and for which GPUs. Sets KVASIR_WITH_CUDA.
set(KVASIR_WITH_CUDA OFF)
set(KVASIR_CUDA_ARCHITECTURES "90a" CACHE STRING
  "GPUs that kernels are compiled for: 90a is Hopper; others, from 90 on, get plain matrix products")
if(NOT KVASIR_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${KVASIR_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25 does not know it
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA_STANDARD 20)
    # Kernels tuned for Hopper keep all in registers. Without wgmma and its shared-out registers some do not.
    if(KVASIR_CUDA_ARCHITECTURES STREQUAL "90a")
      target_compile_options(kvasir_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills>)
    endif()
    find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
    find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
    add_library(NCCL::nccl UNKNOWN IMPORTED)
    set_target_properties(NCCL::nccl PROPERTIES
      IMPORTED_LOCATION ${NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
    set(KVASIR_WITH_CUDA ON)
  elseif(KVASIR_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVASIR_CUDA=ON, but no CUDA compiler was found; install the CUDA toolkit or use KVASIR_CUDA=OFF")
  endif()
endif()
message(STATUS "Kvasir: CUDA backend ${KVASIR_WITH_CUDA}")
