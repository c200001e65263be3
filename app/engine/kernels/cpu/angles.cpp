#include "angles.h"

#include <cmath>

namespace tandem {
namespace {

constexpr double kLn2High = 6.93147180369123816490e-01;  // 32 bits: times a small integer it stays exact
constexpr double kLn2Low = 1.90821492927058770002e-10;

}  // namespace

// x = m * 2^e with m near 1; ln m = 2 artanh((m - 1) / (m + 1)) as a series.
double natural_log(double x) {
    int e;
    double m = std::frexp(x, &e);
    if (m < 0.70710678118654752440) {
        m *= 2;
        --e;
    }
    const double s = (m - 1) / (m + 1);
    const double s2 = s * s;
    double series = 0;
    for (int i = 23; i >= 1; i -= 2) {
        series = series * s2 + 1.0 / i;
    }
    return e * kLn2High + (2 * s * series + e * kLn2Low);
}

double power(double base, double exponent) {
    const double x = exponent * natural_log(base);
    const double k = std::nearbyint(x * 1.44269504088896340736);
    const double r = (x - k * kLn2High) - k * kLn2Low;
    double series = 1;
    for (int i = 18; i >= 1; --i) {
        series = 1 + series * r / i;
    }
    return std::ldexp(series, static_cast<int>(k));
}

// Reduction by pi / 2 in three parts (Cody and Waite), then Taylor series on [-pi/4, pi/4].
SinCos sin_cos(double angle) {
    if (!(std::fabs(angle) < 1e6)) {  // the parts below are exact for so many quarter turns
        return {std::sin(angle), std::cos(angle)};
    }
    const double quarters = std::nearbyint(angle * 0.63661977236758134308);
    double r = angle - quarters * 1.57079632673412561417e+00;
    r -= quarters * 6.07710050630396597660e-11;
    r -= quarters * 2.02226624879595063154e-21;
    const double r2 = r * r;
    double sine = 1, cosine = 1;
    for (int i = 17; i >= 3; i -= 2) {
        sine = 1 - sine * r2 / (i * (i - 1));
    }
    for (int i = 18; i >= 2; i -= 2) {
        cosine = 1 - cosine * r2 / (i * (i - 1));
    }
    sine *= r;
    switch (static_cast<long long>(quarters) & 3) {
        case 0: return {sine, cosine};
        case 1: return {cosine, -sine};
        case 2: return {-sine, -cosine};
        default: return {-cosine, sine};
    }
}

}  // namespace tandem
