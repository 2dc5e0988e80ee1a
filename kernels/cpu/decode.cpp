// A decoder layer for the newest token of a few rows, on a processor with AVX-512 BF16: every weight is read once, nothing else counts.
//
// project: x -> norm -> q k v, q and k turned.    attend: q over keys and values.    finish: o, residual, norm, gated MLP, residual.
//
// Sums are float32. Letters: m rows of x, n rows of a matrix, k columns, d the width of a head, t cached tokens.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "attention.h"
#include "products.h"
#include "rounded.h"

namespace {

void normalise(float *x, const bf16 *weight, float eps, long m, long width) {
    for (float *row = x; row < x + m * width; row += width) {
        float square = 0;
        for (long c = 0; c < width; c++) square += row[c] * row[c];
        const float inverse = 1 / std::sqrt(square / width + eps);
        for (long c = 0; c < width; c++) row[c] *= inverse * wide(weight[c]);
    }
}

void widen(const bf16 *from, float *to, long n) {
    for (long i = 0; i < n; i++) to[i] = wide(from[i]);
}

void turn(float *head, const bf16 *cosine, const bf16 *sine, long half) {
    for (long c = 0; c < half; c++) {
        const float left = head[c], right = head[c + half], cs = wide(cosine[c]), sn = wide(sine[c]);
        head[c] = left * cs - right * sn;
        head[c + half] = right * cs + left * sn;
    }
}

void gate(float *gated, const float *up, long n, bool gelu) {
    for (long c = 0; c < n; c += 16) {
        const __mmask16 lanes = live(n - c);
        const __m512 x = active(_mm512_maskz_loadu_ps(lanes, gated + c), gelu);
        _mm512_mask_storeu_ps(gated + c, lanes, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(lanes, up + c)));
    }
}

}  // namespace

extern "C" {

// The parts of a prompt's pass that are no products, of many rows. out[m, width] = x / rms(x) * weight.
void norm_rows(const bf16 *x, const bf16 *weight, float eps, bf16 *out, long m, long width) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < m; row++) {
        const bf16 *from = x + row * width;
        __m512 square = _mm512_setzero_ps();
        for (long c = 0; c < width; c += 16) {
            const __m512 one = wide(live(width - c), from + c);
            square = _mm512_fmadd_ps(one, one, square);
        }
        const __m512 inverse = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(square) / width + eps));
        for (long c = 0; c < width; c += 16) {
            const __mmask16 lanes = live(width - c);
            narrow(lanes, _mm512_mul_ps(_mm512_mul_ps(wide(lanes, from + c), inverse), wide(lanes, weight + c)), out + row * width + c);
        }
    }
}

// out[m, inner] = act(x[:, :inner]) * x[:, inner:].
void gate_rows(const bf16 *x, bf16 *out, long m, long inner, long gelu) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < m; row++)
        for (long c = 0; c < inner; c += 16) {
            const __mmask16 lanes = live(inner - c);
            const bf16 *gated = x + row * 2 * inner + c;
            narrow(lanes, _mm512_mul_ps(active(wide(lanes, gated), gelu), wide(lanes, gated + inner)), out + row * inner + c);
        }
}

// out[b, h, s, 2 f], from the first h of n heads of x[b, s, n, 2 f], turned by cosine and sine [b, s, f].
void turn_rows(const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long b, long s, long n, long h, long f) {
#pragma omp parallel for schedule(static)
    for (long token = 0; token < b * s; token++)
        for (long head = 0; head < h; head++) {
            const bf16 *from = x + (token * n + head) * 2 * f, *cs = cosine + token * f, *sn = sine + token * f;
            bf16 *to = out + ((token / s * h + head) * s + token % s) * 2 * f;
            for (long c = 0; c < f; c += 16) {
                const __mmask16 lanes = live(f - c);
                const __m512 left = wide(lanes, from + c), right = wide(lanes, from + f + c), co = wide(lanes, cs + c), si = wide(lanes, sn + c);
                narrow(lanes, _mm512_fmsub_ps(left, co, _mm512_mul_ps(right, si)), to + c);
                narrow(lanes, _mm512_fmadd_ps(right, co, _mm512_mul_ps(left, si)), to + f + c);
            }
        }
}

// out[m, heads + 2 kv_heads, d] from the stream x[m, width]; cosine and sine are [m, d / 2].
void project(const Layer *layer, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *out, long m) {
    const long d = layer->head_dim, turned = layer->heads + layer->kv_heads, all = turned + layer->kv_heads, n = all * d;
    static thread_local floats kept;
    kept.resize(m * n);
    float *flat = kept.data();
#pragma omp parallel
    {
        floats stream(m * layer->width);
        widen(x, stream.data(), m * layer->width);
        normalise(stream.data(), layer->norm1, layer->eps, m, layer->width);
        const Rows rows(stream.data(), m, layer->width, layer->qkv);
        const Share mine(n);
        multiply(layer->qkv, rows, flat, n, mine.begin, mine.end);
#pragma omp barrier
#pragma omp for
        for (long task = 0; task < m * all; task++) {
            const long row = task / all, head = task % all;
            float *values = flat + task * d;
            const bf16 *norm = head < layer->heads ? layer->q_norm : layer->k_norm;
            if (head < turned && norm) normalise(values, norm, layer->eps, 1, d);
            if (head < turned) turn(values, cosine + row * d / 2, sine + row * d / 2, d / 2);
            if (head < layer->heads && layer->query_scale != 1)
                for (long c = 0; c < d; c++) values[c] *= layer->query_scale;
            narrow(values, out + task * d, d);
        }
    }
}

