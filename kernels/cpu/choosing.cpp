// Tokens chosen one after the other, where each choice depends on all before it: a loop over steps too small for torch's calls.
//
// Products of a chosen token with all others are read from the matrix of all pairs (`whole`, source [n, n]) or summed from vectors
// (source [n, d]). Letters: b inputs, n tokens, d channels, `count` tokens to choose. Inputs go side by side over the threads; where there
// are fewer of them, the threads share out the sums of a long one. Each sum is one thread's, so that neighbours change no bit.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

namespace {

// Numbers that a step has to read for it to be worth waiting for other threads.
constexpr long LANES = 16, FOUR = 4, SHARED = 1 << 20;

// One token's products with tokens begin to end.
void sums(const float *z, long token, long begin, long end, long d, float *out) {
    const float *own = z + token * d;
    long i = begin;
    for (; i + FOUR <= end; i += FOUR) {
        const float *p = z + i * d, *q = p + d, *r = q + d, *s = r + d;
        float one = 0, two = 0, three = 0, four = 0;
#pragma omp simd reduction(+ : one, two, three, four)
        for (long c = 0; c < d; c++) {
            one += own[c] * p[c];
            two += own[c] * q[c];
            three += own[c] * r[c];
            four += own[c] * s[c];
        }
        out[i] = one, out[i + 1] = two, out[i + 2] = three, out[i + 3] = four;
    }
    for (; i < end; i++) {
        const float *p = z + i * d;
        float one = 0;
#pragma omp simd reduction(+ : one)
        for (long c = 0; c < d; c++) one += own[c] * p[c];
        out[i] = one;
    }
}

struct Source {
    const float *from;
    long n, d;
    bool whole, alone;
    std::vector<float> row;

