# What can be proven about the probe without a GPU.
bitattn_add_test(test_gpu_probe_cases SOURCES probe_cases_test.cpp LINK bitattn_arith)
