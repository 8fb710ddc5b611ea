// f16 (IEEE binary16) and bf16 as stored numbers. Arithmetic is that of f32; storing rounds to nearest, ties to even.

#pragma once

#include <cstdint>
#include <cstring>

namespace simulator {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Half {
    uint16_t bits;

    Half() = default;

    Half(float value) {
        uint32_t all = bits_of(value);
        uint16_t sign = (all >> 16) & 0x8000;
        uint32_t magnitude = all & 0x7fffffff;
        uint32_t result;
        if (magnitude > 0x7f800000) {
            result = 0x7e00 | ((magnitude >> 13) & 0x3ff); // NaN
        } else if (magnitude >= 0x477ff000) {
            result = 0x7c00; // 65520 and more round to infinity
        } else if (magnitude < 0x38800000) {
            // Subnormal: in [0.5, 1) the last bit of an f32 is worth 2^-24, as that of these numbers. The addition rounds.
            result = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
        } else {
            uint32_t odd = (magnitude >> 13) & 1;
            result = (magnitude - (112u << 23) + 0xfff + odd) >> 13;
        }
        bits = sign | static_cast<uint16_t>(result);
    }

    operator float() const {
        uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
        uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
        if (magnitude >= 0x0f800000) {
            return float_of(sign | magnitude | 0x7f800000); // infinity and NaN
        }
        // The exponent's bias grows from 15 to 127. A multiplication, so that subnormal numbers become right, too.
        return float_of(sign | bits_of(float_of(magnitude) * float_of(0x77800000)));
    }
};

struct Bfloat16 {
    uint16_t bits;

    Bfloat16() = default;

    Bfloat16(float value) {
        uint32_t all = bits_of(value);
        if ((all & 0x7fffffff) > 0x7f800000) {
            bits = (all >> 16) | 0x40; // NaN stays NaN
        } else {
            bits = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
        }
    }

    operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }
};

} // namespace simulator
