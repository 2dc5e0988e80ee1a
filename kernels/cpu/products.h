// Products of a matrix with a few rows of x, summed in float32: by vectors, where reading the matrix is all that costs, else by tiles.
// Either way goes in one order, whatever rows there are beside a row; the two ways differ in it.

#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "numbers.h"
#include "tiled.h"

namespace {

constexpr long NEAR = 64;

// From how many rows of x on tiles are faster, by kind of matrix. Found on a Xeon with AMX, on one thread.
constexpr long TILED_FROM[] = {5, 6, 1};
bool tiled(const Matrix &a, long m) { return a.tiles && m >= TILED_FROM[a.kind] && (a.kind != INT4 || a.group % 32 == 0) && tiles_allowed(); }

// Rows of x as the kernels read them: bfloat16 padded with zeros, and what some kinds of matrix need besides.
struct Rows {
    long m, stride;
    std::vector<bf16> x, squares;
    floats wide, sums;
    Rows(const float *from, long m, long k, const Matrix &a) : m(m), stride((k + 255) / 256 * 256), x(m * stride) {
        for (long i = 0; i < m; i++) narrow(from + i * k, &x[i * stride], k);
        look(a);
    }
    Rows(const bf16 *from, long m, long k, const Matrix &a) : m(m), stride((k + 255) / 256 * 256), x(m * stride) {
        for (long i = 0; i < m; i++) std::copy_n(from + i * k, k, &x[i * stride]);
        look(a);
    }
    // From sixteen rows as squares to the next.
    long far() const { return stride / 32 * SQUARE; }
    void look(const Matrix &a) {
        if (tiled(a, m) && a.kind != INT4) {
            squares.resize((m + 15) / 16 * far());
            for (long i = 0; i < m; i += 16) across(&x[i * stride], stride, std::min(16l, m - i), a.columns, &squares[i / 16 * far()]);
        } else if (a.kind == INT8) {
            wide.resize(m * stride);
            for (long i = 0; i < m * stride; i++) wide[i] = ::wide(x[i]);
        }
        if (a.kind == INT4) {
            long groups = (a.columns + a.group - 1) / a.group;
            sums.resize(m * groups);
            for (long i = 0; i < m; i++)
                for (long g = 0; g < groups; g++) {
                    __m512 sum = _mm512_setzero_ps();
                    for (long c = g * a.group; c < (g + 1) * a.group; c += 16) sum = _mm512_add_ps(sum, ::wide(&x[i * stride + c]));
                    sums[i * groups + g] = _mm512_reduce_add_ps(sum);
                }
        }
    }
};

template <int R, int M>
void wide_rows(const bf16 *w, long k, const bf16 *x, long xs, float *out, long os) {
    __m512 sum[R][M];
    for (auto &row : sum) std::fill_n(row, M, _mm512_setzero_ps());
    for (long c = 0; c < k; c += 32) {
        __mmask32 live = k - c >= 32 ? ~0u : (1u << (k - c)) - 1;
        __m512bh xs_[M];
        for (int i = 0; i < M; i++) xs_[i] = pair(_mm512_loadu_si512(x + i * xs + c));
        for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)(w + (r + R) * k + c), _MM_HINT_T0);
            __m512bh row = pair(_mm512_maskz_loadu_epi16(live, w + r * k + c));
            for (int i = 0; i < M; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], row, xs_[i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++) out[i * os + r] = _mm512_reduce_add_ps(sum[r][i]);
}

template <int R, int M>
void int8_rows(const int8_t *w, const bf16 *scales, long k, const float *x, long xs, float *out, long os) {
    __m512 sum[R][M];
    for (auto &row : sum) std::fill_n(row, M, _mm512_setzero_ps());
    for (long c = 0; c < k; c += 16) {
        __m512 xs_[M];
        for (int i = 0; i < M; i++) xs_[i] = _mm512_loadu_ps(x + i * xs + c);
        for (int r = 0; r < R; r++) {
            _mm_prefetch((const char *)(w + (r + 2 * R) * k + c), _MM_HINT_T0);
            __m512 row = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w + r * k + c))));
            for (int i = 0; i < M; i++) sum[r][i] = _mm512_fmadd_ps(row, xs_[i], sum[r][i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < M; i++) out[i * os + r] = wide(scales[r]) * _mm512_reduce_add_ps(sum[r][i]);
}

