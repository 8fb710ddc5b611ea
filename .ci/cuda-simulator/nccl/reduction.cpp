#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "../half.h"

namespace nccl {

namespace {

using simulator::Bfloat16;
using simulator::Half;

template <class T>
constexpr bool IS_INTEGER = std::is_integral_v<T>;

// Calls `body` with a value of the C++ type.
template <class Body>
void with_type(int type, Body body) {
    switch (type) {
        case INT8: return body(int8_t());
        case UINT8: return body(uint8_t());
        case INT32: return body(int32_t());
        case UINT32: return body(uint32_t());
        case INT64: return body(int64_t());
        case UINT64: return body(uint64_t());
        case FLOAT16: return body(Half());
        case FLOAT32: return body(float());
        case FLOAT64: return body(double());
        case BFLOAT16: return body(Bfloat16());
    }
}

template <class T>
T scaled(T value, int op, int num_ranks) {
    if constexpr (!IS_INTEGER<T>) {
        if (op == AVG) {
            T factor = T(static_cast<float>(1.0 / num_ranks));
            if constexpr (std::is_same_v<T, double>) factor = 1.0 / num_ranks;
            return T(value * factor);
        }
    }
    return value;
}

template <class T>
T combined(T left, T right, int op) {
    // Integers wrap around.
    using Number = std::conditional_t<std::is_same_v<T, double>, double, std::conditional_t<IS_INTEGER<T>, uint64_t, float>>;
    switch (op) {
        case PROD:
            return T(static_cast<Number>(left) * static_cast<Number>(right));
        case MAX:
            if constexpr (IS_INTEGER<T>) return std::max(left, right);
            else return T(std::fmax(static_cast<Number>(left), static_cast<Number>(right)));
        case MIN:
            if constexpr (IS_INTEGER<T>) return std::min(left, right);
            else return T(std::fmin(static_cast<Number>(left), static_cast<Number>(right)));
        default:
            return T(static_cast<Number>(left) + static_cast<Number>(right));
    }
}

} // namespace

void Reduction::prepare(void *to, const void *from, size_t count) const {
    with_type(type, [&](auto sample) {
        using T = decltype(sample);
        if (op != AVG || IS_INTEGER<T>) {
            if (to != from) std::memmove(to, from, count * sizeof(T));
            return;
        }
        auto *result = static_cast<T*>(to);
        auto *values = static_cast<const T*>(from);
        for (size_t i = 0; i < count; i++) result[i] = scaled(values[i], op, num_ranks);
    });
}

void Reduction::combine(void *to, const void *from, const void *own, size_t count) const {
    with_type(type, [&](auto sample) {
        using T = decltype(sample);
        auto *result = static_cast<T*>(to);
        auto *left = static_cast<const T*>(from);
        auto *right = static_cast<const T*>(own);
        for (size_t i = 0; i < count; i++) result[i] = combined(left[i], scaled(right[i], op, num_ranks), op);
    });
}

void Reduction::finish(void *values, size_t count) const {
    with_type(type, [&](auto sample) {
        using T = decltype(sample);
        if constexpr (IS_INTEGER<T>) {
            if (op != AVG) return;
            auto *result = static_cast<T*>(values);
            for (size_t i = 0; i < count; i++) result[i] = result[i] / static_cast<T>(num_ranks);
        }
    });
}

} // namespace nccl