    const float *of(long token) {
        if (whole) return from + token * n;
        row.resize(n);
        float *out = row.data();
        // in blocks of whole fours, so that a token's sum is the same however many threads there are
#pragma omp parallel for schedule(static) if (alone)
        for (long i = 0; i < n; i += 64) sums(from, token, i, i + 64 < n ? i + 64 : n, d, out);
        return out;
    }
};

// The least of n numbers; not a number if one of them is none.
float least(const float *x, long n) {
    float lows[LANES];
    int none = 0;
    for (long l = 0; l < LANES; l++) lows[l] = INFINITY;
    long i = 0;
    for (; i + LANES <= n; i += LANES)
#pragma omp simd reduction(| : none)
        for (long l = 0; l < LANES; l++) {
            lows[l] = x[i + l] < lows[l] ? x[i + l] : lows[l];
            none |= x[i + l] != x[i + l];
        }
    for (; i < n; i++) {
        lows[0] = x[i] < lows[0] ? x[i] : lows[0];
        none |= x[i] != x[i];
    }
    for (long l = 1; l < LANES; l++) lows[0] = lows[l] < lows[0] ? lows[l] : lows[0];
    return none ? NAN : lows[0];
}

// The earliest within `tie` of the least, and the first where that is not a number.
long earliest(const float *x, long n, float tie) {
    const float bar = least(x, n) + tie;
    for (long i = 0; i < n; i++)
        if (x[i] <= bar) return i;
    return 0;
}

void farthest(Source &source, long first, long count, float tie, long *out) {
    const long n = source.n;
    std::vector<float> kept(n, -INFINITY);
    float *nearest = kept.data();
    out[0] = first;
    for (long step = 1; step < count; step++) {
        const long newest = out[step - 1];
        const float *row = source.of(newest);
#pragma omp simd
        for (long i = 0; i < n; i++) nearest[i] = row[i] > nearest[i] || row[i] != row[i] ? row[i] : nearest[i];
        nearest[newest] = INFINITY;
        out[step] = earliest(nearest, n, tie);
    }
}

// What earlier choices explain of a row: sum_k factor[k][pick] factor[k], k < step, is taken away.
void explained(const float *factor, long step, long pick, long n, float *fresh) {
    long k = 0;
    for (; k + FOUR <= step; k += FOUR) {
        const float *p = factor + k * n, *q = p + n, *r = q + n, *s = r + n;
        const float one = p[pick], two = q[pick], three = r[pick], four = s[pick];
#pragma omp simd
        for (long i = 0; i < n; i++) fresh[i] -= one * p[i] + two * q[i] + three * r[i] + four * s[i];
    }
    for (; k < step; k++) {
        const float *p = factor + k * n, one = p[pick];
#pragma omp simd
        for (long i = 0; i < n; i++) fresh[i] -= one * p[i];
    }
}

// `loss` are the gains with their sign turned: the best gain is the least loss.
void greedy(Source &source, float *loss, long count, float tie, long *out) {
    const long n = source.n;
    std::vector<float> kept(n * count);
    float *factor = kept.data();
    for (long step = 0; step < count; step++) {
        const long pick = out[step] = earliest(loss, n, tie);
        const float own = -loss[pick], *row = source.of(pick);
        float *fresh = factor + step * n;
        for (long i = 0; i < n; i++) fresh[i] = row[i];
        explained(factor, step, pick, n, fresh);
        // a gain that is zero but for rounding has no direction left to take away
        const float scale = own > tie ? 1 / std::sqrt(own) : 0;
#pragma omp simd
        for (long i = 0; i < n; i++) {
            fresh[i] *= scale;
            loss[i] += fresh[i] * fresh[i];
        }
        loss[pick] = INFINITY;
    }
}

// The largest of n numbers, each with what is added to it.
float largest(const float *x, const float *added, long n) {
    float highs[LANES];
    for (long l = 0; l < LANES; l++) highs[l] = -INFINITY;
    long i = 0;
    for (; i + LANES <= n; i += LANES)
#pragma omp simd
        for (long l = 0; l < LANES; l++) {
            const float sum = x[i + l] + added[i + l];
            highs[l] = sum > highs[l] ? sum : highs[l];
        }
    for (; i < n; i++) highs[0] = x[i] + added[i] > highs[0] ? x[i] + added[i] : highs[0];
    for (long l = 1; l < LANES; l++) highs[0] = highs[l] > highs[0] ? highs[l] : highs[0];
    return highs[0];
}

// What is left of n tokens when those at even places that are most like one at an odd place have gone, `step` at a time.
void untwinned(const float *pairs, long n, long count, long step, float tie, long *out) {
    std::vector<long> rest(n);
    std::vector<float> shut(n, -INFINITY), near((n + 1) / 2), ordered((n + 1) / 2);
    for (long i = 0; i < n; i++) rest[i] = i;
    for (long left = n; left > count;) {
        const long evens = (left + 1) / 2;
        // all tokens but those at odd places are out of reach, so that a row is read from end to end
        for (long i = 1; i < left; i += 2) shut[rest[i]] = 0;
        for (long e = 0; e < evens; e++) near[e] = largest(pairs + rest[2 * e] * n, shut.data(), n);
        for (long i = 1; i < left; i += 2) shut[rest[i]] = -INFINITY;
        const long reach = step < left - count ? step : left - count, gone = reach < evens ? reach : evens;
        float last = -INFINITY;
        if (gone < evens) {
            std::copy(near.begin(), near.begin() + evens, ordered.begin());
            std::nth_element(ordered.begin(), ordered.begin() + gone, ordered.begin() + evens, [](float a, float b) { return a > b; });
            last = ordered[gone];
        }
        long quota = evens - gone, kept = 0;
        for (long e = 0; e < evens; e++) quota -= near[e] < last - tie;
        for (long i = 0; i < left; i++) {
            const float own = near[i / 2];
            // of equal twins the earlier stays
            const bool stays = i % 2 || own < last - tie || (own <= last + tie && quota-- > 0);
            if (stays) rest[kept++] = rest[i];
        }
        left -= gone;
    }
    for (long i = 0; i < count; i++) out[i] = rest[i];
}

// Every input by itself, `apart` on threads of their own. Whether there was memory: nothing may be thrown out of threads.
template <class Choose>
bool each(long b, bool apart, Choose choose) {
    bool room = true;
#pragma omp parallel for schedule(static) if (b > 1 && apart) reduction(&& : room)
    for (long i = 0; i < b; i++) try {
            choose(i);
        } catch (const std::bad_alloc &) {
            room = false;
        }
    return room;
}

}  // namespace

extern "C" {

// first: [b]; out: [b, count]. All say whether there was memory for it.
long choose_farthest(const float *source, const long *first, long b, long n, long d, long whole, long count, float tie, long *out) {
    const bool alone = !whole && b < omp_get_max_threads() && n * d >= SHARED;
    return each(b, !alone, [=](long i) {
        Source mine{source + i * n * (whole ? n : d), n, d, whole != 0, alone, {}};
        farthest(mine, first[i], count, tie, out + i * count);
    });
}

// loss: [b, n], less the squared length of every token; it is written over. out: [b, count]
long choose_greedily(const float *source, float *loss, long b, long n, long d, long whole, long count, float tie, long *out) {
    const bool alone = !whole && b < omp_get_max_threads() && n * d >= SHARED;
    return each(b, !alone, [=](long i) {
        Source mine{source + i * n * (whole ? n : d), n, d, whole != 0, alone, {}};
        greedy(mine, loss + i * n, count, tie, out + i * count);
    });
}

// pairs: [b, n, n]; out: [b, count]
long drop_twins(const float *pairs, long b, long n, long count, long step, float tie, long *out) {
    return each(b, true, [=](long i) { untwinned(pairs + i * n * n, n, count, step, tie, out + i * count); });
}

}
