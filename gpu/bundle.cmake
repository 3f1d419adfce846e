# The bundle: a folder of under 40 MiB that a GPU host runs as it is, whatever libraries it has. The program, the tests and
# benchmarks of the GPU parts, the captures they need, every shared library but glibc's own, and the script that checks
# everything. CUDA's runtime is linked statically, and so is HDF5, whose shared library brings curl and its thirty
# libraries along.
#
#   cmake --build BUILD --target bundle      makes BUILD/bundle: bin, lib, captures, gpu_check.sh
#
# HDF5 is chosen when a build is configured, so the target configures a build of its own in BUILD/bundle-build, which sets
# BITATTN_BUNDLE_BUILD and comes here again.
set(bundle_kib 40960)
if(NOT BITATTN_BUNDLE_BUILD)
  find_file(BITATTN_STATIC_HDF5 libhdf5_serial.a PATHS /usr/lib/x86_64-linux-gnu)
  find_file(BITATTN_STATIC_HDF5_HL libhdf5_serial_hl.a PATHS /usr/lib/x86_64-linux-gnu)
  if(NOT BITATTN_STATIC_HDF5 OR NOT BITATTN_STATIC_HDF5_HL)
    message(STATUS "no static HDF5 here: there is no target bundle")
    return()
  endif()
  add_custom_target(bundle
    COMMAND ${CMAKE_COMMAND} -G ${CMAKE_GENERATOR} -S ${PROJECT_SOURCE_DIR} -B ${PROJECT_BINARY_DIR}/bundle-build
      -DCMAKE_BUILD_TYPE=Release
      -DCMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}
      -DCMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER}
      -DBITATTN_BUNDLE_BUILD=${PROJECT_BINARY_DIR}/bundle
      -Dpkgcfg_lib_HDF5_SERIAL_hdf5=${BITATTN_STATIC_HDF5}
      -DBITATTN_HDF5_HL=${BITATTN_STATIC_HDF5_HL}
      "-DCMAKE_CXX_STANDARD_LIBRARIES=-Wl,--as-needed -l:libsz.a -l:libaec.a -lz -ldl -lm"
    COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR}/bundle-build --target bundle
    COMMENT "The bundle for a GPU host: ${PROJECT_BINARY_DIR}/bundle"
    USES_TERMINAL VERBATIM)
  return()
endif()

set(programs)
foreach(program IN ITEMS
    bitattn bitattn_gpu_emulator_bench bitattn_gpu_kernels_bench
    test_gpu_probe_cases test_gpu_emulator_step test_gpu_emulator
    test_gpu_kernels_wgmma test_gpu_kernels_fa3 test_gpu_kernels_variants)
  if(TARGET ${program})
    list(APPEND programs ${program})
    # DT_RPATH and not DT_RUNPATH: it also serves the libraries of the libraries.
    target_link_options(${program} PRIVATE -Wl,--disable-new-dtags)
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/../lib")
    install(TARGETS ${program} RUNTIME DESTINATION bin COMPONENT bundle EXCLUDE_FROM_ALL)
  endif()
endforeach()
install(DIRECTORY
  ${PROJECT_SOURCE_DIR}/datasets/goldens/fa3 ${PROJECT_SOURCE_DIR}/datasets/goldens/real-run
  DESTINATION captures COMPONENT bundle EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.h5")
install(PROGRAMS ${PROJECT_SOURCE_DIR}/bench/gpu_check.sh DESTINATION . COMPONENT bundle EXCLUDE_FROM_ALL)
install(CODE [[
  file(GLOB programs "${CMAKE_INSTALL_PREFIX}/bin/*")
  file(GET_RUNTIME_DEPENDENCIES
    EXECUTABLES ${programs}
    RESOLVED_DEPENDENCIES_VAR libraries
    DIRECTORIES /usr/lib/x86_64-linux-gnu
    POST_EXCLUDE_REGEXES "/ld-linux" "/lib(c|m|dl|pthread|rt|resolv)\\.so")
  foreach(library IN LISTS libraries)
    file(INSTALL ${library} DESTINATION "${CMAKE_INSTALL_PREFIX}/lib" FOLLOW_SYMLINK_CHAIN)
  endforeach()
]] COMPONENT bundle EXCLUDE_FROM_ALL)
add_custom_target(bundle
  COMMAND ${CMAKE_COMMAND} -E rm -rf ${BITATTN_BUNDLE_BUILD}
  COMMAND ${CMAKE_COMMAND} --install ${PROJECT_BINARY_DIR} --component bundle --strip --prefix ${BITATTN_BUNDLE_BUILD}
  COMMAND sh -c "size=\$(du -sk ${BITATTN_BUNDLE_BUILD} | cut -f1); echo \"${BITATTN_BUNDLE_BUILD}: \$size KiB\"; test \$size -le ${bundle_kib}"
  DEPENDS ${programs}
  COMMENT "Filling ${BITATTN_BUNDLE_BUILD}, at most ${bundle_kib} KiB"
  VERBATIM)
