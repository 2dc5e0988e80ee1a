// Products of a matrix with some rows of x by tiles, summed in float32: in the same order however many rows there are.
//
// WIDE and INT8: sixteen rows of the matrix times sixteen of x; bytes become bfloat16, which holds them exactly, aside.
// INT4: codes lie as a right operand does once they are bfloat16, and x is the left one; each group is a sum of its own, then scaled.

#pragma once

#include "numbers.h"
#include "tiles.h"

namespace {

// Columns that are brought aside at a time, and numbers of a register.
constexpr long STRIP = 256, SQUARE = 512;

// Rows of x as right operands: sixteen after sixteen of them, `far` apart.
struct Across {
    const bf16 *x;
    long far;
};

// Left operands: of so many numbers from row to row, from sixteen rows to the next, and from 32 columns to the next.
struct Strip {
    const bf16 *at;
    long stride, down, right;
};

// Rows r to `end`, but `count` at most, of up to STRIP columns from c on: where they lie if that will do, else aside, with zeros around.
Strip strip(const Matrix &a, long r, long count, long end, long c, bf16 *aside) {
    const long k = a.columns, width = std::min(STRIP, k - c), rows = std::min(count, end - r);
    if (a.kind == WIDE && rows == count && width % 32 == 0) return {(const bf16 *)a.weights + r * k + c, k, 16 * k, 32};
    for (long i = 0; i < count; i++) {
        bf16 *to = aside + i / 16 * (STRIP / 32 * SQUARE) + i % 16 * 32;
        const long from = (r + i) * k + c;
        for (long j = 0; j < width; j += 32, to += SQUARE) {
            const __mmask32 columns = i >= rows ? 0 : width - j >= 32 ? ~0u : (1u << (width - j)) - 1;
            __m512i both;
            if (a.kind == WIDE) {
                both = _mm512_maskz_loadu_epi16(columns, (const bf16 *)a.weights + from + j);
            } else {
                const int8_t *codes = (const int8_t *)a.weights + from + j;
                _mm_prefetch((const char *)codes + count * k, _MM_HINT_T0);
                const __m256i bytes = _mm256_maskz_loadu_epi8(columns, codes);
                const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
                const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
                both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            _mm512_storeu_si512(to, both);
        }
    }
    return {aside, 32, STRIP / 32 * SQUARE, SQUARE};
}

// Sums of 16 A rows of the matrix with 16 B rows of x, in registers 0 to A B - 1: [A, B, 16 rows of the matrix, 16 of x].
template <int A, int B>
void tile_sums(const Matrix &a, long r, long end, const Across &x, bool first, float *sums) {
    alignas(64) bf16 aside[A * STRIP / 32 * SQUARE];
    const long k = a.columns;
    // The next rows lie behind these. They are brought near in the order of memory, which the processor then goes on with.
    const char *ahead = (const char *)((const bf16 *)a.weights + (r + 16 * A) * k);
    TILE_ZERO(0);
    if constexpr (A * B > 1) TILE_ZERO(1);
    if constexpr (A * B > 2) TILE_ZERO(2);
    if constexpr (A * B > 2) TILE_ZERO(3);
    for (long c = 0; c < k; c += STRIP) {
        const Strip rows = strip(a, r, 16 * A, end, c, aside);
        for (long step = 0; step < (std::min(STRIP, k - c) + 31) / 32; step++) {
            const bf16 *left = rows.at + step * rows.right, *right = x.x + (c / 32 + step) * SQUARE;
            const long stride = 2 * rows.stride;
            if (first && a.kind == WIDE)
                for (int line = 0; line < 16 * A; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
            TILE_LOAD(6, right, 64);
            TILE_LOAD(4, left, stride);
            TILE_ADD(0, 4, 6);
            if constexpr (B == 2) {
                TILE_LOAD(7, right + x.far, 64);
                TILE_ADD(1, 4, 7);
            }
            if constexpr (A >= 2) TILE_LOAD(5, left + rows.down, stride);
            if constexpr (A == 2 && B == 2) {
                TILE_ADD(2, 5, 6);
                TILE_ADD(3, 5, 7);
            }
            if constexpr (A >= 2 && B == 1) TILE_ADD(1, 5, 6);
        }
    }
    TILE_STORE(0, sums, 64);
    if constexpr (A * B > 1) TILE_STORE(1, sums + 256, 64);
    if constexpr (A * B > 2) TILE_STORE(2, sums + 512, 64);
    if constexpr (A * B > 2) TILE_STORE(3, sums + 768, 64);
}

// Products with so many rows of x, handed to put(row of x, r, which of sixteen, their products).
template <int A, int B, typename Put>
void tile_block(const Matrix &a, long r, long end, const Across &x, long m, bool first, const Put &put) {
    alignas(64) float sums[A * B * 256];
    tile_sums<A, B>(a, r, end, x, first, sums);
    for (int i = 0; i < A; i++, r += 16) {
        const __mmask16 lanes = live(end - r);
        const __m512 scale = a.kind == INT8 ? wide(lanes, a.scales + r) : _mm512_set1_ps(1);
        for (int j = 0; j < B; j++) {
            __m512i square[16];
            for (int row = 0; row < 16; row++) square[row] = _mm512_load_si512(sums + (i * B + j) * 256 + row * 16);
            transpose(square);
            for (long row = 0; row < std::min(16l, m - 16 * j); row++)
                put(16 * j + row, r, lanes, _mm512_mul_ps(scale, _mm512_castsi512_ps(square[row])));
        }
    }
}

// Rows `begin` to `end` of the matrix, with m of x. The rows that are being read stay near until all of x has met them.
template <typename Put>
void tile_rows(const Matrix &a, const Across &x, long m, long begin, long end, const Put &put) {
    const Tiles held(16);
    for (long r = begin; r < end; r += 32)
        for (long i = 0; i < m; i += 32) {
            const Across here = {x.x + i / 16 * x.far, x.far};
            const auto there = [&](long row, long r, __mmask16 lanes, __m512 sums) { put(i + row, r, lanes, sums); };
            if (r + 16 >= end)
                tile_block<1, 1>(a, r, end, here, std::min(16l, m - i), i == 0, there);
            else if (m - i > 16)
                tile_block<2, 2>(a, r, end, here, m - i, i == 0, there);
            else
                tile_block<2, 1>(a, r, end, here, m - i, i == 0, there);
            if (r + 16 >= end && m - i > 16)
                tile_block<1, 1>(a, r, end, {here.x + x.far, x.far}, m - i - 16, false,
                                 [&](long row, long r, __mmask16 lanes, __m512 sums) { put(i + 16 + row, r, lanes, sums); });
        }
}

// The same of INT4: begin is a multiple of TILE, x rows of bfloat16 filled up to whole strips, `group_sums` their sums over each group.
template <typename Put>
void int4_tile_rows(const Matrix &a, const bf16 *x, long xs, const float *group_sums, long m, long begin, long end, const Put &put) {
    alignas(64) bf16 right[STRIP / 32 * SQUARE];
    alignas(64) float parts[STRIP / 32 * 256], whole[256];
    const Tiles held(m);
    const __m512i table = centred();
    const long groups = (a.columns + a.group - 1) / a.group, steps = a.group / 32;
    for (long r = begin; r < end; r += TILE) {
        const uint8_t *codes = (const uint8_t *)a.weights + r / TILE * groups * a.group * TILE / 2;
        const bf16 *scales = a.scales + r / TILE * groups * 2 * TILE;
        std::fill_n(whole, 16 * m, 0.f);
        for (long g = 0; g < groups; g += STRIP / a.group) {
            const long here = std::min(STRIP / a.group, groups - g);
            bf16 *to = right;
            for (long block = 0; block < here * a.group / BLOCK; block++, codes += 64, to += 128) {
                _mm_prefetch((const char *)codes + 2048, _MM_HINT_T0);
                const __m512i four = _mm512_loadu_si512(codes);
                for (int j = 0; j < 4; j++) _mm512_storeu_si512(to + 32 * j, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4 * j), table));
            }
            const bf16 *left = x + g * a.group;
            to = right;
// One group after another goes to another register, so that none waits for the one before.
#define INT4_GROUP(c, l, r)                                              \
    if (i + c < here) {                                                  \
        TILE_ZERO(c);                                                    \
        for (long step = 0; step < steps; step++, to += SQUARE, left += 32) { \
            TILE_LOAD(l, left, 2 * xs);                                  \
            TILE_LOAD(r, to, 64);                                        \
            TILE_ADD(c, l, r);                                           \
        }                                                                \
        TILE_STORE(c, parts + (i + c) * 256, 64);                        \
    }
            for (long i = 0; i < here; i += 4) {
                INT4_GROUP(0, 4, 6)
                INT4_GROUP(1, 5, 7)
                INT4_GROUP(2, 4, 6)
                INT4_GROUP(3, 5, 7)
            }
#undef INT4_GROUP
            for (long i = 0; i < here; i++, scales += 2 * TILE) {
                const __m512i told = _mm512_loadu_si512(scales);
                const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16));
                const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(told, _mm512_set1_epi32(0xffff0000)));
                for (long row = 0; row < m; row++) {
                    __m512 sum = _mm512_fmadd_ps(scale, _mm512_load_ps(parts + i * 256 + row * 16), _mm512_load_ps(whole + row * 16));
                    sum = _mm512_fmadd_ps(zero, _mm512_set1_ps(group_sums[row * groups + g + i]), sum);
                    _mm512_store_ps(whole + row * 16, sum);
                }
            }
        }
        for (long row = 0; row < m; row++) put(row, r, live(end - r), _mm512_load_ps(whole + row * 16));
    }
}

}  // namespace
