# What the CPU engine is made of, for the module and for tests of their own: TANDEM_CPU_COMMON, sources, and
# TANDEM_CPU_OBJECTS, objects of the kernels. Files that hold kernels are compiled once per instruction set, each time
# into a namespace of its own; which of them runs is decided at run time.

set(HERE ${CMAKE_CURRENT_LIST_DIR})
set(KERNELS attention attention_lanes attention_rows matmul_float matmul_quant quantize recurrent row_kernels table)
set(COMMON angles compile engine matrix ops_attention ops_layout ops_matmul ops_moving ops_recurrent ops_rope ops_rows
    pack pool quants step types variants)
list(TRANSFORM KERNELS PREPEND ${HERE}/)
list(TRANSFORM KERNELS APPEND .cpp)
set(TANDEM_CPU_COMMON ${COMMON})
list(TRANSFORM TANDEM_CPU_COMMON PREPEND ${HERE}/)
list(TRANSFORM TANDEM_CPU_COMMON APPEND .cpp)

# No contraction: only the fused operations that are written down are fused, or instruction sets would disagree.
set(TANDEM_OPTIMIZE -O3 CACHE STRING "How far to optimize kernels")
set(EXACT ${TANDEM_OPTIMIZE} -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi)

# gcc keeps a counter for each address of a loop, which for the long one of a lone token is more than there are registers.
set_source_files_properties(${HERE}/matmul_quant.cpp PROPERTIES
                            COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-fno-ivopts>")

function(tandem_kernels name)
  add_library(tandem_cpu_${name} OBJECT ${KERNELS})
  target_compile_definitions(tandem_cpu_${name} PRIVATE TANDEM_ISA=${name})
  target_compile_options(tandem_cpu_${name} PRIVATE ${EXACT} ${ARGN})
  set_target_properties(tandem_cpu_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
endfunction()

set(VARIANTS base)
if(TANDEM_OPTIMIZE STREQUAL "-O3")
  set(PLAIN -O2)
endif()
# Lanes that are written one by one look unwritten to gcc 12; the other variants keep the warning.
tandem_kernels(base ${PLAIN} -Wno-uninitialized -Wno-maybe-uninitialized)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND VARIANTS avx2 avxvnni avx512vnni)
  tandem_kernels(avx2 -march=x86-64-v3)
  tandem_kernels(avxvnni -march=x86-64-v3 -mavxvnni)
  # gcc 12 takes its own intrinsics' undefined sources for a mistake of ours.
  tandem_kernels(avx512vnni -march=x86-64-v4 -mavx512vnni -Wno-uninitialized -Wno-maybe-uninitialized)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  list(APPEND VARIANTS neon i8mm)
  tandem_kernels(neon -march=armv8.2-a+dotprod)
  tandem_kernels(i8mm -march=armv8.2-a+dotprod+i8mm)
endif()

set(TANDEM_CPU_OBJECTS)
foreach(variant ${VARIANTS})
  list(APPEND TANDEM_CPU_OBJECTS $<TARGET_OBJECTS:tandem_cpu_${variant}>)
endforeach()
