// What this machine can do at best: `limits THREADS` prints gigabytes per second read and copied, and billions of
// products of bytes per second. Compiled for the machine it runs on by bench/limits.py.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr size_t kBytes = size_t{256} << 20;  // per thread: far more than caches hold
constexpr int64_t kLoops = 20'000'000;
constexpr int kSums = 12;  // accumulators: enough to hide the latency of an instruction
constexpr int kRounds = 5;

uint64_t read_all(const uint64_t *words, size_t n) {
    uint64_t sums[32] = {};
    for (size_t i = 0; i < n; i += 32) {
        for (int j = 0; j < 32; ++j) {
            sums[j] += words[i + j];
        }
    }
    uint64_t total = 0;
    for (const uint64_t sum : sums) {
        total += sum;
    }
    return total;
}

// Products per loop of `multiply`, and the loop.
#if defined(__AVX512VNNI__)
constexpr int kProducts = 64 * kSums;
int multiply(int64_t loops) {
    __m512i sums[kSums], w = _mm512_set1_epi32(0x01020304), x = _mm512_set1_epi32(0x7f010203);
    int start = 0;  // no two sums are the same, or the compiler would make one of them
    for (__m512i &sum : sums) {
        sum = _mm512_set1_epi32(start++);
    }
    for (int64_t i = 0; i < loops; ++i) {
        for (__m512i &sum : sums) {
            sum = _mm512_dpbusd_epi32(sum, w, x);
        }
        __asm__ volatile("" : "+v"(w), "+v"(x));
    }
    int total = 0;
    for (const __m512i sum : sums) {
        total += _mm512_reduce_add_epi32(sum);
    }
    return total;
}
#elif defined(__AVX2__)
constexpr int kProducts = 32 * kSums;
int multiply(int64_t loops) {
    __m256i sums[kSums], w = _mm256_set1_epi32(0x01020304), x = _mm256_set1_epi32(0x7f010203);
    int start = 0;  // no two sums are the same, or the compiler would make one of them
    for (__m256i &sum : sums) {
        sum = _mm256_set1_epi32(start++);
    }
    for (int64_t i = 0; i < loops; ++i) {
        for (__m256i &sum : sums) {
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
        }
        __asm__ volatile("" : "+x"(w), "+x"(x));
    }
    int total = 0;
    for (const __m256i sum : sums) {
        total += _mm256_extract_epi32(sum, 0);
    }
    return total;
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kProducts = 16 * kSums;
int multiply(int64_t loops) {
    int32x4_t sums[kSums];
    int start = 0;  // no two sums are the same, or the compiler would make one of them
    for (int32x4_t &sum : sums) {
        sum = vdupq_n_s32(start++);
    }
    int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(5);
    for (int64_t i = 0; i < loops; ++i) {
        for (int32x4_t &sum : sums) {
            sum = vdotq_s32(sum, w, x);
        }
        __asm__ volatile("" : "+w"(w), "+w"(x));
    }
    int total = 0;
    for (const int32x4_t sum : sums) {
        total += vaddvq_s32(sum);
    }
    return total;
}
#else
constexpr int kProducts = 0;
int multiply(int64_t) { return 0; }
#endif

// The shortest of some rounds in which all threads do `work(thread)`, in seconds.
template <class Work>
double seconds(int n_threads, Work work) {
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
        const auto begin = std::chrono::steady_clock::now();
        std::vector<std::thread> others;
        for (int t = 1; t < n_threads; ++t) {
            others.emplace_back(work, t);
        }
        work(0);
        for (std::thread &other : others) {
            other.join();
        }
        const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        best = took < best ? took : best;
    }
    return best;
}

}  // namespace

int main(int, char **argv) {
    const int n_threads = std::atoi(argv[1]);
    const size_t all = kBytes * n_threads;
    auto *memory = static_cast<char *>(std::aligned_alloc(2 << 20, all));
#if defined(__linux__)
    madvise(memory, all, MADV_HUGEPAGE);
#endif
    std::memset(memory, 1, all);
    volatile uint64_t sink = 0;
    const double read_s = seconds(n_threads, [&](int t) {
        sink = read_all(reinterpret_cast<const uint64_t *>(memory + t * kBytes), kBytes / 8);
    });
    const double copy_s = seconds(n_threads, [&](int t) {
        char *half = memory + t * kBytes;
        std::memcpy(half + kBytes / 2, half, kBytes / 2);
    });
    const double multiply_s = seconds(n_threads, [&](int) { sink = multiply(kLoops); });
    std::printf("%.2f %.2f %.1f\n", all / read_s / 1e9, all / copy_s / 1e9,
                1e-9 * n_threads * kLoops * kProducts / multiply_s);
    (void)sink;
}
