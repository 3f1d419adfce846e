# After all other parts: the bundle holds their programs.
if(TARGET bitattn_gpu_probe)
  include(${PROJECT_SOURCE_DIR}/gpu/bundle.cmake)
endif()
