# What can be proven about the GPU emulator without a GPU: its fused step, and its kernels run by a stand-in on the CPU.
find_package(Boost 1.81 REQUIRED)  # Multiprecision, header-only: the operands of the tensor-core tests
find_package(TBB 2021 REQUIRED)

bitattn_add_test(test_gpu_emulator_step SOURCES emulator_step_test.cpp LINK bitattn_arith Boost::headers)

set(room ${PROJECT_SOURCE_DIR})
set_source_files_properties(${room}/gpu/emulator/flash3.cu PROPERTIES LANGUAGE CXX)
bitattn_add_test(test_gpu_emulator_stand_in
  SOURCES
    emulator_fa3_test.cpp stand_in/stand_in.cpp ../backends/goldens.cpp
    ${room}/gpu/emulator/flash3.cu ${room}/gpu/common/device.cpp
    ${room}/backends/attention_inputs.cpp ${room}/backends/emulator.cpp ${room}/backends/fa3_support.cpp
    ${room}/backends/fp32.cpp ${room}/backends/gpu_emulator.cpp
  LINK bitattn_kernels bitattn_datasets TBB::tbb)
target_include_directories(test_gpu_emulator_stand_in BEFORE PRIVATE ${CMAKE_CURRENT_LIST_DIR}/stand_in)
target_compile_definitions(test_gpu_emulator_stand_in PRIVATE BITATTN_STAND_IN)
# What only nvcc knows, and what fills its registers.
target_compile_options(test_gpu_emulator_stand_in PRIVATE -x c++ -Wno-unknown-pragmas)

# The same on a GPU; skipped where there is none.
if(TARGET bitattn_gpu_emulator)
  bitattn_add_test(test_gpu_emulator
    SOURCES emulator_fa3_test.cpp ../backends/goldens.cpp
    LINK bitattn_backends bitattn_gpu_common
    LABELS gpu)
endif()
