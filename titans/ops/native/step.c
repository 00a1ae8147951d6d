/* One token of every sequence of an aligned batch through the layers of a model, states changed in place.
 *
 * What a layer is made of is described once, by pointers to its parameters and to states that the caller owns; a NULL
 * stands for a part that is not there. A product of a matrix with few vectors is as fast as memory gives its rows, so
 * they are read once per token, whatever the batch.
 */
#include "common.h"

enum { SEQUENCE, GATED, CONTEXT };                              /* LMM and MAL, MAG, MAC */
enum { GATE_SIGMOID, GATE_SILU, GATE_MULTIPLY, GATE_SUM, GATE_MEMORY }; /* the order of blocks.GATES */

typedef struct {
    const REAL *weight; /* NULL: no norm */
    double eps;
} Norm;

typedef struct {
    int dim, heads, width, depth, reach, activation, bias, residual, squared, bounded;
    int chunk, period, position; /* chunk 1: the exact rule; period 0: no guard, and no position */
    int gates, theta_row, alpha_row, eta_row; /* how many are learned, and which is which; -1: not learned */
    double max_norm, limit, unit_eps, value_eps, theta, cutoff, eta_max; /* a negative eps: no norm; 0: no such limit */
    const int *outs, *ins;
    Norm before, after;
    const REAL *skip; /* of the tokens themselves, beside the stream */
    const REAL *to_qkv, *kernel, *to_gates, *gate_bias, *alpha, *to_gate, *to_out;
    REAL *const *rest;                                /* (heads, out, in) a layer: where forgetting returns to */
    REAL *const *weights, *const *momentum, *const *anchor; /* (batch, heads, out, in) a layer */
    REAL *gram, *conv;                                /* (batch, heads, width, width), (batch, reach, channels) */
} Memory;

typedef struct {
    long length;                                 /* tokens before this one; MAC: of its segment */
    int dim, heads, width, prefix, slots, turns; /* a ring of `slots`; turns: pairs of channels that rotate */
    const double *frequency;
    Norm before, q_norm, k_norm;
    const REAL *to_q, *to_kv, *to_out;
    const REAL *prefix_k, *prefix_v; /* (heads, prefix, width) */
    REAL *k, *v, *h_k, *h_v;         /* (batch, heads, slots, width) */
} Attention;

typedef struct {
    int dim, hidden;
    Norm before;
    const REAL *gate, *up, *down; /* without a gate: gelu */
} FeedForward;

typedef struct {
    int kind, gate;
    Memory *memory;
    Attention *attention;
    const FeedForward *ffn;
    Norm y_norm, m_norm; /* of the gate */
    const REAL *shift;
    REAL *const *start; /* MAC: the weights that the open segment reads, like the memory's */
    REAL *conv;         /* MAC: (batch, reach, heads * width), past queries of the stream that only reads */
} Block;

static REAL sigmoid(REAL x) { return 1 / (1 + EXP(-x)); }

/* A gate that is 0 below the cutoff and still reaches 1. */
static REAL closing(REAL gate, REAL cutoff) { return gate > cutoff ? (gate - cutoff) / (1 - cutoff) : 0; }

/* y (batch, out) = x (batch, in) w^T */
static void linear(int batch, int out, int in, const REAL *w, const REAL *x, REAL *y, int threads) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && (long)out * in > 65536)
#endif
    for (int o = 0; o < out; o++)
        for (int b = 0; b < batch; b++) y[(size_t)b * out + o] = dot(in, w + (size_t)o * in, x + (size_t)b * in);
}

/* x / sqrt(mean(x^2) + eps) * weight, row by row */
static void normalise(int rows, int width, Norm norm, const REAL *x, REAL *y) {
    for (int r = 0; r < rows; r++, x += width, y += width) {
        REAL scale = norm.weight ? 1 / SQRT(dot(width, x, x) / width + (REAL)norm.eps) : 1;
        for (int i = 0; i < width; i++) y[i] = norm.weight ? x[i] * scale * norm.weight[i] : x[i];
    }
}

static void scale_rows(int rows, int n, REAL *w, const REAL *rest, REAL max_norm) {
    for (int o = 0; o < rows; o++, w += n) {
        REAL square = 0;
        const REAL *home = rest ? rest + (size_t)o * n : NULL;
        for (int i = 0; i < n; i++) {
            REAL away = home ? w[i] - home[i] : w[i];
            square += away * away;
        }
        REAL norm = SQRT(square);
        if (!(norm > max_norm)) continue;
        REAL scale = max_norm / norm;
        for (int i = 0; i < n; i++) w[i] = home ? home[i] + (w[i] - home[i]) * scale : w[i] * scale;
    }
}

