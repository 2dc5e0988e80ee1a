// Attention of a step whose older tokens are kept in fewer bits (`mmsdk.kv.rounded`): codes are read as they lie, never written out.
//
// Of a kept number x = low + scale * code, keys have low and scale for each channel of a block, so that q k = q low + (q scale) code;
// values have them for each token, whose weight takes up the scale. Turned ones (TurboQuant) have a scale for each token and stand for
// R^T table[code]: queries are turned by R, and sums of values are turned back.

#include "rounded.h"

#include "attention.h"

namespace {

// Of a group's queries and a head's channels there are at most so many.
constexpr long QUERIES = 32, WIDEST = 256;

__m512 half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
float half(uint16_t one) { return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(one))); }

__m128i eights(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
__m128i fours(const uint8_t *p) {
    const __m128i two = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    return _mm_and_si128(_mm_or_si128(two, _mm_slli_epi16(two, 4)), _mm_set1_epi8(15));
}
__m128i twos(const uint8_t *p) {
    int bytes;
    __builtin_memcpy(&bytes, p, 4);
    const __m128i four = _mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes));
    const __m128i pairs = _mm_or_si128(four, _mm_slli_epi32(four, 6)), others = _mm_or_si128(_mm_slli_epi32(four, 12), _mm_slli_epi32(four, 18));
    return _mm_and_si128(_mm_or_si128(pairs, others), _mm_set1_epi8(3));
}

template <long FORM>
constexpr long bits = FORM == LEVELS8 || FORM == E4M3 ? 8 : FORM == LEVELS4 || FORM == TURNED4 ? 4 : 2;

// Sixteen codes from here on as numbers, before scale and low.
template <long FORM>
__m512 sixteen(const uint8_t *p, __m512 table) {
    const __m512i codes = _mm512_cvtepu8_epi32(bits<FORM> == 8 ? eights(p) : bits<FORM> == 4 ? fours(p) : twos(p));
    if (FORM == TURNED4 || FORM == TURNED2) return _mm512_permutexvar_ps(codes, table);
    if (FORM != E4M3) return _mm512_cvtepi32_ps(codes);
    // The exponent's bias is 7 and not 127; multiplying mends that for the smallest numbers too, which have no leading one.
    const __m512i size = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(127)), 20);
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(codes, _mm512_set1_epi32(128)), 24);
    const __mmask16 none = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(127 << 20));
    const __m512 number = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(size, sign)), _mm512_set1_ps(0x1p120f));
    return _mm512_mask_mov_ps(number, none, _mm512_set1_ps(NAN));
}

float dot(const float *a, const float *b, long n) {
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < n; c += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + c), _mm512_loadu_ps(b + c), sum);
    return _mm512_reduce_add_ps(sum);
}

void add(float *to, float weight, const float *x, long n) {
    const __m512 all = _mm512_set1_ps(weight);
    for (long c = 0; c < n; c += 16) _mm512_storeu_ps(to + c, _mm512_fmadd_ps(all, _mm512_loadu_ps(x + c), _mm512_loadu_ps(to + c)));
}

// Scores to weights; their largest and their sum go to out.
void soften(float *scores, long t, float *out) {
    float most = -INFINITY, all = 0;
    for (long j = 0; j < t; j++) most = std::max(most, scores[j]);
    for (long j = 0; j < t; j += 16) {
        const __mmask16 lanes = live(t - j);
        const __m512 below = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, scores + j), _mm512_set1_ps(most));
        const __m512 e = _mm512_maskz_mov_ps(lanes, exponential(below));
        _mm512_mask_storeu_ps(scores + j, lanes, e);
        all += _mm512_reduce_add_ps(e);
    }
    out[0] = most;
    out[1] = all;
}

