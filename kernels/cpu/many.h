// What products and attention of many rows share: memory that is kept, and what tiles do four at a time.

#pragma once

#include <vector>

#include "numbers.h"
#include "tiles.h"

namespace {

// Elements of a tile, and rows of two of them.
constexpr long SIZE = 512, PAIR = 32;

long up(long x, long step) { return (x + step - 1) / step * step; }

// Memory that begins with a cache line, kept from call to call.
template <class T>
struct Kept {
    std::vector<T> all;
    T *of(long size) {
        if ((long)all.size() < size + 64) all.resize(size + 64);
        return (T *)(((uintptr_t)all.data() + 63) & ~(uintptr_t)63);
    }
};

// c[32][32] = two tiles of a, one below the other, times two of b, one beside the other, over so many steps of 32 columns. What is to be
// done meanwhile, `aside` does at every step: tiles leave the other units idle.
template <bool MORE, class Aside>
void four(const bf16 *a, const bf16 *below, long bytes, long a_step, const bf16 *b, const bf16 *beside, long b_step, long steps, float *c,
          Aside aside) {
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

// Lanes of `even` and `odd` by turns.
__m512i in_turn(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(turns), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

}  // namespace