template <int M>
void int4_tile(const uint8_t *codes, const bf16 *scales, long groups, long group, const bf16 *x, long xs, const float *sums, float *out) {
    const __m512i table = centred();
    __m512 whole[M];
    std::fill_n(whole, M, _mm512_setzero_ps());
    for (long g = 0; g < groups; g++, scales += 2 * TILE) {
        __m512 part[M][4];
        for (auto &row : part) std::fill_n(row, 4, _mm512_setzero_ps());
        for (long c = g * group; c < (g + 1) * group; c += BLOCK, codes += 64) {
            _mm_prefetch((const char *)codes + 2048, _MM_HINT_T0);
            const __m512i four = _mm512_loadu_si512(codes);
            const __m512i shifted[4] = {four, _mm512_srli_epi16(four, 4), _mm512_srli_epi16(four, 8), _mm512_srli_epi16(four, 12)};
            for (int j = 0; j < 4; j++) {
                __m512bh two = pair(_mm512_permutexvar_epi16(shifted[j], table));
                for (int i = 0; i < M; i++) {
                    int both;
                    __builtin_memcpy(&both, x + i * xs + c + 2 * j, 4);
                    part[i][j] = _mm512_dpbf16_ps(part[i][j], two, pair(_mm512_set1_epi32(both)));
                }
            }
        }
        const __m512i told = _mm512_loadu_si512(scales);
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(told, 16));
        const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(told, _mm512_set1_epi32(0xffff0000)));
        for (int i = 0; i < M; i++) {
            __m512 sum = _mm512_add_ps(_mm512_add_ps(part[i][0], part[i][1]), _mm512_add_ps(part[i][2], part[i][3]));
            whole[i] = _mm512_fmadd_ps(scale, sum, whole[i]);
            whole[i] = _mm512_fmadd_ps(zero, _mm512_set1_ps(sums[i * groups + g]), whole[i]);
        }
    }
    for (int i = 0; i < M; i++) _mm512_storeu_ps(out + i * TILE, whole[i]);
}

// Rows `begin` to `end` of M products; begin is a multiple of TILE.
template <int M>
void some(const Matrix &a, const Rows &x, long first, float *out, long os, long begin, long end) {
    const bf16 *rows = &x.x[first * x.stride];
    const long k = a.columns;
    if (a.kind == INT4) {
        const long groups = (k + a.group - 1) / a.group, size = groups * a.group * TILE / 2;
        for (long r = begin; r < end; r += TILE) {
            alignas(64) float tile[M * TILE];
            const long t = r / TILE;
            int4_tile<M>((const uint8_t *)a.weights + t * size, a.scales + t * groups * 2 * TILE, groups, a.group, rows, x.stride,
                         &x.sums[first * groups], tile);
            for (int i = 0; i < M; i++) std::copy_n(tile + i * TILE, std::min(TILE, end - r), out + i * os + r);
        }
        return;
    }
    long r = begin;
    if (a.kind == INT8) {
        const int8_t *w = (const int8_t *)a.weights;
        const float *wide = &x.wide[first * x.stride];
        for (; r + 4 <= end; r += 4) int8_rows<4, M>(w + r * k, a.scales + r, k, wide, x.stride, out + r, os);
        for (; r < end; r++) int8_rows<1, M>(w + r * k, a.scales + r, k, wide, x.stride, out + r, os);
        return;
    }
    const bf16 *w = (const bf16 *)a.weights;
    for (; r + 4 <= end; r += 4) wide_rows<4, M>(w + r * k, k, rows, x.stride, out + r, os);
    for (; r < end; r++) wide_rows<1, M>(w + r * k, k, rows, x.stride, out + r, os);
}

void multiply_tiled(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    const auto put = [=](long row, long r, __mmask16 lanes, __m512 sums) { _mm512_mask_storeu_ps(out + row * os + r, lanes, sums); };
    if (a.kind != INT4) {
        tile_rows(a, {x.squares.data(), x.far()}, x.m, begin, end, put);
        return;
    }
    const long groups = (a.columns + a.group - 1) / a.group;
    for (long i = 0; i < x.m; i += 16) {
        const auto here = [=](long row, long r, __mmask16 lanes, __m512 sums) { put(i + row, r, lanes, sums); };
        int4_tile_rows(a, &x.x[i * x.stride], x.stride, &x.sums[i * groups], std::min(16l, x.m - i), begin, end, here);
    }
}

void multiply_vectors(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    // So many rows stay near the core until all of x has met them.
    for (long r = begin; r < end; r += NEAR) {
        const long stop = std::min(end, r + NEAR);
        long i = 0;
        for (; i + 4 <= x.m; i += 4) some<4>(a, x, i, out + i * os, os, r, stop);
        if (x.m - i == 3) some<3>(a, x, i, out + i * os, os, r, stop);
        if (x.m - i == 2) some<2>(a, x, i, out + i * os, os, r, stop);
        if (x.m - i == 1) some<1>(a, x, i, out + i * os, os, r, stop);
    }
}

// out[m, os] for rows begin to end of the matrix; begin is a multiple of TILE in INT4.
void multiply(const Matrix &a, const Rows &x, float *out, long os, long begin, long end) {
    (tiled(a, x.m) ? multiply_tiled : multiply_vectors)(a, x, out, os, begin, end);
    if (a.bias)
        for (long i = 0; i < x.m; i++)
            for (long r = begin; r < end; r++) out[i * os + r] += wide(a.bias[r]);
}

// This thread's share of n rows, in whole tiles.
struct Share {
    long begin, end;
    explicit Share(long n) {
        const long tiles = (n + TILE - 1) / TILE, who = omp_get_thread_num(), all = omp_get_num_threads();
        begin = std::min(n, tiles * who / all * TILE);
        end = std::min(n, tiles * (who + 1) / all * TILE);
    }
};

}  // namespace
