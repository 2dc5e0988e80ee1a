// What single queries see of cached tokens, in parts that are merged: for each a weighted sum of values, the largest score, and the sum of
// weights relative to it, d + 2 numbers in this order.

#pragma once

#include <omp.h>

#include "numbers.h"
#include "tiles.h"

namespace {

// Tokens of a part at most, and how many tokens ahead of their turn keys are brought near.
constexpr long CHUNK = 256, COMING = 16;

// Tokens of a row that lie side by side, from an element on.
struct Part {
    long row, offset, count;
};

// 16 C channels of the weighted sums of values for H heads, which lie `step` apart.
template <int H, int C>
void weighted(const float (*scores)[CHUNK], const bf16 *values, long token, long t, float *out, long step) {
    __m512 sum[H][C];
    for (auto &head : sum)
        for (auto &one : head) one = _mm512_setzero_ps();
    for (long j = 0; j < t; j++) {
        __m512 part[C];
        for (int c = 0; c < C; c++) part[c] = wide(values + j * token + 16 * c);
        for (int i = 0; i < H; i++) {
            const __m512 weight = _mm512_set1_ps(scores[i][j]);
            for (int c = 0; c < C; c++) sum[i][c] = _mm512_fmadd_ps(weight, part[c], sum[i][c]);
        }
    }
    for (int i = 0; i < H; i++)
        for (int c = 0; c < C; c++) _mm512_storeu_ps(out + i * step + 16 * c, sum[i][c]);
}

// The weighted sums of values for H heads, and the sums of their weights, which come out of their scores.
template <int H>
void blend(float (*scores)[CHUNK], const float *most, const bf16 *values, long token, long t, long d, float *out) {
    for (int i = 0; i < H; i++) {
        __m512 all = _mm512_setzero_ps();
        for (long j = 0; j < t; j += 16) {
            const __mmask16 lanes = live(t - j);
            const __m512 e = _mm512_maskz_mov_ps(lanes, exponential(_mm512_sub_ps(_mm512_load_ps(scores[i] + j), _mm512_set1_ps(most[i]))));
            _mm512_store_ps(scores[i] + j, e);
            all = _mm512_add_ps(all, e);
        }
        out[i * (d + 2) + d] = most[i];
        out[i * (d + 2) + d + 1] = _mm512_reduce_add_ps(all);
    }
    long c = 0;
    for (; c + 64 <= d; c += 64) weighted<H, 4>(scores, values + c, token, t, out + c, d + 2);
    for (; c < d; c += 32) weighted<H, 2>(scores, values + c, token, t, out + c, d + 2);
}

// Sixteen keys times four queries laid across, by tiles: scores[query][key].
void four_scores(const bf16 *keys, long token, long d, const bf16 *across, float scale, float (*scores)[CHUNK], long j) {
    alignas(64) float square[256];
    TILE_ZERO(0);
    for (long c = 0; c < d; c += 32) {
        TILE_LOAD(4, keys + c, 2 * token);
        TILE_LOAD(6, across + c * 16, 64);
        TILE_ADD(0, 4, 6);
    }
    TILE_STORE(0, square, 64);
    __m512 r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castps128_ps512(_mm_load_ps(square + 16 * i));
        for (int lane = 1; lane < 4; lane++)
            r[i] = _mm512_mask_broadcast_f32x4(r[i], 15 << 4 * lane, _mm_load_ps(square + 64 * lane + 16 * i));
    }
    const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1])), cd = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
    const __m512d ef = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1])), gh = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
    const __m512 by = _mm512_set1_ps(scale);
    _mm512_store_ps(scores[0] + j, _mm512_mul_ps(by, _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd))));
    _mm512_store_ps(scores[1] + j, _mm512_mul_ps(by, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd))));
    _mm512_store_ps(scores[2] + j, _mm512_mul_ps(by, _mm512_castpd_ps(_mm512_unpacklo_pd(ef, gh))));
    _mm512_store_ps(scores[3] + j, _mm512_mul_ps(by, _mm512_castpd_ps(_mm512_unpackhi_pd(ef, gh))));
}

