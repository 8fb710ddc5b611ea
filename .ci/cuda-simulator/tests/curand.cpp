// The same seed gives the same numbers, from any offset; their mean and deviation are right.

#include <cmath>

#include "expect.h"

extern "C" {
int curandCreateGenerator(void **, int);
int curandDestroyGenerator(void *);
int curandSetStream(void *, CUstream);
int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long);
int curandSetGeneratorOffset(void *, unsigned long long);
int curandGenerateUniform(void *, float *, size_t);
int curandGenerateUniformDouble(void *, double *, size_t);
int curandGenerateNormal(void *, float *, size_t, float, float);
int curandGenerateNormalDouble(void *, double *, size_t, double, double);
}

constexpr size_t COUNT = 100000;

template <class T>
void check_moments(const std::vector<T> &values, double mean, double deviation) {
    double sum = 0, squares = 0;
    for (T value : values) sum += value;
    for (T value : values) squares += (value - mean) * (value - mean);
    // Six standard errors.
    EXPECT(std::fabs(sum / COUNT - mean) < 6 * deviation / std::sqrt(COUNT));
    EXPECT(std::fabs(std::sqrt(squares / COUNT) - deviation) < 6 * deviation / std::sqrt(COUNT));
}

int main() {
    use_device(0);
    CUstream stream = new_stream();
    void *generator;
    EXPECT(curandCreateGenerator(&generator, 100) == 0);
    EXPECT(curandSetStream(generator, stream) == 0);
    auto seed = [&](unsigned long long seed) { EXPECT(curandSetPseudoRandomGeneratorSeed(generator, seed) == 0); };
    auto done = [&](int code) { EXPECT(code == 0 && cuStreamSynchronize(stream) == CUDA_SUCCESS); };
    Array<float> floats(COUNT);
    Array<double> doubles(COUNT);

    seed(7);
    done(curandGenerateUniform(generator, floats.data(), COUNT));
    auto first = floats.read();
    check_moments(first, 0.5, std::sqrt(1.0 / 12));
    for (float value : first) EXPECT(value > 0 && value <= 1);
    done(curandGenerateUniform(generator, floats.data(), COUNT));
    EXPECT(floats.read() != first);
    seed(7);
    done(curandGenerateUniform(generator, floats.data(), COUNT));
    EXPECT(floats.read() == first);
    seed(7);
    EXPECT(curandSetGeneratorOffset(generator, 1001) == 0);
    done(curandGenerateUniform(generator, floats.data(), COUNT));
    EXPECT(floats.read()[0] == first[1001]);
    seed(8);
    done(curandGenerateUniform(generator, floats.data(), COUNT));
    EXPECT(floats.read() != first);

    done(curandGenerateUniformDouble(generator, doubles.data(), COUNT));
    check_moments(doubles.read(), 0.5, std::sqrt(1.0 / 12));
    done(curandGenerateNormal(generator, floats.data(), COUNT, 3, 2));
    check_moments(floats.read(), 3, 2);
    done(curandGenerateNormalDouble(generator, doubles.data(), COUNT, -1, 0.5));
    check_moments(doubles.read(), -1, 0.5);
    EXPECT(curandGenerateNormal(generator, floats.data(), 3, 0, 1) == 105);
    EXPECT(curandDestroyGenerator(generator) == 0);
    puts("curand: passed");
}
