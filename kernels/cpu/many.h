// What products and attention of many rows share: four products of tiles at a time, by AMX or by vectors.

#pragma once

#include "numbers.h"
#include "tiles.h"

namespace {

// Elements of a tile, and rows of two of them.
constexpr long SIZE = 512, PAIR = 32;

long up(long x, long step) { return (x + step - 1) / step * step; }

// The same as `four` by tiles of AMX, which leave the other units idle, so that `aside` runs between them.
template <bool MORE, class Aside>
void four_by_tiles(const bf16 *a, const bf16 *below, long bytes, long a_step, const bf16 *b, const bf16 *beside, long b_step, long steps,
                   float *c, Aside aside) {
    float *under = c + 16 * PAIR;
    if (MORE) {
        TILE_LOAD(0, c, 4 * PAIR);
        TILE_LOAD(1, c + 16, 4 * PAIR);
        TILE_LOAD(2, under, 4 * PAIR);
        TILE_LOAD(3, under + 16, 4 * PAIR);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (long i = 0; i < steps; i++) {
        TILE_LOAD(6, b + i * b_step, 64);
        TILE_LOAD(4, a + i * a_step, bytes);
        TILE_LOAD(7, beside + i * b_step, 64);
        TILE_LOAD(5, below + i * a_step, bytes);
        TILE_ADD(0, 4, 6);
        TILE_ADD(1, 4, 7);
        TILE_ADD(2, 5, 6);
        TILE_ADD(3, 5, 7);
        aside(i);
    }
    TILE_STORE(0, c, 4 * PAIR);
    TILE_STORE(1, c + 16, 4 * PAIR);
    TILE_STORE(2, under, 4 * PAIR);
    TILE_STORE(3, under + 16, 4 * PAIR);
}

// Eight rows of it by vectors: a pair of a's columns in every lane, times the pair of sixteen rows of b. Sixteen sums are enough that none
// waits for the one before, and eight rows as far apart as a large power of two still lie in the nearest cache together. What lies so many
// bytes `ahead` of a is brought near meanwhile.
template <bool MORE>
void eight_by_vectors(const bf16 *a, long bytes, long a_step, const bf16 *b, const bf16 *beside, long b_step, long steps, float *c,
                      long ahead) {
    __m512 left[8], right[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        left[r] = MORE ? _mm512_load_ps(c + r * PAIR) : _mm512_setzero_ps();
        right[r] = MORE ? _mm512_load_ps(c + r * PAIR + 16) : _mm512_setzero_ps();
    }
    for (long i = 0; i < steps; i++) {
        if (ahead)
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) _mm_prefetch((const char *)(a + i * a_step) + r * bytes + ahead, _MM_HINT_T1);
        for (long pairs = 0; pairs < 16; pairs++) {
            const long at = i * b_step + pairs * 32;
            const __m512bh one = pair(_mm512_load_si512(b + at)), two = pair(_mm512_load_si512(beside + at));
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                int both;
                __builtin_memcpy(&both, (const char *)(a + i * a_step + 2 * pairs) + r * bytes, 4);
                const __m512bh every = pair(_mm512_set1_epi32(both));
                left[r] = _mm512_dpbf16_ps(left[r], every, one);
                right[r] = _mm512_dpbf16_ps(right[r], every, two);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        _mm512_store_ps(c + r * PAIR, left[r]);
        _mm512_store_ps(c + r * PAIR + 16, right[r]);
    }
}

// c[32][32] = two tiles of a, one below the other, times two of b, one beside the other, over so many steps of 32 columns, added to what c
// holds where there is MORE; only the first `rows` of c are wanted. By `tiles` of AMX, or by vectors, which read the same operands.
// What else is to be done, `aside` does at every step; vectors bring near what lies `ahead` of a.
template <bool MORE, class Aside>
void four(bool tiles, long rows, const bf16 *a, const bf16 *below, long bytes, long a_step, const bf16 *b, const bf16 *beside, long b_step,
          long steps, float *c, Aside aside, long ahead = 0) {
    if (tiles) {
        four_by_tiles<MORE>(a, below, bytes, a_step, b, beside, b_step, steps, c, aside);
        return;
    }
    for (long r = 0; r < rows; r += 8)
        eight_by_vectors<MORE>((const bf16 *)((const char *)(r < 16 ? a : below) + r % 16 * bytes), bytes, a_step, b, beside, b_step, steps,
                               c + r * PAIR, ahead);
    for (long i = 0; i < steps; i++) aside(i);
}

// Lanes of `even` and `odd` by turns.
__m512i in_turn(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(turns), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

}  // namespace
