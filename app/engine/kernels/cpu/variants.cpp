// Which kernels this machine can run, and the functions all of them share.
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "pack.h"

namespace tandem {

#if defined(__x86_64__)
namespace base { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avxvnni { extern const Kernels kernels; }
namespace avx512vnni { extern const Kernels kernels; }
#elif defined(__aarch64__)
namespace i8mm { extern const Kernels kernels; }
namespace neon { extern const Kernels kernels; }
namespace base { extern const Kernels kernels; }
#else
namespace base { extern const Kernels kernels; }
#endif

}  // namespace tandem

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tandem {
namespace {

#if defined(__x86_64__)
// VNNI without AVX-512 (leaf 7, sub-leaf 1), which older compilers' __builtin_cpu_supports does not know.
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 4)) != 0;
}
#endif

#if defined(__aarch64__)
struct Features {
    bool dot_products = false;
    bool matrix_products = false;
};

Features features() {
#if defined(__linux__)
    return {(getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0, (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0};
#elif defined(__APPLE__)
    int has = 0;
    size_t size = sizeof(has);
    const bool told = sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0;
    return {true, told && has != 0};  // every Apple machine has dot products
#else
    return {};
#endif
}
#endif

struct Runnable {
    const Kernels *list[8] = {};
    Runnable() {
        int n = 0;
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2_here = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                               __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
        const bool avx512_here = avx2_here && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
        if (avx512_here) {
            list[n++] = &avx512vnni::kernels;
        }
        if (avx2_here && has_avx_vnni()) {
            list[n++] = &avxvnni::kernels;
        }
        if (avx2_here) {
            list[n++] = &avx2::kernels;
        }
#elif defined(__aarch64__)
        const Features here = features();
        if (here.dot_products && here.matrix_products) {
            list[n++] = &i8mm::kernels;
        }
        if (here.dot_products) {
            list[n++] = &neon::kernels;
        }
#endif
        list[n++] = &base::kernels;
    }
};

float elu(float x) { return x > 0.0f ? x : std::expm1(x); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float xielu(float x, float alpha_n, float alpha_p, float beta, float eps) {
    if (x > 0.0f) {
        return alpha_p * x * x + beta * x;
    }
    return (std::expm1(x < eps ? x : eps) - x) * alpha_n + beta * x;
}

}  // namespace

const Kernels *const *runnable_kernels() {
    static const Runnable runnable;
    return runnable.list;
}

const Kernels *kernels_named(const char *name) {
    for (const Kernels *const *k = runnable_kernels(); *k; ++k) {
        if (std::strcmp((*k)->name, name) == 0) {
            return *k;
        }
    }
    return nullptr;
}

const ScalarFunctions &scalar_functions() {
    static const ScalarFunctions functions = {std::erf, elu, std::expm1, softplus, xielu,
                                              std::floor, std::ceil, std::round, std::trunc};
    return functions;
}

int32_t activation_span(Type type) {
    if (is_plain(type)) {
        return 0;
    }
    return is_packable(type) && traits(type).block_elements == kLongBlock ? kLongSpan : kShortSpan;
}

int64_t matmul_quant_scratch_bytes(Type type, int64_t k) {
    // A group that was not interleaved beforehand, and a decoded panel with its scales and minimums.
    const int64_t group = (16 * row_bytes(type, k) + 63) / 64 * 64;
    return group + 16 * 2048 + 2 * 4 * 2048 + 64;
}

}  // namespace tandem