// Up to four queries over t keys by tiles; keys that come next, and values that will be wanted when there are scores, are brought `near`.
void scores_by_tiles(const bf16 *q, long count, const bf16 *keys, const bf16 *values, long token, long t, long d, float scale, bool near,
                     float (*scores)[CHUNK]) {
    alignas(64) bf16 queries[8 * 512], last[16 * 256];
    const Tiles held(16);
    // A tile reads sixteen keys: the last ones with zeros behind them.
    const long whole = t / 16 * 16;
    std::fill_n(last, 16 * d, (bf16)0);
    for (long j = whole; j < t; j++) std::copy_n(keys + j * token, d, last + (j - whole) * d);
    across(q, d, count, d, queries);
    for (long j = 0; j < whole; j += 16) {
        for (long i = 0; near && i < 16; i++)
            for (long c = 0; c < d; c += 32) {
                _mm_prefetch((const char *)(keys + (j + 16 + i) * token + c), _MM_HINT_T0);
                _mm_prefetch((const char *)(values + (j + i) * token + c), _MM_HINT_T1);
            }
        four_scores(keys + j * token, token, d, queries, scale, scores, j);
    }
    if (whole < t) four_scores(last, d, d, queries, scale, scores, whole);
}

// The same of H queries by vectors, four keys at a time: the last one stands for those that are not there.
template <int H>
void scores_by_vectors(const bf16 *q, const bf16 *keys, const bf16 *values, long token, long t, long d, float scale, bool near,
                       float (*scores)[CHUNK]) {
    for (long j = 0; j < t; j += 4) {
        const bf16 *key[4];
        for (long i = 0; i < 4; i++) key[i] = keys + std::min(j + i, t - 1) * token;
        __m512 sum[H][4];
        for (auto &query : sum)
            for (auto &one : query) one = _mm512_setzero_ps();
        for (long c = 0; c < d; c += 32) {
            __m512bh four[4];
            for (int i = 0; i < 4; i++) {
                four[i] = pair(_mm512_loadu_si512(key[i] + c));
                if (near) {
                    _mm_prefetch((const char *)(keys + (j + COMING + i) * token + c), _MM_HINT_T0);
                    _mm_prefetch((const char *)(values + (j + i) * token + c), _MM_HINT_T1);
                }
            }
            for (int which = 0; which < H; which++) {
                const __m512bh query = pair(_mm512_loadu_si512(q + which * d + c));
                for (int i = 0; i < 4; i++) sum[which][i] = _mm512_dpbf16_ps(sum[which][i], four[i], query);
            }
        }
        for (int which = 0; which < H; which++) {
            const auto &one = sum[which];
            _mm_store_ps(scores[which] + j, _mm_mul_ps(_mm_set1_ps(scale), four_sums(one[0], one[1], one[2], one[3])));
        }
    }
}

// Some heads, side by side, over cached tokens that they share: each its weighted sum of values, its largest score and the sum of weights.
// By tiles where `tiled` and this process may use them.
void over_shared(const bf16 *q, long heads, const bf16 *keys, const bf16 *values, long token, long t, long d, float scale, bool tiled,
                 float *out) {
    alignas(64) float scores[4][CHUNK];
    for (long first = 0; first < heads; first += 4, q += 4 * d, out += 4 * (d + 2)) {
        const long count = std::min(4l, heads - first);
        if (tiled && tiles_allowed())
            scores_by_tiles(q, count, keys, values, token, t, d, scale, first == 0, scores);
        else
            (count == 4   ? scores_by_vectors<4>
             : count == 3 ? scores_by_vectors<3>
             : count == 2 ? scores_by_vectors<2>
                          : scores_by_vectors<1>)(q, keys, values, token, t, d, scale, first == 0, scores);
        float most[4];
        for (long i = 0; i < count; i++) {
            __m512 top = _mm512_set1_ps(-INFINITY);
            for (long j = 0; j < t; j += 16) top = _mm512_mask_max_ps(top, live(t - j), top, _mm512_load_ps(scores[i] + j));
            most[i] = _mm512_reduce_max_ps(top);
        }
        (count == 4 ? blend<4> : count == 3 ? blend<3> : count == 2 ? blend<2> : blend<1>)(scores, most, values, token, t, d, out);
    }
}

// out[m, h, d] of the parts of each of m rows, begins[row] to begins[row + 1], each of h heads. In a parallel region, for all its threads.
void merge(const float *found, const long *begins, long m, long h, long d, bf16 *out) {
    const long size = d + 2;
#pragma omp for schedule(static)
    for (long task = 0; task < m * h; task++) {
        const long row = task / h, which = task % h;
        float most = -INFINITY, all = 0;
        for (long p = begins[row]; p < begins[row + 1]; p++) most = std::max(most, found[(p * h + which) * size + d]);
        alignas(64) float sum[256] = {};
        for (long p = begins[row]; p < begins[row + 1]; p++) {
            const float *part = found + (p * h + which) * size;
            const float share = std::exp(part[d] - most);
            all += share * part[d + 1];
            for (long c = 0; c < d; c++) sum[c] += share * part[c];
        }
        for (long c = 0; c < d; c++) sum[c] /= all;
        narrow(sum, out + task * d, d);
    }
}

}  // namespace
