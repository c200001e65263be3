// Powers, sines and cosines in double arithmetic of our own: the same on every machine, whatever its libm.
#pragma once

namespace tandem {

double natural_log(double x);           // x > 0
double power(double base, double exponent);  // base > 0
struct SinCos {
    double sine;
    double cosine;
};
SinCos sin_cos(double angle);

}  // namespace tandem