/* The memory's input: normed, with the tokens themselves if there is a skip, and no larger than the limit. */
static void take_in(const Memory *m, int batch, const REAL *x, const REAL *tokens, REAL *y) {
    normalise(batch, m->dim, m->before, x, y);
    for (int i = 0; m->skip && i < batch * m->dim; i++) y[i] += m->skip[i % m->dim] * tokens[i];
    if (m->limit > 0) {
        REAL limit = (REAL)m->limit;
        for (int i = 0; i < batch * m->dim; i++) y[i] = y[i] > limit ? limit : y[i] < -limit ? -limit : y[i];
    }
}

/* silu(conv(x)) of `parts` projections in place, each head's length normalised; conv (batch, reach, parts * inner) goes
 * on by one token. */
static void convolve(const Memory *m, int batch, int parts, REAL *conv, REAL *x) {
    int inner = m->heads * m->width, channels = parts * inner, reach = m->reach, stride = 3 * inner;
    for (int b = 0; b < batch; b++, x += channels) {
        REAL *past = m->kernel ? conv + (size_t)b * reach * channels : NULL;
        for (int i = 0; m->kernel && i < channels; i++) {
            REAL now = x[i];
            x[i] *= m->kernel[reach * stride + i];
            for (int o = 0; o < reach; o++) {
                x[i] += m->kernel[o * stride + i] * past[o * channels + i];
                past[o * channels + i] = o + 1 < reach ? past[(o + 1) * channels + i] : now;
            }
        }
        for (int i = 0; i < channels; i++) x[i] *= sigmoid(x[i]);
        for (int part = 0; part < parts; part++) {
            double eps = part < 2 ? m->unit_eps : m->value_eps;
            if (eps < 0) continue;
            for (int h = 0; h < m->heads; h++) {
                REAL *y = x + part * inner + h * m->width, scale = 1 / SQRT(dot(m->width, y, y) + (REAL)eps);
                for (int i = 0; i < m->width; i++) y[i] *= scale;
            }
        }
    }
}

typedef struct {
    int widest;
    REAL *x, *slope, *delta, *z; /* z: the answer; the others: a layer each */
} Layers;

static size_t widest_layer(const Memory *m) {
    int widest = m->width + 1;
    for (int l = 0; l < m->depth; l++) {
        if (m->outs[l] + 1 > widest) widest = m->outs[l] + 1;
        if (m->ins[l] > widest) widest = m->ins[l];
    }
    return widest;
}

static Layers lay_out(const Memory *m, int row, REAL *scratch) {
    size_t w = widest_layer(m), each = w * (m->depth + 1);
    REAL *x = scratch + row * (3 * each + w);
    return (Layers){(int)w, x, x + each, x + 2 * each, x + 3 * each};
}

static size_t memory_room(const Memory *m, int batch) {
    size_t w = widest_layer(m), inner = (size_t)m->heads * m->width;
    return batch * (m->dim + 5 * inner + 3 * m->heads) + (size_t)batch * m->heads * (3 * w * (m->depth + 1) + w);
}

/* M(query), the answer in at->z; every layer's input is kept, a bias's 1 in its place, and its slope if asked for. */
static void run_network(const Memory *m, REAL *const *weights, size_t row, const REAL *query, Layers *at, int slopes) {
    int w = at->widest;
    memcpy(at->x, query, m->width * sizeof(REAL));
    for (int l = 0; l < m->depth; l++) {
        int out = m->outs[l], inside = m->ins[l];
        const REAL *weight = weights[l] + row * out * inside;
        REAL *x = at->x + (size_t)w * l;
        if (m->bias) x[inside - 1] = 1;
        for (int o = 0; o < out; o++) at->z[o] = dot(inside, weight + (size_t)o * inside, x);
        REAL *slope = slopes ? at->slope + (size_t)w * l : NULL;
        if (l + 1 < m->depth) activate(m->activation, out, at->z, x + w, slope, NULL);
    }
    if (m->residual) add(m->width, 1, query, at->z);
}