// The n queries of one head of keys over `count` blocks of a row; out as of `over_shared`, one query after the other.
template <long FORM>
void blocks_over(const Aged &a, const float *queries, long n, const long *columns, long count, long head, long g, long d, float scale, float *out) {
    constexpr bool turned = FORM == TURNED4 || FORM == TURNED2;
    const long packed = d * bits<FORM> / 8, t = count * a.page, size = d + 2;
    const __m512 table = turned ? _mm512_loadu_ps(a.table) : _mm512_setzero_ps();
    alignas(64) float token[WIDEST], asked[QUERIES * WIDEST], scores[QUERIES * CHUNK], fixed[QUERIES] = {};
    auto read = [&](const uint8_t *codes, long place) {
        for (long c = 0; c < d; c += 16) _mm512_store_ps(token + c, sixteen<FORM>(codes + place * packed + c * bits<FORM> / 8, table));
    };
    if (turned)
        for (long i = 0; i < n; i++)
            for (long c = 0; c < d; c++) asked[i * d + c] = dot(a.rotation + c * d, queries + i * d, d);
    for (long b = 0; b < count; b++) {
        if (!turned) {
            const long group = (columns[b] * g + head) * d;
            for (long i = 0; i < n; i++) {
                __m512 lows = _mm512_setzero_ps();
                for (long c = 0; c < d; c += 16) {
                    const __m512 q = _mm512_loadu_ps(queries + i * d + c);
                    _mm512_store_ps(asked + i * d + c, _mm512_mul_ps(q, half(a.key_scale + group + c)));
                    lows = _mm512_fmadd_ps(q, half(a.key_low + group + c), lows);
                }
                fixed[i] = _mm512_reduce_add_ps(lows);
            }
        }
        for (long j = 0; j < a.page; j++) {
            const long place = (columns[b] * a.page + j) * g + head;
            const float length = turned ? half(a.key_scale[place]) / std::sqrt((float)d) : 1;
            read(a.keys, place);
            for (long i = 0; i < n; i++) scores[i * CHUNK + b * a.page + j] = scale * (fixed[i] + length * dot(token, asked + i * d, d));
        }
    }
    float lows[QUERIES] = {};
    for (long i = 0; i < n; i++) {
        soften(scores + i * CHUNK, t, out + i * size + d);
        std::fill_n(asked + i * d, d, 0);
    }
    for (long j = 0; j < t; j++) {
        const long place = (columns[j / a.page] * a.page + j % a.page) * g + head;
        const float length = half(a.value_scale[place]) / (turned ? std::sqrt((float)d) : 1), low = half(a.value_low[place]);
        read(a.values, place);
        for (long i = 0; i < n; i++) {
            const float weight = scores[i * CHUNK + j];
            lows[i] += weight * low;
            add(asked + i * d, weight * length, token, d);
        }
    }
    for (long i = 0; i < n; i++) {
        float *sum = out + i * size;
        if (turned) {
            std::fill_n(sum, d, 0);
            for (long c = 0; c < d; c++) add(sum, asked[i * d + c], a.rotation + c * d, d);
        } else
            for (long c = 0; c < d; c++) sum[c] = asked[i * d + c] + lows[i];
    }
}

using Over = decltype(&blocks_over<LEVELS8>);
constexpr Over OVER[] = {blocks_over<LEVELS8>, blocks_over<LEVELS4>, blocks_over<LEVELS2>,
                         blocks_over<E4M3>,    blocks_over<TURNED4>, blocks_over<TURNED2>};

}  // namespace

extern "C" {

void attend_aged(const Layer *layer, const bf16 *q, long q_row, const bf16 *keys, const bf16 *values, long head, long token, const long *pieces,
                 long count, const Aged *aged, const long *columns, long old, bf16 *out, long m) {
    const long d = layer->head_dim, h = layer->heads, g = layer->kv_heads, shared = h / g, size = d + 2, most = CHUNK / aged->page;
    const float scale = 1 / std::sqrt((float)d);
    // A part is some blocks or, with a count of tokens, a piece of what is exact; `offset` is then an element, else a place in `blocks`.
    struct Share {
        long row, offset, blocks, tokens;
    };
    static thread_local std::vector<Share> cut;
    static thread_local std::vector<long> begins, named;
    static thread_local floats kept;
    cut.clear();
    named.clear();
    begins.assign(m + 1, 0);
    for (long row = 0, b = 0, p = 0; row < m; row++) {
        for (; b < old && columns[2 * b] == row; b++) {
            if (cut.empty() || cut.back().row != row || cut.back().blocks == most) cut.push_back({row, (long)named.size(), 0, 0});
            cut.back().blocks++;
            named.push_back(columns[2 * b + 1]);
        }
        for (; p < count && pieces[3 * p] == row; p++)
            for (long start = 0; start < pieces[3 * p + 2]; start += CHUNK)
                cut.push_back({row, pieces[3 * p + 1] + start * token, 0, std::min(CHUNK, pieces[3 * p + 2] - start)});
        begins[row + 1] = cut.size();
    }
    const long parts = cut.size();
    kept.resize(parts * h * size);
    const Share *all_parts = cut.data();
    const long *ends = begins.data(), *blocks = named.data();
    float *found = kept.data();
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (long task = 0; task < parts * g; task++) {
            const Share &part = all_parts[task / g];
            const long which = task % g;
            const bf16 *asking = q + part.row * q_row + which * shared * d;
            float *to = found + (task / g * h + which * shared) * size;
            if (part.tokens) {
                const long from = part.offset + which * head;
                over_shared(asking, shared, keys + from, values + from, token, part.tokens, d, scale, layer->qkv.tiles, to);
                continue;
            }
            alignas(64) float queries[QUERIES * WIDEST];
            for (long c = 0; c < shared * d; c += 16) _mm512_store_ps(queries + c, wide(asking + c));
            OVER[aged->form](*aged, queries, shared, blocks + part.offset, part.blocks, which, g, d, scale, to);
        }
        merge(found, ends, m, h, d, out);
    }
}

}
