# Tests of gpu/kernels. Those that run kernels skip where there is no Hopper GPU; the compiled code is read everywhere.
if(NOT TARGET bitattn_gpu_kernels)
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # as in gpu/CMakeLists.txt, whose scope this is not
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

add_executable(test_gpu_kernels_wgmma ${CMAKE_CURRENT_LIST_DIR}/kernels_wgmma_test.cu)
set_target_properties(test_gpu_kernels_wgmma PROPERTIES CUDA_ARCHITECTURES 90a-real)
target_link_libraries(test_gpu_kernels_wgmma PRIVATE bitattn_gpu_kernels bitattn_gpu_common bitattn_options GTest::gtest_main)
gtest_discover_tests(test_gpu_kernels_wgmma PROPERTIES LABELS gpu DISCOVERY_TIMEOUT 120)

bitattn_add_test(test_gpu_kernels_fa3
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/kernels_fa3_test.cpp ${CMAKE_CURRENT_LIST_DIR}/../backends/goldens.cpp
  LINK bitattn_backends bitattn_gpu_kernels bitattn_gpu_common
  LABELS gpu)

# The PTX of the kernels, for where no disassembler is installed.
add_library(bitattn_gpu_kernels_ptx OBJECT ${CMAKE_CURRENT_LIST_DIR}/../../gpu/kernels/launch.cu)
set_target_properties(bitattn_gpu_kernels_ptx PROPERTIES CUDA_ARCHITECTURES 90a-virtual CUDA_PTX_COMPILATION ON)
target_compile_options(bitattn_gpu_kernels_ptx PRIVATE -fmad=false)
target_link_libraries(bitattn_gpu_kernels_ptx PRIVATE bitattn_arith)
bitattn_add_test(test_gpu_kernels_code
  SOURCES ${CMAKE_CURRENT_LIST_DIR}/kernels_code_test.cpp
  LINK bitattn_gpu_kernels
  LABELS gpu)
add_dependencies(test_gpu_kernels_code bitattn_gpu_kernels_ptx)
target_compile_definitions(test_gpu_kernels_code PRIVATE
  BITATTN_CUDA_BIN="${CUDAToolkit_BIN_DIR}"
  BITATTN_KERNELS_PTX="$<TARGET_OBJECTS:bitattn_gpu_kernels_ptx>")
