// Registers of floats, and what is loaded into them: floats, or bfloat16 by its bits.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int DEEP = W == 16 ? 12 : 6;  // rows of a product that fill the registers,
constexpr int PANEL = 2 * W;            // with so many columns
constexpr int MAX_HEAD_SIZE = 256;               // head size
typedef float vec __attribute__((vector_size(4 * W)));
typedef float loose_vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t words __attribute__((vector_size(4 * W)));
typedef uint32_t loose_words __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t loose_halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint16_t bf16;

inline vec load(const float* p) { return *reinterpret_cast<const loose_vec*>(p); }
inline vec load(const bf16* p) {
    return (vec)(__builtin_convertvector(*reinterpret_cast<const loose_halves*>(p), words) << 16);
}
inline void store(float* p, vec x) { *reinterpret_cast<loose_vec*>(p) = x; }
#if defined(__AVX512BF16__)
inline void store(bf16* p, vec x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
inline void store(bf16* p, vec x) {  // to the nearest, ties to even; NaN stays NaN
    words bits = (words)x;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words quiet = (bits >> 16) | 0x40;
    ints whole = x == x;
    rounded = (rounded & (words)whole) | (quiet & ~(words)whole);
    *reinterpret_cast<loose_halves*>(p) = __builtin_convertvector(rounded, loose_halves);
}
#endif
inline vec all(float x) {
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (vec)_mm256_set1_ps(x);
#else
    return vec{} + x;
#endif
}

// a * b + c with one rounding, where the processor can: written out, since a compiler that chooses by itself (-ffp-contract)
// may choose differently in two loops over the same numbers.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
inline vec round_as(vec x, const float*) { return x; }
inline vec round_as(vec x, const bf16*) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#else
    bf16 bits[W];
    store(bits, x);
    return load(bits);
#endif
}
inline vec pick(ints mask, vec yes, vec no) { return mask ? yes : no; }
inline float sum(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}
inline float largest(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = std::max(lanes[i], lanes[i + width]);
    return lanes[0];
}

// exp to about one unit in the last place; 0 below -87.3, and not more than exp(88.3).
inline vec exponential(vec x) {
    vec y = pick(x < all(-87.3f), all(-87.3f), pick(x > all(88.3f), all(88.3f), x));
    vec turns = fused(y, all(1.44269504f), all(12582912.0f));  // 1.5 * 2^23: the sum's last bits are the rounded product
    ints n = (ints)turns - (ints)all(12582912.0f);
    vec whole = turns - 12582912.0f;
    vec r = fused(whole, all(-0.693145752f), y);
    r = fused(whole, all(-1.42860677e-6f), r);
    vec p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r + 1.0f);
    vec out = p * (vec)((n + 127) << 23);  // a product, so that NaN stays NaN
    return pick(x < all(-87.3f), vec{}, out);
}

// 1 / (1 + exp(-x)); 0 where exp(-x) would leave the range.
inline vec sigmoid(vec x) { return pick(x < all(-88.0f), vec{}, 1.0f / (1.0f + exponential(-x))); }
// x / (1 + exp(-x)); 0 where exp(-x) would leave the range, and NaN for -infinity, as torch has it.
inline vec silu(vec x) { return pick(x < all(-88.0f), x * 0.0f, x / (1.0f + exponential(-x))); }

}  // namespace
