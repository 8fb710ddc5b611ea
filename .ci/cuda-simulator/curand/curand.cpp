// libcurand.so.10: uniform and normal numbers by Philox 4x32-10, a counter-based generator (Salmon et al., "Parallel Random Numbers: As
// Easy as 1, 2, 3", 2011), for any pseudo-random type that is asked for. The numbers are not cuRAND's, but as theirs they depend on
// seed, offset and position alone. The other functions are stubs, see stubs.py.

#include <array>
#include <cmath>
#include <cstdint>

#include "../device_memory.h"

namespace {

// The values of cuRAND's enumeration.
enum Status { SUCCESS = 0, NOT_INITIALIZED = 101, TYPE_ERROR = 103, OUT_OF_RANGE = 104, LENGTH_NOT_MULTIPLE = 105, INITIALIZATION_FAILED = 203 };

struct Generator {
    int device;
    CUstream stream = nullptr;
    uint64_t seed = 0;
    uint64_t offset = 0; // numbers given so far, or skipped
};

// The four words of one counter.
std::array<uint32_t, 4> philox(uint64_t seed, uint64_t counter) {
    std::array<uint32_t, 4> words{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = uint64_t(0xD2511F53) * words[0], product1 = uint64_t(0xCD9E8D57) * words[2];
        words = {static_cast<uint32_t>(product1 >> 32) ^ words[1] ^ key0, static_cast<uint32_t>(product1),
                 static_cast<uint32_t>(product0 >> 32) ^ words[3] ^ key1, static_cast<uint32_t>(product0)};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return words;
}

// Number `index` of a seed has the words `2 * (index % 2)` and the next of counter `index / 2`.
uint64_t random_bits(uint64_t seed, uint64_t index) {
    auto words = philox(seed, index / 2);
    int first = 2 * (index % 2);
    return uint64_t(words[first + 1]) << 32 | words[first];
}

// In (0, 1], as cuRAND has it.
template <class T>
T uniform(uint64_t seed, uint64_t index) {
    constexpr int BITS = sizeof(T) == 4 ? 24 : 53;
    uint64_t bits = random_bits(seed, index) >> (64 - BITS);
    return std::ldexp(static_cast<T>(bits + 1), -BITS);
}

// Of each pair of uniform numbers, two normal ones (Box and Muller).
template <class T>
T normal(uint64_t seed, uint64_t index) {
    uint64_t first = index & ~uint64_t(1);
    double radius = std::sqrt(-2 * std::log(uniform<double>(seed, first)));
    double angle = 2 * M_PI * uniform<double>(seed, first + 1);
    return static_cast<T>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
}

template <class T, class Number>
int generate(Generator *generator, T *out, size_t count, const char *call, Number number) {
    if (!generator) return NOT_INITIALIZED;
    uint64_t seed = generator->seed, start = generator->offset;
    generator->offset += count;
    simulator::enqueue(generator->stream, [=, device = generator->device] {
        simulator::require_device_memory(out, count * sizeof(T), device, call, "the output");
        for (size_t i = 0; i < count; i++) out[i] = number(seed, start + i);
    });
    return SUCCESS;
}

template <class T>
int generate_normal(Generator *generator, T *out, size_t count, T mean, T deviation, const char *call) {
    // As cuRAND's pseudo-random generators, which make pairs.
    if (count % 2 != 0) return LENGTH_NOT_MULTIPLE;
    return generate(generator, out, count, call,
                    [=](uint64_t seed, uint64_t index) { return mean + deviation * normal<T>(seed, index); });
}

} // namespace

extern "C" {

int curandCreateGenerator(Generator** generator, int type) {
    constexpr int QUASI = 200; // and above
    if (type >= QUASI) {
        std::fprintf(stderr, "CUDA simulator: curandCreateGenerator of type %d, which is no pseudo-random one, is not simulated\n", type);
        return TYPE_ERROR;
    }
    int device = simulator::current_device();
    if (device < 0) return INITIALIZATION_FAILED;
    *generator = new Generator{device};
    return SUCCESS;
}

int curandDestroyGenerator(Generator *generator) {
    if (!generator) return NOT_INITIALIZED;
    delete generator;
    return SUCCESS;
}

int curandSetStream(Generator *generator, CUstream stream) {
    if (!generator) return NOT_INITIALIZED;
    generator->stream = stream;
    return SUCCESS;
}

int curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
    if (!generator) return NOT_INITIALIZED;
    generator->seed = seed;
    generator->offset = 0;
    return SUCCESS;
}

int curandSetGeneratorOffset(Generator *generator, unsigned long long offset) {
    if (!generator) return NOT_INITIALIZED;
    generator->offset = offset;
    return SUCCESS;
}

int curandGetVersion(int *version) {
    *version = 10400;
    return SUCCESS;
}

int curandGenerate(Generator *generator, unsigned *out, size_t count) {
    return generate(generator, out, count, "curandGenerate",
                    [](uint64_t seed, uint64_t index) { return static_cast<unsigned>(random_bits(seed, index)); });
}

int curandGenerateUniform(Generator *generator, float *out, size_t count) {
    return generate(generator, out, count, "curandGenerateUniform", uniform<float>);
}

int curandGenerateUniformDouble(Generator *generator, double *out, size_t count) {
    return generate(generator, out, count, "curandGenerateUniformDouble", uniform<double>);
}

int curandGenerateNormal(Generator *generator, float *out, size_t count, float mean, float deviation) {
    return generate_normal(generator, out, count, mean, deviation, "curandGenerateNormal");
}

int curandGenerateNormalDouble(Generator *generator, double *out, size_t count, double mean, double deviation) {
    return generate_normal(generator, out, count, mean, deviation, "curandGenerateNormalDouble");
}

} // extern "C"
