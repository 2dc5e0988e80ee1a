// Products of an int8 or int4 matrix with many rows of x by bytes: one instruction takes four columns where bfloat16 takes two.
//
// SHARED columns of a row of x have a scale of their own, that of their largest number, and become eight bits (llama.cpp does so by 32, which
// costs more; by 128 perplexity rises by some 0.7 %, by 64 it hardly does).
// The matrix is laid across in bytes, sixteen rows a tile: as it is where it is int8; int4 by the largest number that a row's codes could
// stand for within the same columns. Sums of a group are whole numbers, and exact.

#pragma once

#include "many.h"

namespace {

// Columns with one scale, whole chunks of 64. Their products, of 2^15 each at most, are far from filling 32 bits.
constexpr long SHARED = 64;

long groups_of(long k) { return up(k, SHARED) / SHARED; }

// Bytes of a tile that is laid across: of every group what each row is scaled by, where its sums begin, and its codes, four columns after
// four of them.
long laid_bytes(long k) { return 128 * groups_of(k) + TILE * k; }

// A row of x, as 128 more than codes, and a group's scale; what holds no number has a scale that is none.
void to_bytes(const bf16 *x, long k, uint8_t *codes, float *scales) {
    for (long c = 0; c < k; c += SHARED) {
        const long end = std::min(k, c + SHARED);
        __m512 most = _mm512_setzero_ps();
        __mmask16 none = 0;
        for (long j = c; j < end; j += 16) {
            const __m512 one = wide(x + j);
            none |= _mm512_cmp_ps_mask(one, one, _CMP_UNORD_Q);
            most = _mm512_max_ps(most, _mm512_abs_ps(one));
        }
        const float largest = none ? NAN : _mm512_reduce_max_ps(most);
        const __m512 inverse = _mm512_set1_ps(largest > 0 ? 127 / largest : 0);
        for (long j = c; j < end; j += 16) {
            const __m128i eights = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(wide(x + j), inverse)));
            _mm_storeu_si128((__m128i *)(codes + j), _mm_xor_si128(eights, _mm_set1_epi8(-128)));
        }
        *scales++ = largest / 127;
    }
}

// Sums of a group begin at what takes the 128 away again that every code of x has too much; `sums` are those of its codes.
void begin_at(__m512i sums, uint8_t *to) { _mm512_store_si512(to, _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, 7))); }

__m512i summed(__m512i sums, __m512i codes) { return _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), codes); }

void int8_bytes(const int8_t *w, const bf16 *scales, long rows, long k, uint8_t *to) {
    for (long c = 0; c < k; c += SHARED) {
        _mm512_store_ps(to, wide(live(rows), scales));
        uint8_t *begins = to + 64;
        __m512i sums = _mm512_setzero_si512();
        to += 128;
        for (long j = c; j < std::min(k, c + SHARED); j += 64) {
            const long width = std::min(64l, k - j);
            __m512i r[16];
            for (long i = 0; i < 16; i++) r[i] = i < rows ? _mm512_maskz_loadu_epi8(~0ul >> (64 - width), w + i * k + j) : _mm512_setzero_si512();
            transpose(r);
            for (long i = 0; i < width / 4; i++, to += 64) {
                sums = summed(sums, r[i]);
                _mm512_store_si512(to, r[i]);
            }
        }
        begin_at(sums, begins);
    }
}

// Where a scale and its zero stand.
struct Step {
    __m512 scale, zero;
    explicit Step(const bf16 *both) {
        const __m512i told = _mm512_loadu_si512(both);
        scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16));
        zero = _mm512_castsi512_ps(_mm512_and_si512(told, _mm512_set1_epi32(0xffff0000)));
    }
    __m512 operator()(__m512 code) const { return _mm512_fmadd_ps(scale, code, zero); }
};

