// What the files beside this one share: matrices and layers as Python hands them over, memory, and bfloat16 by sixteen.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using bf16 = uint16_t;
using floats = std::vector<float>;

namespace {

enum Kind : long { WIDE, INT8, INT4 };
constexpr long TILE = 16, BLOCK = 8;

}  // namespace

// INT8: codes [n, k] with k a multiple of 16, scales [n]. INT4: codes [n/16, k/8, 16, 4 bytes]: a row's 32 bits hold columns 0 2 4 6 in
// the lower half and 1 3 5 7 in the upper, from the lowest four bits up; scales [n/16, k/group, 16, 2], scale and zero. `tiles`: whether
// products may go by tiles, if this process may use them; `bytes`: else, whether many rows of x may be rounded to bytes.
struct Matrix {
    long kind, rows, columns, group;
    const void *weights;
    const bf16 *scales, *bias;
    long tiles, bytes;
};

struct Layer {
    Matrix qkv, o, gate_up, down;
    const bf16 *norm1, *norm2, *q_norm, *k_norm;
    float eps, query_scale;
    long width, heads, kv_heads, head_dim, inner, gelu;
};

namespace {

// Memory that begins with a cache line; it begins as zeros, and is kept from call to call.
template <class T>
struct Kept {
    std::vector<T> all;
    T *of(long size) {
        if ((long)all.size() < size + 64) all.resize(size + 64);
        return (T *)(((uintptr_t)all.data() + 63) & ~(uintptr_t)63);
    }
};

__m512 wide(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }
__m512 wide(const bf16 *p) { return wide(_mm256_loadu_si256((const __m256i *)p)); }
float wide(bf16 one) {
    uint32_t bits = (uint32_t)one << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
bf16 narrow(float one) {
    uint32_t bits;
    __builtin_memcpy(&bits, &one, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__mmask16 live(long left) { return left >= 16 ? 0xffff : (1u << left) - 1; }
__m512 wide(__mmask16 lanes, const bf16 *p) { return wide(_mm256_maskz_loadu_epi16(lanes, p)); }
void narrow(__mmask16 lanes, __m512 from, bf16 *to) { _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(from)); }
void narrow(const float *from, bf16 *to, long n) {
    for (long i = 0; i < n; i += 16) narrow(live(n - i), _mm512_maskz_loadu_ps(live(n - i), from + i), to + i);
}
__m512bh pair(__m512i bits) { return (__m512bh)bits; }

__m512 exponential(__m512 x) {
    // 2^n * 2^f, f in [-1/2, 1/2], a polynomial of degree 6 for the latter: within two units in the last place.
    // Of two operands the second is given back where one is no number, so that it stays none.
    x = _mm512_mul_ps(_mm512_min_ps(_mm512_set1_ps(88.7f), _mm512_max_ps(_mm512_set1_ps(-87.3f), x)), _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n), y = _mm512_set1_ps(1.535336188e-4f);
    for (float c : {1.339887440e-3f, 9.618437357e-3f, 5.550332548e-2f, 2.402264791e-1f, 6.931472028e-1f, 1.f})
        y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(y, n);
}

// Each lane of what comes back is the sum of one of four.
__m128 four_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

__m512i centred() {
    // The codes 0 to 15 less 8 as bfloat16, twice: a lookup takes five bits, and only four of them are a code's.
    alignas(64) bf16 table[32];
    for (int i = 0; i < 32; i++) table[i] = narrow((float)(i % 16 - 8));
    return _mm512_load_si512(table);
}

__m512 active(__m512 x, bool gelu) {
    __m512 inside = x;
    if (gelu) {
        // gelu_tanh(x) = x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
        const __m512 cubed = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_mul_ps(x, x), x), _mm512_set1_ps(0.044715f), x);
        inside = _mm512_mul_ps(cubed, _mm512_set1_ps(1.5957691216f));
    }
    const __m512 one = _mm512_set1_ps(1);
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), inside))));
}

}  // namespace