// out[m, heads, d]: each row's queries over its own tokens. Those of row piece[0] lie side by side from element piece[1] of keys and of
// values on, piece[2] of them; `head` and `token` are the strides. The pieces of a row follow one another.
void attend(const Layer *layer, const bf16 *q, long q_row, const bf16 *keys, const bf16 *values, long head, long token, const long *pieces,
            long count, bf16 *out, long m) {
    const long d = layer->head_dim, h = layer->heads, shared = h / layer->kv_heads, size = d + 2;
    const float scale = 1 / std::sqrt((float)d);
    static thread_local std::vector<Part> cut;
    static thread_local floats kept;
    static thread_local std::vector<long> begins;
    cut.clear();
    begins.assign(m + 1, 0);
    for (long p = 0; p < count; p++)
        for (long start = 0; start < pieces[3 * p + 2]; start += CHUNK) {
            cut.push_back({pieces[3 * p], pieces[3 * p + 1] + start * token, std::min(CHUNK, pieces[3 * p + 2] - start)});
            begins[pieces[3 * p] + 1] = cut.size();
        }
    const long parts = cut.size();
    kept.resize(parts * h * size);
    const Part *all_parts = cut.data();
    const long *ends = begins.data();
    float *found = kept.data();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (long task = 0; task < parts * layer->kv_heads; task++) {
            const Part &part = all_parts[task / layer->kv_heads];
            const long which = task % layer->kv_heads, from = part.offset + which * head;
            over_shared(q + part.row * q_row + which * shared * d, shared, keys + from, values + from, token, part.count, d, scale,
                        layer->qkv.tiles, found + (task / layer->kv_heads * h + which * shared) * size);
        }
        merge(found, ends, m, h, d, out);
    }
}

// out[m, width] = y + mlp(norm2(y)), y = x + o(seen).
void finish(const Layer *layer, const bf16 *x, const bf16 *seen, bf16 *out, long m) {
    const long width = layer->width, inner = layer->inner, from = layer->heads * layer->head_dim;
    static thread_local floats kept;
    kept.resize(m * (2 * width + 2 * inner));
    float *first = kept.data(), *gated = first + m * width, *last = gated + 2 * m * inner;
#pragma omp parallel
    {
        const Share wide_share(width), inner_share(inner);
        {
            const Rows rows(seen, m, from, layer->o);
            multiply(layer->o, rows, first, width, wide_share.begin, wide_share.end);
        }
#pragma omp barrier
        floats stream(m * width);
        for (long i = 0; i < m * width; i++) stream[i] = first[i] + wide(x[i]);
        const floats before = stream;
        normalise(stream.data(), layer->norm2, layer->eps, m, width);
        {
            // A thread takes the same rows of both halves, so that nobody waits between them.
            const Rows rows(stream.data(), m, width, layer->gate_up);
            const long begin = inner_share.begin, end = inner_share.end;
            multiply(layer->gate_up, rows, gated, 2 * inner, begin, end);
            multiply(layer->gate_up, rows, gated, 2 * inner, inner + begin, inner + end);
            for (long i = 0; i < m; i++) gate(gated + i * 2 * inner + begin, gated + i * 2 * inner + inner + begin, end - begin, layer->gelu);
        }
#pragma omp barrier
        floats hidden(m * inner);
        for (long i = 0; i < m; i++) std::copy_n(gated + i * 2 * inner, inner, &hidden[i * inner]);
        const Rows rows(hidden.data(), m, inner, layer->down);
        multiply(layer->down, rows, last, width, wide_share.begin, wide_share.end);
        for (long i = 0; i < m; i++)
            for (long c = wide_share.begin; c < wide_share.end; c++) out[i * width + c] = narrow(before[i * width + c] + last[i * width + c]);
    }
}

// Some layers one after the other: each row's new token is stored at element newest[row] of every layer's keys and values, then attended
// from; the pieces, as of `attend`, hold it too, and `columns`, as of `attend_aged`, name what is `aged`, if anything is. `before` is the
// stream in front of the last layer, `out` the one behind it.
void run(const Layer *const *layers, long count, const bf16 *x, const bf16 *cosine, const bf16 *sine, bf16 *const *keys, bf16 *const *values,
         long head, long token, const long *newest, const long *pieces, long parts, const Aged *aged, const long *columns, long old,
         bf16 *before, bf16 *out, long m) {
    const long width = layers[0]->width, h = layers[0]->heads, g = layers[0]->kv_heads, d = layers[0]->head_dim, all = (h + 2 * g) * d;
    static thread_local std::vector<bf16> kept;
    kept.resize(m * (all + h * d + 2 * width));
    bf16 *qkv = kept.data(), *seen = qkv + m * all, *streams[2] = {seen + m * h * d, seen + m * (h * d + width)};
    if (count == 1) std::copy_n(x, m * width, before);
    for (long l = 0; l < count; l++) {
        bf16 *after = l + 1 == count ? out : l + 2 == count ? before : streams[l % 2];
        project(layers[l], x, cosine, sine, qkv, m);
        for (long row = 0; row < m; row++)
            for (long which = 0; which < g; which++) {
                const bf16 *key = qkv + row * all + (h + which) * d;
                std::copy_n(key, d, keys[l] + newest[row] + which * head);
                std::copy_n(key + g * d, d, values[l] + newest[row] + which * head);
            }
        if (old)
            attend_aged(layers[l], qkv, all, keys[l], values[l], head, token, pieces, parts, aged + l, columns, old, seen, m);
        else
            attend(layers[l], qkv, all, keys[l], values[l], head, token, pieces, parts, seen, m);
        finish(layers[l], x, seen, after, m);
        x = after;
    }
}

}