void int4_bytes(const Matrix &a, long tile, uint8_t *to) {
    const long k = a.columns, groups = (k + a.group - 1) / a.group;
    const bf16 *scales = a.scales + tile * groups * 2 * TILE;
    const uint8_t *codes = (const uint8_t *)a.weights + tile * groups * a.group / BLOCK * 64;
    const __m512 largest = _mm512_set1_ps(127), none = _mm512_setzero_ps();
    const __m512i table = centred(), upper = _mm512_set1_epi32(0xffff0000), byte = _mm512_set1_epi32(255);
    for (long c = 0; c < k; c += SHARED) {
        const long end = std::min(k, c + SHARED);
        __m512 most = none;
        for (long g = c / a.group; g * a.group < end; g++) {
            const Step step(scales + g * 2 * TILE);
            for (float code : {-8.f, 7.f}) most = _mm512_max_ps(most, _mm512_abs_ps(step(_mm512_set1_ps(code))));
        }
        const __m512 inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, none, _CMP_GT_OQ), largest, most);
        _mm512_store_ps(to, _mm512_div_ps(most, largest));
        uint8_t *begins = to + 64;
        __m512i sums = _mm512_setzero_si512();
        to += 128;
        for (long j = c; j < end; j += BLOCK, codes += 64) {
            Step step(scales + j / a.group * 2 * TILE);
            step.scale = _mm512_mul_ps(step.scale, inverse), step.zero = _mm512_mul_ps(step.zero, inverse);
            const __m512i eight = _mm512_loadu_si512(codes);
            for (int half = 0; half < 2; half++, to += 64) {
                __m512i four = _mm512_setzero_si512();
                for (int i = 0; i < 2; i++) {
                    const __m512i two = _mm512_permutexvar_epi16(_mm512_srli_epi16(eight, 8 * half + 4 * i), table);
                    const __m512i even = _mm512_cvtps_epi32(step(_mm512_castsi512_ps(_mm512_slli_epi32(two, 16))));
                    const __m512i odd = _mm512_cvtps_epi32(step(_mm512_castsi512_ps(_mm512_and_si512(two, upper))));
                    const __m512i pair = _mm512_or_si512(_mm512_and_si512(even, byte), _mm512_slli_epi32(_mm512_and_si512(odd, byte), 8));
                    four = _mm512_or_si512(four, i ? _mm512_slli_epi32(pair, 16) : pair);
                }
                sums = summed(sums, four);
                _mm512_store_si512(to, four);
            }
        }
        begin_at(sums, begins);
    }
}

// Sixteen rows of a matrix from this one on, in bytes.
void lay_bytes(const Matrix &a, long row, uint8_t *to) {
    if (a.kind == INT8)
        int8_bytes((const int8_t *)a.weights + row * a.columns, a.scales + row, std::min(TILE, a.rows - row), a.columns, to);
    else
        int4_bytes(a, row / TILE, to);
}

// Rows of x in bytes, [m, k], and their scales [m, groups].
struct Bytes {
    const uint8_t *codes;
    const float *scales;
    Bytes at(long row, long k) const { return {codes + row * k, scales + row * groups_of(k)}; }
};

// c[8][32] = eight rows of x times two tiles.
void eight_by_bytes(const uint8_t *codes, const float *scales, const uint8_t *b, const uint8_t *beside, long k, float *c) {
    const long groups = groups_of(k);
    for (long g = 0; g < groups; g++) {
        const __m512 by = _mm512_load_ps(b), by_beside = _mm512_load_ps(beside);
        __m512i left[8], right[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) left[r] = _mm512_load_si512(b + 64), right[r] = _mm512_load_si512(beside + 64);
        b += 128, beside += 128;
        for (long j = g * SHARED; j < std::min(k, (g + 1) * SHARED); j += 4, b += 64, beside += 64) {
            const __m512i one = _mm512_load_si512(b), two = _mm512_load_si512(beside);
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                int four;
                __builtin_memcpy(&four, codes + r * k + j, 4);
                const __m512i every = _mm512_set1_epi32(four);
                left[r] = _mm512_dpbusd_epi32(left[r], every, one);
                right[r] = _mm512_dpbusd_epi32(right[r], every, two);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups + g]), none = _mm512_setzero_ps();
            float *to = c + r * PAIR;
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_mul_ps(scale, by), _mm512_cvtepi32_ps(left[r]), g ? _mm512_load_ps(to) : none));
            _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_mul_ps(scale, by_beside), _mm512_cvtepi32_ps(right[r]), g ? _mm512_load_ps(to + 16) : none));
        }
    }
}

// c[32][32], of which the first `rows` are wanted.
void four_by_bytes(const Bytes &x, long rows, const uint8_t *b, const uint8_t *beside, long k, float *c) {
    for (long r = 0; r < rows; r += 8) eight_by_bytes(x.codes + r * k, x.scales + r * groups_of(k), b, beside, k, c + r * PAIR);
}

}  // namespace
