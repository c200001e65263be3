// Every case on every variant of the kernels that this machine runs, with one, two and four threads: all must give the
// bits of the plain C++ kernels. Prints a hash per case, so that machines can be compared: on all of them the list is
// the same. With the argument `best`: the list of the variant that this machine chooses, and nothing else.
#include "harness.h"

namespace {

using namespace tandem;
using namespace tandem::test;

void compare_all(const Case &one, Report &report) {
    const Kernels &plain = *kernels_named("base");
    const std::vector<float> want = one.run(one, plain, 1, report);
    report.line(one.name, hash(want));
    for (const Kernels *const *kernels = runnable_kernels(); *kernels; ++kernels) {
        for (const int n_threads : {1, 2, 4}) {
            if (*kernels == &plain && n_threads == 1) {
                continue;
            }
            const std::vector<float> got = one.run(one, **kernels, n_threads, report);
            report.check(same(got.data(), want.data(), static_cast<int64_t>(want.size())),
                         one.name + ": " + (*kernels)->name + " with " + std::to_string(n_threads) +
                             " threads has other bits than base with one");
        }
    }
}

}  // namespace

int main(int argc, char **argv) {
    const bool best_alone = argc > 1 && std::string(argv[1]) == "best";
    Report report;
    for (const auto &cases : {attention_cases(), matmul_cases(), row_cases()}) {
        for (const Case &one : cases) {
            if (best_alone) {
                report.line(one.name, hash(one.run(one, **runnable_kernels(), 2, report)));
            } else {
                compare_all(one, report);
            }
        }
    }
    std::string variants;
    for (const Kernels *const *kernels = runnable_kernels(); *kernels; ++kernels) {
        variants += std::string(" ") + (*kernels)->name;
    }
    std::fprintf(stderr, "%s: kernels%s\n", report.n_wrong == 0 ? "all the same" : "FAILED", variants.c_str());
    return report.n_wrong == 0 ? 0 : 1;
}