/* Eq. 13 and 14 for one token of one head: the gradient where the rule takes it, momentum and forgetting. */
static void write_token(const Memory *m, int row, int head, const REAL *key, const REAL *value, REAL step, REAL keep,
                        REAL drag, Layers *at) {
    int depth = m->depth, w = at->widest, width = m->width;
    REAL *const *weights = m->chunk > 1 && m->position ? m->anchor : m->weights;
    run_network(m, weights, row, key, at, 1);
    REAL *error = at->delta + (size_t)w * (depth - 1), total = 0, below = 0;
    for (int o = 0; o < width; o++) {
        error[o] = m->squared ? at->z[o] - value[o] : -value[o];
        total += error[o] * error[o];
    }
    for (int l = depth - 1; l > 0; l--) {
        REAL *delta = at->delta + (size_t)w * l, *lower = delta - w, *x = at->x + (size_t)w * (l - 1);
        const REAL *weight = weights[l] + (size_t)row * m->outs[l] * m->ins[l];
        int hidden = m->outs[l - 1];
        memset(lower, 0, hidden * sizeof(REAL));
        for (int o = 0; o < m->outs[l]; o++) add(hidden, delta[o], weight + (size_t)o * m->ins[l], lower);
        for (int i = 0; i < hidden; i++) lower[i] *= at->slope[(size_t)w * (l - 1) + i];
        below += dot(hidden, lower, lower) * dot(m->ins[l - 1], x, x);
    }
    if (m->bounded) {
        REAL *last = at->x + (size_t)w * (depth - 1);
        step /= 1 + dot(m->ins[depth - 1], last, last) + below / (total + TINY);
    }
    if (m->gram) {
        REAL *gram = m->gram + (size_t)row * width * width, inverse = 1 / (dot(width, key, key) + TINY), crowd = 0;
        if (m->position == 0) memset(gram, 0, (size_t)width * width * sizeof(REAL));
        for (int o = 0; o < width; o++) crowd += key[o] * dot(width, gram + (size_t)o * width, key);
        crowd = 1 + crowd * inverse;
        step /= crowd * crowd;
        for (int o = 0; o < width; o++) add(width, key[o] * inverse, key, gram + (size_t)o * width);
    }
    if (m->squared) step *= 2;
    for (int l = 0; l < depth; l++) {
        int out = m->outs[l], inside = m->ins[l];
        size_t size = (size_t)out * inside;
        REAL *weight = m->weights[l] + row * size, *momentum = m->momentum ? m->momentum[l] + row * size : NULL;
        const REAL *rest = m->rest ? m->rest[l] + head * size : NULL, *x = at->x + (size_t)w * l;
        if (m->chunk > 1 && m->position == 0) memcpy(m->anchor[l] + row * size, weight, size * sizeof(REAL));
        for (int o = 0; o < out; o++) {
            REAL d = step * at->delta[(size_t)w * l + o], lost = 1 - keep;
            REAL *restrict to = weight + (size_t)o * inside;
            REAL *restrict s = momentum ? momentum + (size_t)o * inside : NULL;
            const REAL *restrict home = rest ? rest + (size_t)o * inside : NULL;
            if (home)
                for (int i = 0; i < inside; i++) to[i] = keep * to[i] + lost * home[i];
            else
                for (int i = 0; i < inside; i++) to[i] *= keep;
            if (s)
                for (int i = 0; i < inside; i++) {
                    s[i] = drag * s[i] - d * x[i];
                    to[i] += s[i];
                }
            else
                for (int i = 0; i < inside; i++) to[i] -= d * x[i];
        }
    }
}

/* No row of M - rest, nor of S, keeps a norm above max_norm. */
static void guard(const Memory *m, int row, int head) {
    for (int l = 0; l < m->depth; l++) {
        size_t size = (size_t)m->outs[l] * m->ins[l];
        scale_rows(m->outs[l], m->ins[l], m->weights[l] + row * size, m->rest ? m->rest[l] + head * size : NULL,
                   (REAL)m->max_norm);
        if (m->momentum) scale_rows(m->outs[l], m->ins[l], m->momentum[l] + row * size, NULL, (REAL)m->max_norm);
    }
}

/* RMSNorm and gate of an answer (Eq. 15's way out): y_i = norm(z)_i silu(gate_i) */
static void let_out(const Memory *m, REAL *z, const REAL *gate, REAL *y) {
    normalise(1, m->width, m->after, z, z);
    for (int i = 0; i < m->width; i++) y[i] = z[i] * gate[i] * sigmoid(gate[i]);
}

/* Keys, values and gates of a token; what it writes; and what it then reads (Eq. 13 to 15). x, y (batch, dim). */
static void remember(Memory *m, int batch, int threads, const REAL *x, const REAL *tokens, REAL *y, REAL *scratch) {
    int inner = m->heads * m->width, learned = m->gates * m->heads;
    REAL *in = scratch, *qkv = in + batch * m->dim, *gate = qkv + batch * 3 * inner, *out = gate + batch * inner;
    REAL *raw = out + batch * inner, *layers = raw + batch * 3 * m->heads;
    take_in(m, batch, x, tokens, in);
    linear(batch, 3 * inner, m->dim, m->to_qkv, in, qkv, threads);
    convolve(m, batch, 3, m->conv, qkv);
    linear(batch, inner, m->dim, m->to_gate, in, gate, threads);
    if (m->to_gates) linear(batch, learned, m->dim, m->to_gates, in, raw, threads);
    for (int i = 0; i < batch * learned; i++)
        raw[i] = sigmoid((m->to_gates ? raw[i] : 0) + m->gate_bias[i % learned]);
    int ends = m->period && m->position + 1 == m->period;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && batch * m->heads > 1)
#endif
    for (int row = 0; row < batch * m->heads; row++) {
        int b = row / m->heads, h = row % m->heads;
        const REAL *q = qkv + (size_t)b * 3 * inner + h * m->width, *gates = raw + b * learned + h;
        Layers at = lay_out(m, row, layers);
        REAL step = (REAL)m->theta, keep = 1, drag = 0;
        if (m->theta_row >= 0) step *= closing(gates[m->theta_row * m->heads], (REAL)m->cutoff);
        if (m->eta_row >= 0) drag = (REAL)m->eta_max * gates[m->eta_row * m->heads];
        if (m->alpha_row >= 0) keep = 1 - closing(gates[m->alpha_row * m->heads], (REAL)m->cutoff);
        if (m->alpha) keep = 1 - m->alpha[h];
        write_token(m, row, h, q + inner, q + 2 * inner, step * (1 - drag), keep, drag, &at);
        run_network(m, m->weights, row, q, &at, 0);
        let_out(m, at.z, gate + b * inner + h * m->width, out + b * inner + h * m->width);
        if (ends && m->max_norm > 0) guard(m, row, h);
    }
    linear(batch, m->dim, inner, m->to_out, out, y, threads);
    if (m->period) m->position = ends ? 0 : m->position + 1;
}

/* What the memory with these weights says to a stream that is only read (Eq. 21). */
static void recall(const Memory *m, REAL *const *weights, REAL *conv, int batch, int threads, Norm before,
                   const REAL *x, const REAL *tokens, REAL *y, REAL *scratch) {
    int inner = m->heads * m->width;
    Memory reader = *m;
    reader.before = before;
    REAL *in = scratch, *q = in + batch * m->dim, *gate = q + batch * inner, *out = gate + batch * inner;
    REAL *layers = out + batch * inner;
    take_in(&reader, batch, x, tokens, in);
    linear(batch, inner, m->dim, m->to_qkv, in, q, threads);
    convolve(m, batch, 1, conv, q);
    linear(batch, inner, m->dim, m->to_gate, in, gate, threads);
    for (int row = 0; row < batch * m->heads; row++) {
        Layers at = lay_out(m, row, layers);
        size_t channel = (size_t)row * m->width;
        run_network(m, weights, row, q + channel, &at, 0);
        let_out(m, at.z, gate + channel, out + channel);
    }
    linear(batch, m->dim, inner, m->to_out, out, y, threads);
}

static size_t attention_room(const Attention *a, int batch) {
    size_t inner = (size_t)a->heads * a->width;
    return batch * (2 * a->dim + 6 * inner) + (size_t)batch * a->heads * (a->prefix + 2 * a->slots);
}

/* Turns the pairs (x_i, x_{i + width / 2}) of each head by the angles of the token's position. */
static void rotate(const Attention *a, const REAL *turn, REAL *x) {
    int half = a->width / 2;
    for (int i = 0; i < a->turns; i++) {
        REAL cosine = turn[2 * i], sine = turn[2 * i + 1], first = x[i], second = x[i + half];
        x[i] = first * cosine - second * sine;
        x[i + half] = second * cosine + first * sine;
    }
}

/* Scores of `count` keys (count, width) behind those of before; returns the largest so far. */
static REAL score(const Attention *a, int count, const REAL *k, const REAL *q, REAL *scores, REAL largest) {
    REAL scale = 1 / SQRT((REAL)a->width);
    for (int i = 0; i < count; i++) {
        scores[i] = scale * dot(a->width, k + (size_t)i * a->width, q);
        largest = scores[i] > largest ? scores[i] : largest;
    }
    return largest;
}

/* Attention of one token over [prefix | h | the ring, itself included] (Eq. 1, 2); h (batch, dim) may be NULL. */
static void attend(Attention *a, int batch, int threads, const REAL *x, const REAL *h, REAL *y, REAL *scratch) {
    int inner = a->heads * a->width, streams = h ? 2 : 1, slot = (int)(a->length % a->slots);
    int used = a->length < a->slots ? slot + 1 : a->slots, most = a->prefix + 2 * a->slots;
    REAL *in = scratch, *q = in + 2 * batch * a->dim, *kv = q + batch * inner, *out = kv + 4 * batch * inner;
    REAL *all = out + batch * inner, turn[a->width];
    for (int i = 0; i < a->turns; i++) {
        double angle = a->length * a->frequency[i];
        turn[2 * i] = (REAL)cos(angle);
        turn[2 * i + 1] = (REAL)sin(angle);
    }
    normalise(batch, a->dim, a->before, x, in);
    if (h) memcpy(in + batch * a->dim, h, (size_t)batch * a->dim * sizeof(REAL));
    linear(batch, inner, a->dim, a->to_q, in, q, threads);
    linear(streams * batch, 2 * inner, a->dim, a->to_kv, in, kv, threads);
    normalise(batch * a->heads, a->width, a->q_norm, q, q);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && batch * a->heads > 1)
#endif
    for (int row = 0; row < batch * a->heads; row++) {
        int b = row / a->heads, head = row % a->heads, count = 0;
        size_t first = (size_t)row * a->slots * a->width, place = first + (size_t)slot * a->width;
        size_t ahead = (size_t)head * a->prefix * a->width;
        REAL *query = q + (size_t)row * a->width, *answer = out + (size_t)row * a->width;
        REAL *scores = all + (size_t)row * most;
        rotate(a, turn, query);
        for (int stream = 0; stream < streams; stream++) {
            REAL *k = kv + (size_t)(stream * batch + b) * 2 * inner + head * a->width, *v = k + inner;
            normalise(1, a->width, a->k_norm, k, k);
            rotate(a, turn, k);
            memcpy((stream ? a->h_k : a->k) + place, k, a->width * sizeof(REAL));
            memcpy((stream ? a->h_v : a->v) + place, v, a->width * sizeof(REAL));
        }
        REAL largest = -HUGE_VAL, sum = 0;
        const REAL *keys[] = {a->prefix_k + ahead, a->h_k + first, a->k + first};
        const REAL *values[] = {a->prefix_v + ahead, a->h_v + first, a->v + first};
        int counts[] = {a->prefix, h ? used : 0, used};
        for (int part = 0; part < 3; count += counts[part++])
            largest = score(a, counts[part], keys[part], query, scores + count, largest);
        for (int i = 0; i < count; i++) scores[i] = EXP(scores[i] - largest);
        for (int i = 0; i < count; i++) sum += scores[i];
        memset(answer, 0, a->width * sizeof(REAL));
        count = 0;
        for (int part = 0; part < 3; count += counts[part++])
            for (int i = 0; i < counts[part]; i++)
                add(a->width, scores[count + i] / sum, values[part] + (size_t)i * a->width, answer);
    }
    linear(batch, a->dim, inner, a->to_out, out, y, threads);
    a->length++;
}

/* x += ffn(norm(x)) */
static void feed_forward(const FeedForward *f, int batch, int threads, REAL *x, REAL *scratch) {
    REAL *in = scratch, *up = in + batch * f->dim, *gate = up + batch * f->hidden;
    normalise(batch, f->dim, f->before, x, in);
    linear(batch, f->hidden, f->dim, f->up, in, up, threads);
    if (f->gate) {
        linear(batch, f->hidden, f->dim, f->gate, in, gate, threads);
        for (int i = 0; i < batch * f->hidden; i++) up[i] *= gate[i] * sigmoid(gate[i]);
    } else {
        activate(GELU, batch * f->hidden, up, gate, NULL, NULL);
        memcpy(up, gate, (size_t)batch * f->hidden * sizeof(REAL));
    }
    linear(batch, f->dim, f->hidden, f->down, up, in, threads);
    add(batch * f->dim, 1, in, x);
}

/* x += y (x) m: both normalised, y shifted, then combined (section 4.2 of the paper); y and m are used up */
static void combine(const Block *block, int batch, int dim, REAL *y, REAL *m, REAL *x) {
    normalise(batch, dim, block->y_norm, y, y);
    normalise(batch, dim, block->m_norm, m, m);
    for (int i = 0; i < batch * dim; i++) {
        REAL a = y[i] + block->shift[i % dim], b = m[i];
        switch (block->gate) {
        case GATE_SIGMOID: x[i] += a * sigmoid(b); break;
        case GATE_SILU: x[i] += a * b * sigmoid(b); break;
        case GATE_MULTIPLY: x[i] += a * b; break;
        case GATE_SUM: x[i] += a + b; break;
        default: x[i] += b * sigmoid(a);
        }
    }
}

static size_t block_room(const Block *block, int batch) {
    size_t memory = block->memory ? memory_room(block->memory, batch) : 0;
    size_t attention = block->attention ? attention_room(block->attention, batch) : 0;
    size_t ffn = (size_t)batch * (block->ffn->dim + 2 * block->ffn->hidden);
    size_t most = memory > attention ? memory : attention;
    return 2 * (size_t)batch * block->ffn->dim + (most > ffn ? most : ffn);
}

static void step_block(const Block *block, int batch, int threads, REAL *x, const REAL *tokens, REAL *scratch) {
    int dim = block->ffn->dim, size = batch * dim;
    Memory *memory = block->memory;
    Attention *attention = block->attention;
    REAL *y = scratch, *m = y + size, *rest = m + size;
    if (block->kind == CONTEXT) {
        if (memory) /* Eq. 21 */
            recall(memory, block->start, block->conv, batch, threads, attention->before, x, tokens, m, rest);
        attend(attention, batch, threads, x, memory ? m : NULL, y, rest); /* Eq. 22, 23 */
        add(size, 1, y, x);
        if (memory) {
            remember(memory, batch, threads, x, tokens, m, rest); /* Eq. 24 */
            memcpy(y, x, size * sizeof(REAL));
            combine(block, batch, dim, y, m, x); /* Eq. 25 */
        }
        if (attention->length == attention->slots) {
            attention->length = 0;
            for (int l = 0; memory && l < memory->depth; l++)
                memcpy(block->start[l], memory->weights[l],
                       (size_t)batch * memory->heads * memory->outs[l] * memory->ins[l] * sizeof(REAL));
        }
    } else if (block->kind == GATED && memory && attention) {
        attend(attention, batch, threads, x, NULL, y, rest); /* Eq. 27 */
        remember(memory, batch, threads, x, tokens, m, rest);
        combine(block, batch, dim, y, m, x); /* Eq. 28 */
    } else {
        if (memory) {
            remember(memory, batch, threads, x, tokens, m, rest); /* Eq. 30 */
            add(size, 1, m, x);
        }
        if (attention) {
            attend(attention, batch, threads, x, NULL, y, rest); /* Eq. 31 */
            add(size, 1, y, x);
        }
    }
    feed_forward(block->ffn, batch, threads, x, rest);
}

/* x (batch, dim) through all blocks of a model, in place: either all of them take the token or none does. */
int titans_step_blocks(const Block *const *blocks, int count, int batch, int threads, REAL *x) {
    size_t room = 0;
    for (int i = 0; i < count; i++) {
        size_t needed = block_room(blocks[i], batch);
        room = needed > room ? needed : room;
    }
    size_t size = count ? (size_t)batch * blocks[0]->ffn->dim : 0;
    REAL *scratch = malloc((room + size) * sizeof(REAL)), *tokens = scratch ? scratch + room : NULL;
    if (!scratch) return 1;
    memcpy(tokens, x, size * sizeof(REAL));
    for (int i = 0; i < count; i++) step_block(blocks[i], batch, threads, x, tokens, scratch);
    free(scratch);
    return 0;
}

/* y (batch, dim) of x, the memory changed in place */
int titans_step_memory(Memory *memory, int batch, int threads, const REAL *x, REAL *y) {
    REAL *scratch = malloc(memory_room(memory, batch) * sizeof(REAL));
    if (!scratch) return 1;
    remember(memory, batch, threads, x, NULL, y, scratch);
    free(scratch);
    return 0;
}

/* y (rows, out) = x (rows, in) w^T */
int titans_linear(int rows, int out, int in, int threads, const REAL *w, const REAL *x, REAL *y) {
    linear(rows, out, in, w, x, y, threads);
    return 0;
}
