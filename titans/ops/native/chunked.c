/* The chunked rule in its dual form (dual.py, chunked.py), chunk after chunk, with its backpropagation written out.
 *
 * Weights are held transposed, (in, out). What a layer reads with is one stack of rows,
 *
 *     [ D ; S ; R ; delta ]      D: the weights less what forgetting returns to, S: momentum, R: what it returns to,
 *
 * so that the dual form of a read is a single product with the rows [beta x | c x | x | -(x X^T) P step], and so is its
 * backpropagation. S and R may be missing.
 */
#include <float.h>

#include "common.h"
#include "product.h"

#ifdef SINGLE
#define LARGEST FLT_MAX
#else
#define LARGEST DBL_MAX
#endif

typedef struct {
    int rows, slots, tile, depth, width_in, width_out, activation, every;
    int bias, residual, squared, bounded, crowding, first_order, momentum, threads;
    double max_norm; /* 0: no guard */
} Settings;

/* alpha, eta, live and rest may be NULL. */
typedef struct {
    const int *outs, *ins;
    const REAL *q, *k, *v, *theta, *alpha, *eta, *live;
    const void *ends;  /* of the exact rule only */
    REAL *const *rest; /* (rows, out, in) a layer */
} Inputs;

typedef struct {
    int out, in, hidden; /* hidden: inputs without the constant 1 */
    int blocks, height;  /* parts of the stack above delta, and the stack's rows */
    REAL *stack, *anchor, *anchor_turned, *delta, *x, *x_turned, *slope, *curve, *back;
    REAL *y, *read_slope, *cat, *gram, *x_square, *delta_square;
    /* backward only */
    REAL *stack_turned, *stack_bar, *anchor_bar, *x_bar, *after_bar;
} Layer;

typedef struct {
    int b, widest;
    REAL *products, *drags, *beta, *c, *m, *step, *plain_step, *crowd, *inverse, *keys, *kappa, *total, *lost, *beneath;
    REAL *z, *value, *memory_step, *momentum_step;
    /* backward only */
    REAL *products_bar, *drags_bar, *beta_bar, *c_bar, *step_bar, *u_bar, *pulled, *gram_bar, *wide, *keys_bar;
    Layer layers[];
} Work;

static REAL *take(REAL **pool, size_t count) {
    REAL *here = *pool;
    *pool += (count + 15) & ~(size_t)15;
    return here;
}

/* Lays a row's buffers out in one allocation: called with pool NULL first, to learn its size. */
static size_t lay_out(const Settings *s, const Inputs *in, Work *w, REAL *pool, int backward) {
    REAL *start = pool;
    size_t b = w->b = s->tile, widest = s->width_in + 1, tallest = 0;
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        a->out = in->outs[l], a->in = in->ins[l], a->hidden = a->in - s->bias;
        a->blocks = 1 + s->momentum + (in->rest != NULL);
        a->height = a->blocks * a->in + s->tile;
        if ((size_t)a->in > widest) widest = a->in;
        if ((size_t)a->out > widest) widest = a->out;
        if ((size_t)a->height > tallest) tallest = a->height;
    }
    w->widest = widest;
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        size_t weight = (size_t)a->in * a->out, outs = b * a->out, ins = b * a->in;
        a->stack = take(&pool, (size_t)a->height * a->out);
        a->delta = a->stack + (size_t)a->blocks * weight;
        a->anchor = in->rest ? take(&pool, weight) : a->stack;
        a->anchor_turned = take(&pool, weight);
        a->x = take(&pool, ins), a->x_turned = take(&pool, ins), a->y = take(&pool, ins);
        a->slope = take(&pool, outs), a->curve = take(&pool, outs), a->back = take(&pool, outs);
        a->read_slope = take(&pool, outs);
        a->cat = take(&pool, b * a->height), a->gram = take(&pool, b * b);
        a->x_square = take(&pool, b), a->delta_square = take(&pool, b);
        if (!backward) continue;
        a->stack_turned = take(&pool, (size_t)a->height * a->out);
        a->stack_bar = take(&pool, (size_t)a->height * a->out);
        a->anchor_bar = take(&pool, weight), a->after_bar = take(&pool, 2 * weight), a->x_bar = take(&pool, ins);
    }
    REAL **squares[] = {&w->products, &w->drags, &w->keys};
    REAL **vectors[] = {&w->beta,  &w->c,     &w->m,    &w->step,    &w->plain_step,  &w->crowd,        &w->inverse,
                        &w->kappa, &w->total, &w->lost, &w->beneath, &w->memory_step, &w->momentum_step};
    for (size_t i = 0; i < sizeof squares / sizeof *squares; i++) *squares[i] = take(&pool, b * b);
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) *vectors[i] = take(&pool, b);
    w->z = take(&pool, b * widest), w->value = take(&pool, b * widest);
    if (backward) {
        w->products_bar = take(&pool, b * b), w->gram_bar = take(&pool, b * b), w->keys_bar = take(&pool, b * b);
        w->drags_bar = take(&pool, b), w->beta_bar = take(&pool, b), w->c_bar = take(&pool, b);
        w->step_bar = take(&pool, b);
        w->u_bar = take(&pool, b * widest), w->pulled = take(&pool, 2 * b * widest), w->wide = take(&pool, b * tallest);
    }
    return pool - start;
}

static Work *open_work(const Settings *s, const Inputs *in, int backward) {
    Work *w = calloc(1, sizeof(Work) + s->depth * sizeof(Layer));
    if (!w) return NULL;
    size_t size = lay_out(s, in, w, NULL, backward), head = (sizeof(Work) + s->depth * sizeof(Layer) + 63) & ~63ul;
    free(w);
    char *memory = NULL;
    if (posix_memalign((void **)&memory, 64, head + size * sizeof(REAL))) return NULL;
    memset(memory, 0, head + size * sizeof(REAL));
    lay_out(s, in, (Work *)memory, (REAL *)(memory + head), backward);
    return (Work *)memory;
}

static REAL keep_at(const Inputs *in, size_t token) { return in->alpha ? 1 - in->alpha[token] : 1; }

/* How much of every earlier token, of D and of S is left at each token (coefficients.py), by recurrence. */
static void weigh(const Settings *s, const Inputs *in, size_t first, Work *w) {
    int b = w->b;
    for (int t = 0; t < b; t++) {
        REAL keep = keep_at(in, first + t), *row = w->products + (size_t)t * b, *drag = w->drags + (size_t)t * b;
        REAL live = in->live ? in->live[first + t] : 1, eta = s->momentum ? in->eta[first + t] : 0;
        w->beta[t] = keep * (t ? w->beta[t - 1] : 1);
        for (int j = 0; j < t; j++) row[j] = keep * (row - b)[j];
        row[t] = 1;
        for (int j = t + 1; j < b; j++) row[j] = 0;
        if (!s->momentum) continue;
        w->m[t] = eta * (t ? w->m[t - 1] : 1);
        w->c[t] = (t ? keep * w->c[t - 1] : 0) + live * w->m[t];
        row[t] = live;
        for (int j = 0; j < t; j++) {
            drag[j] = eta * (drag - b)[j];
            row[j] += live * drag[j];
        }
        drag[t] = 1;
    }
}

/* Rows of b inputs with a constant 1 behind each if the memory has biases. */
static void copy_rows(const Settings *s, int b, int width, const REAL *from, size_t from_row, REAL *to) {
    int stride = width + s->bias;
    for (int t = 0; t < b; t++) {
        memcpy(to + (size_t)t * stride, from + t * from_row, width * sizeof(REAL));
        if (s->bias) to[(size_t)t * stride + width] = 1;
    }
}

static void squares(int b, int n, const REAL *x, REAL *result) {
    for (int t = 0; t < b; t++) result[t] = dot(n, x + (size_t)t * n, x + (size_t)t * n);
}

/* Reads go a little beyond the diagonal, where zero times what overflowed would be NaN in an earlier token. A NaN that was
 * let in stays. */
static void make_finite(const Settings *s, Work *w, const REAL *keys, const REAL *values) {
    for (int t = 0; t < w->b; t++) {
        const REAL *key = keys + (size_t)t * s->width_in, *value = values + (size_t)t * s->width_out;
        int given = 0;
        for (int i = 0; i < s->width_in; i++) given |= key[i] != key[i];
        for (int o = 0; o < s->width_out; o++) given |= value[o] != value[o];
        for (int l = 0; l < s->depth && !given; l++) {
            int out = w->layers[l].out;
            REAL *delta = w->layers[l].delta + (size_t)t * out;
            for (int o = 0; o < out; o++)
                if (!(delta[o] <= LARGEST && delta[o] >= -LARGEST))
                    delta[o] = delta[o] > 0 ? LARGEST : delta[o] < 0 ? -LARGEST : 0;
        }
    }
}

/* The key pass: every layer's inputs and deltas at the anchor, and each token's step. */
static void find_gradients(const Settings *s, const Inputs *in, size_t first, Work *w, int backward) {
    int b = w->b, depth = s->depth;
    const REAL *keys = in->k + first * s->width_in, *values = in->v + first * s->width_out;
    copy_rows(s, b, s->width_in, keys, s->width_in, w->layers[0].x);
    for (int l = 0; l < depth; l++) {
        Layer *a = &w->layers[l];
        size_t weight = (size_t)a->in * a->out;
        if (in->rest) {
            const REAL *rest = a->stack + (1 + s->momentum) * weight;
            for (size_t i = 0; i < weight; i++) a->anchor[i] = a->stack[i] + rest[i];
        }
        if (l || backward) transpose(a->in, a->out, a->anchor, a->out, a->anchor_turned, a->in);
        transpose(b, a->in, a->x, a->in, a->x_turned, b);
        product(b, a->out, a->in, plain(a->x, a->in), a->anchor, a->out, w->z, a->out, 1);
        if (l + 1 == depth) break;
        activate(s->activation, b * a->out, w->z, w->value, a->slope, backward ? a->curve : NULL);
        copy_rows(s, b, a->out, w->value, a->out, a[1].x);
    }
    Layer *last = &w->layers[depth - 1];
    int out = s->width_out;
    for (int t = 0; t < b; t++) {
        REAL total = 0, lost = 0, *error = last->delta + (size_t)t * out;
        const REAL *z = w->z + (size_t)t * out, *key = keys + (size_t)t * s->width_in, *value = values + (size_t)t * out;
        for (int o = 0; o < out; o++) {
            REAL m = s->residual ? z[o] + key[o] : z[o], e = s->squared ? m - value[o] : -value[o];
            error[o] = e;
            total += e * e;
            lost += (s->squared ? e : m) * e;
        }
        w->total[t] = total;
        w->lost[t] = lost;
        w->beneath[t] = 0;
    }
    for (int l = depth - 1; l > 0; l--) {
        Layer *a = &w->layers[l], *lower = a - 1;
        product(b, a->hidden, a->out, plain(a->delta, a->out), a->anchor_turned, a->in, lower->back, lower->out, 1);
        for (int i = 0; i < b * lower->out; i++) lower->delta[i] = lower->back[i] * lower->slope[i];
    }
    make_finite(s, w, keys, values);
    for (int l = 0; l < depth; l++) {
        Layer *a = &w->layers[l];
        squares(b, a->in, a->x, a->x_square);
        squares(b, a->out, a->delta, a->delta_square);
        if (l + 1 < depth)
            for (int t = 0; t < b; t++) w->beneath[t] += a->x_square[t] * a->delta_square[t];
    }
    if (s->crowding) {
        int wide = s->width_in;
        product_below(b, 0, wide, plain(keys, wide), w->layers[0].x_turned, b, w->keys, b);
        for (int t = 0; t < b; t++) {
            REAL sum = 0, *row = w->keys + (size_t)t * b;
            for (int j = 0; j < t; j++) sum += row[j] * row[j] * w->inverse[j];
            w->inverse[t] = (in->live ? in->live[first + t] : 1) / (row[t] + TINY);
            w->crowd[t] = 1 + sum * w->inverse[t];
        }
    }
    for (int t = 0; t < b; t++) {
        REAL step = (s->squared ? 2 : 1) * in->theta[first + t];
        if (s->crowding) step /= w->crowd[t] * w->crowd[t];
        w->plain_step[t] = step;
        w->kappa[t] = last->x_square[t] + w->beneath[t] / (w->total[t] + TINY);
        w->step[t] = s->bounded ? step / (1 + w->kappa[t]) : step;
        w->memory_step[t] = w->products[(size_t)(b - 1) * b + t] * w->step[t];
        w->momentum_step[t] = s->momentum ? w->drags[(size_t)(b - 1) * b + t] * w->step[t] : 0;
    }
}

/* y_t = M_t(q_t) for the whole chunk; leaves in w what its backpropagation needs. */
static void read_chunk(const Settings *s, const Inputs *in, size_t first, Work *w, REAL *result, int backward) {
    int b = w->b;
    const REAL *queries = in->q + first * s->width_in;
    copy_rows(s, b, s->width_in, queries, s->width_in, w->layers[0].y);
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        int wide = a->in, above = a->blocks * a->in;
        product_below(b, 0, wide, plain(a->y, wide), a->x_turned, b, a->gram, b);
        for (int t = 0; t < b; t++) {
            REAL *cat = a->cat + (size_t)t * a->height, *products = w->products + (size_t)t * b;
            REAL *gram = a->gram + (size_t)t * b, *y = a->y + (size_t)t * wide;
            int stop = t + BAND < b ? t + BAND : b; /* lower_product reads a little beyond the diagonal */
            for (int i = 0; i < wide; i++) cat[i] = w->beta[t] * y[i];
            if (s->momentum)
                for (int i = 0; i < wide; i++) cat[wide + i] = w->c[t] * y[i];
            if (in->rest) memcpy(cat + (1 + s->momentum) * wide, y, wide * sizeof(REAL));
            for (int j = 0; j <= t; j++) cat[above + j] = -gram[j] * products[j] * w->step[j];
            for (int j = t + 1; j < stop; j++) cat[above + j] = 0;
        }
        if (l + 1 == s->depth && !result) break;
        REAL *z = l + 1 == s->depth ? result : w->z;
        lower_product(b, a->out, above, plain(a->cat, a->height), a->stack, a->out, z, a->out, 1);
        if (l + 1 == s->depth) break;
        activate(s->activation, b * a->out, w->z, w->value, backward ? a->read_slope : NULL, NULL);
        copy_rows(s, b, a->out, w->value, a->out, a[1].y);
    }
    if (result && s->residual)
        for (int i = 0; i < b * s->width_out; i++) result[i] += queries[i];
}

/* No column of w (in, out) keeps a norm above max_norm; says whether one was longer. */
static int clip(int in, int out, REAL *restrict w, REAL max_norm, REAL *restrict square) {
    memset(square, 0, out * sizeof(REAL));
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) square[o] += w[(size_t)i * out + o] * w[(size_t)i * out + o];
    int clipped = 0;
    for (int o = 0; o < out; o++) clipped |= !(square[o] <= max_norm * max_norm);
    if (!clipped) return 0;
    for (int o = 0; o < out; o++) {
        REAL norm = SQRT(square[o]);
        square[o] = norm > max_norm ? max_norm / norm : norm == norm ? 1 : norm;
    }
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) w[(size_t)i * out + o] *= square[o];
    return 1;
}

/* D and S after the chunk: in place, or into `after` (D then S of a layer). */
static void advance(const Settings *s, Work *w, int l, REAL *after) {
    Layer *a = &w->layers[l];
    int b = w->b, end = b - 1;
    size_t weight = (size_t)a->in * a->out;
    REAL *d = a->stack, *m = a->stack + weight, *next_d = after ? after : d, *next_m = after ? after + weight : m;
    REAL beta = w->beta[end], c = w->c[end], drag = w->m[end];
    if (s->momentum)
        for (size_t i = 0; i < weight; i++) {
            REAL moved = m[i];
            next_d[i] = beta * d[i] + c * moved;
            next_m[i] = drag * moved;
        }
    else
        for (size_t i = 0; i < weight; i++) next_d[i] = beta * d[i];
    for (int part = 0; part <= s->momentum; part++) {
        const REAL *step = part ? w->momentum_step : w->memory_step;
        for (int t = 0; t < b; t++)
            for (int o = 0; o < a->out; o++) w->z[(size_t)t * a->out + o] = -step[t] * a->delta[(size_t)t * a->out + o];
        product(a->in, a->out, b, turned(a->x, a->in), w->z, a->out, part ? next_m : next_d, a->out, 0);
    }
}

static void load_rest(const Settings *s, const Inputs *in, Work *w, int row) {
    if (!in->rest) return;
    for (int l = 0; l < s->depth; l++) {
        Layer *a = &w->layers[l];
        size_t weight = (size_t)a->in * a->out;
        transpose(a->out, a->in, in->rest[l] + row * weight, a->in, a->stack + (1 + s->momentum) * weight, a->out);
    }
}

/* weights, momenta: (rows, out, in), changed in place. saved: if not NULL, D and S (in, out) at every `every`-th chunk,
 * layer by layer. clipped (rows, chunks) is set to 1 where the guard acted, unless NULL. */
int titans_chunked(const Settings *s, const Inputs *in, REAL **weights, REAL **momenta, REAL **saved,
                   unsigned char *clipped, REAL *y, REAL *gradient, REAL *loss) {
    int failed = 0, tiles = s->slots / s->tile, kept = (tiles + s->every - 1) / s->every;
#ifdef _OPENMP
#pragma omp parallel for num_threads(s->threads) schedule(static) if (s->threads > 1 && s->rows > 1)
#endif
    for (int r = 0; r < s->rows; r++) {
        Work *w = open_work(s, in, 0);
        if (!w) {
            failed = 1;
            continue;
        }
        load_rest(s, in, w, r);
        for (int l = 0; l < s->depth; l++) {
            Layer *a = &w->layers[l];
            size_t weight = (size_t)a->in * a->out;
            transpose(a->out, a->in, weights[l] + r * weight, a->in, a->stack, a->out);
            if (s->momentum) transpose(a->out, a->in, momenta[l] + r * weight, a->in, a->stack + weight, a->out);
        }
        for (int tile = 0; tile < tiles; tile++) {
            size_t first = (size_t)r * s->slots + (size_t)tile * s->tile;
            if (saved && tile % s->every == 0)
                for (int l = 0; l < s->depth; l++) {
                    Layer *a = &w->layers[l];
                    size_t size = (size_t)(1 + s->momentum) * a->in * a->out;
                    memcpy(saved[l] + ((size_t)r * kept + tile / s->every) * size, a->stack, size * sizeof(REAL));
                }
            weigh(s, in, first, w);
            find_gradients(s, in, first, w, 0);
            if (gradient)
                for (int t = 0; t < s->tile; t++) {
                    gradient[first + t] = w->kappa[t] * w->total[t];
                    loss[first + t] = w->lost[t];
                }
            read_chunk(s, in, first, w, y + first * s->width_out, 0);
            for (int l = 0; l < s->depth; l++) {
                Layer *a = &w->layers[l];
                advance(s, w, l, NULL);
                for (int part = 0; part <= s->momentum && s->max_norm > 0; part++) {
                    REAL *weight = a->stack + (size_t)part * a->in * a->out;
                    if (clip(a->in, a->out, weight, (REAL)s->max_norm, w->z) && clipped)
                        clipped[(size_t)r * tiles + tile] = 1;
                }
            }
        }
        for (int l = 0; l < s->depth; l++) {
            Layer *a = &w->layers[l];
            size_t weight = (size_t)a->in * a->out;
            transpose(a->in, a->out, a->stack, a->out, weights[l] + r * weight, a->in);
            if (s->momentum) transpose(a->in, a->out, a->stack + weight, a->out, momenta[l] + r * weight, a->in);
        }
        free(w);
    }
    return failed;
}

/* Pulls a gradient back through clip; w (in, out) is what was clipped. */
static void clip_back(int in, int out, const REAL *w, REAL *bar, REAL max_norm) {
    for (int o = 0; o < out; o++) {
        REAL square = 0, along = 0;
        for (int i = 0; i < in; i++) {
            REAL x = w[(size_t)i * out + o];
            square += x * x;
            along += x * bar[(size_t)i * out + o];
        }
        REAL norm = SQRT(square);
        if (norm > max_norm)
            for (int i = 0; i < in; i++) {
                size_t at = (size_t)i * out + o;
                bar[at] = max_norm / norm * (bar[at] - along / square * w[at]);
            }
    }
}

/* Backpropagates the writes: after_bar holds the gradients of D' and S', stack_bar receives those of D, S and delta. */
static void advance_back(const Settings *s, Work *w, int l, int clipped, REAL *next, REAL *m_bar) {
    Layer *a = &w->layers[l];
    int b = w->b, end = b - 1, out = a->out, parts = 1 + s->momentum;
    size_t weight = (size_t)a->in * out;
    REAL *d_bar = a->stack_bar, *s_bar = d_bar + weight;
    if (clipped) {
        advance(s, w, l, next);
        for (int part = 0; part < parts; part++)
            clip_back(a->in, out, next + part * weight, a->after_bar + part * weight, (REAL)s->max_norm);
    }
    REAL *after = a->after_bar, *delta_bar = a->stack_bar + (size_t)a->blocks * weight;
    w->beta_bar[end] += dot(weight, after, a->stack);
    if (s->momentum) {
        w->c_bar[end] += dot(weight, after, a->stack + weight);
        *m_bar += dot(weight, after + weight, a->stack + weight);
    }
    memset(delta_bar, 0, (size_t)b * out * sizeof(REAL));
    memset(a->x_bar, 0, (size_t)b * a->in * sizeof(REAL));
    for (int part = 0; part < parts; part++) {
        const REAL *applied = part ? w->momentum_step : w->memory_step;
        const REAL *row = (part ? w->drags : w->products) + (size_t)end * b;
        REAL *row_bar = part ? w->drags_bar : w->products_bar + (size_t)end * b;
        product(b, out, a->in, plain(a->x, a->in), after + part * weight, out, w->pulled, out, 1);
        for (int t = 0; t < b; t++) {
            REAL *delta = a->delta + (size_t)t * out, *pulled = w->pulled + (size_t)t * out;
            REAL along = -dot(out, delta, pulled);
            row_bar[t] += along * w->step[t];
            w->step_bar[t] += along * row[t];
            for (int o = 0; o < out; o++) {
                delta_bar[(size_t)t * out + o] -= applied[t] * pulled[o];
                w->z[(size_t)t * out + o] = -applied[t] * delta[o];
            }
        }
        transpose(a->in, out, after + part * weight, out, next, a->in);
        product(b, a->in, out, plain(w->z, out), next, a->in, a->x_bar, a->in, 0);
    }
    REAL beta = w->beta[end], c = w->c[end], drag = w->m[end];
    for (size_t i = 0; i < weight; i++) d_bar[i] = beta * after[i];
    if (s->momentum)
        for (size_t i = 0; i < weight; i++) s_bar[i] = c * after[i] + drag * after[weight + i];
}

/* Backpropagates the reads, from the gradient of y; adds to stack_bar, x_bar and the coefficients' gradients. */
static void read_back(const Settings *s, const Inputs *in, Work *w, const REAL *y_bar, REAL *q_bar) {
    int b = w->b, depth = s->depth;
    memcpy(w->u_bar, y_bar, (size_t)b * s->width_out * sizeof(REAL));
    for (int l = depth - 1; l >= 0; l--) {
        Layer *a = &w->layers[l];
        int wide = a->in, above = a->blocks * wide, height = a->height, out = a->out;
        transpose(height, out, a->stack, out, a->stack_turned, height);
        product_below(b, above, out, plain(w->u_bar, out), a->stack_turned, height, w->wide, height);
        product(above, out, b, turned(a->cat, height), w->u_bar, out, a->stack_bar, out, 0);
        lower_transposed_product(b, out, a->cat + above, height, w->u_bar, out, a->stack_bar + (size_t)above * out, out);
        REAL *y_grad = w->pulled;
        for (int t = 0; t < b; t++) {
            REAL *pulled = w->wide + (size_t)t * height, *y = a->y + (size_t)t * wide, *row = y_grad + (size_t)t * wide;
            REAL beta = w->beta[t], c = s->momentum ? w->c[t] : 0;
            w->beta_bar[t] += dot(wide, y, pulled);
            for (int i = 0; i < wide; i++) row[i] = beta * pulled[i];
            if (s->momentum) {
                w->c_bar[t] += dot(wide, y, pulled + wide);
                add(wide, c, pulled + wide, row);
            }
            if (in->rest) add(wide, 1, pulled + (1 + s->momentum) * wide, row);
            REAL *errors = pulled + above, *gram = a->gram + (size_t)t * b, *products = w->products + (size_t)t * b;
            REAL *gram_bar = w->gram_bar + (size_t)t * b, *products_bar = w->products_bar + (size_t)t * b;
            for (int j = 0; j <= t; j++) {
                REAL applied = -errors[j] * gram[j];
                products_bar[j] += applied * w->step[j];
                w->step_bar[j] += applied * products[j];
                gram_bar[j] = -errors[j] * products[j] * w->step[j];
            }
            for (int j = t + 1; j < b; j++) gram_bar[j] = 0;
        }
        lower_product(b, wide, 0, plain(w->gram_bar, b), a->x, wide, y_grad, wide, 0);
        lower_transposed_product(b, wide, w->gram_bar, b, a->y, wide, a->x_bar, wide);
        if (l) {
            Layer *lower = a - 1;
            for (int t = 0; t < b; t++)
                for (int i = 0; i < lower->out; i++) {
                    size_t at = (size_t)t * lower->out + i;
                    w->u_bar[at] = y_grad[(size_t)t * wide + i] * lower->read_slope[at];
                }
        } else
            for (int t = 0; t < b; t++)
                for (int i = 0; i < s->width_in; i++) {
                    size_t at = (size_t)t * s->width_in + i;
                    q_bar[at] = y_grad[(size_t)t * wide + i] + (s->residual ? y_bar[at] : 0);
                }
    }
}

/* Backpropagates the steps: the bound, the crowding and the surprise; adds to x_bar and delta's gradient, sets keys_bar. */
static void step_back(const Settings *s, const Inputs *in, size_t first, Work *w, const REAL *gradient_bar,
                      const REAL *loss_bar, REAL *theta_bar) {
    int b = w->b, depth = s->depth;
    memset(w->keys_bar, 0, (size_t)b * b * sizeof(REAL));
    REAL later[b]; /* the gradient of every 1 / ||k||^2 */
    memset(later, 0, sizeof later);
    for (int t = b - 1; t >= 0; t--) {
        REAL step_bar = w->step_bar[t], kappa_bar = 0, total_bar = 0;
        if (s->bounded) {
            kappa_bar = -step_bar * w->step[t] / (1 + w->kappa[t]);
            step_bar /= 1 + w->kappa[t];
        }
        if (gradient_bar) {
            kappa_bar += gradient_bar[first + t] * w->total[t];
            total_bar += gradient_bar[first + t] * w->kappa[t];
            if (s->squared) total_bar += loss_bar[first + t];
        }
        REAL share = kappa_bar / (w->total[t] + TINY);
        total_bar -= share * w->beneath[t] / (w->total[t] + TINY);
        for (int l = 0; l < depth && (s->bounded || gradient_bar); l++) {
            Layer *a = &w->layers[l];
            REAL *delta_bar = a->stack_bar + ((size_t)a->blocks * a->in + t) * a->out;
            int last = l + 1 == depth;
            add(a->in, 2 * (last ? kappa_bar : share * a->delta_square[t]), a->x + (size_t)t * a->in,
                a->x_bar + (size_t)t * a->in);
            add(a->out, 2 * (last ? total_bar : share * a->x_square[t]), a->delta + (size_t)t * a->out, delta_bar);
        }
        REAL scale = s->squared ? 2 : 1;
        if (!s->crowding) {
            theta_bar[first + t] = scale * step_bar;
            continue;
        }
        REAL crowd = w->crowd[t], inverse = w->inverse[t], *row = w->keys + (size_t)t * b;
        theta_bar[first + t] = scale * step_bar / (crowd * crowd);
        REAL crowd_bar = -2 * step_bar * w->plain_step[t] / crowd, sum_bar = crowd_bar * inverse, sum = 0;
        REAL *row_bar = w->keys_bar + (size_t)t * b;
        for (int j = 0; j < t; j++) {
            REAL square = row[j] * row[j];
            sum += square * w->inverse[j];
            later[j] += sum_bar * square;
            row_bar[j] = 2 * sum_bar * row[j] * w->inverse[j];
        }
        later[t] += crowd_bar * sum;
        row_bar[t] = -later[t] * inverse * inverse;
    }
}

/* Backpropagates the key pass, from x_bar and delta's gradients to keys, values and the anchor. */
static void find_gradients_back(const Settings *s, const Inputs *in, size_t first, Work *w, const REAL *loss_bar,
                                REAL *k_bar, REAL *v_bar) {
    int b = w->b, depth = s->depth, out = s->width_out;
    for (int l = 0; l < depth; l++) memset(w->layers[l].anchor_bar, 0, (size_t)w->layers[l].in * w->layers[l].out * sizeof(REAL));
    for (int l = 1; l < depth; l++) {
        Layer *a = &w->layers[l], *lower = a - 1;
        REAL *delta_bar = a->stack_bar + (size_t)a->blocks * a->in * a->out;
        REAL *lower_bar = lower->stack_bar + (size_t)lower->blocks * lower->in * lower->out;
        /* lower_bar becomes the gradient of back, lower->back that of z through the slope */
        for (int i = 0; i < b * lower->out; i++) {
            REAL bar = lower_bar[i];
            lower->back[i] *= bar * lower->curve[i];
            lower_bar[i] = bar * lower->slope[i];
        }
        product(b, a->out, lower->out, plain(lower_bar, lower->out), a->anchor, a->out, delta_bar, a->out, 0);
        if (!s->first_order)
            product(lower->out, a->out, b, turned(lower_bar, lower->out), a->delta, a->out, a->anchor_bar, a->out, 0);
    }
    Layer *last = &w->layers[depth - 1];
    REAL *error_bar = last->stack_bar + (size_t)last->blocks * last->in * last->out;
    for (int t = 0; t < b; t++)
        for (int o = 0; o < out; o++) {
            size_t at = (size_t)t * out + o;
            REAL bar = error_bar[at], m_bar = 0;
            if (s->squared)
                m_bar = bar;
            else if (loss_bar) {
                m_bar = loss_bar[first + t] * last->delta[at];
                REAL m = w->z[at] + (s->residual ? in->k[first * s->width_in + at] : 0);
                bar += loss_bar[first + t] * m;
            }
            v_bar[at] = -bar;
            w->u_bar[at] = m_bar;
        }
    if (s->residual) memcpy(k_bar, w->u_bar, (size_t)b * out * sizeof(REAL));
    else memset(k_bar, 0, (size_t)b * s->width_in * sizeof(REAL));
    for (int l = depth - 1; l >= 0; l--) {
        Layer *a = &w->layers[l];
        product(b, a->in, a->out, plain(w->u_bar, a->out), a->anchor_turned, a->in, a->x_bar, a->in, 0);
        if (!s->first_order)
            product(a->in, a->out, b, turned(a->x, a->in), w->u_bar, a->out, a->anchor_bar, a->out, 0);
        if (!l) break;
        Layer *lower = a - 1;
        for (int t = 0; t < b; t++)
            for (int i = 0; i < lower->out; i++) {
                size_t at = (size_t)t * lower->out + i;
                w->u_bar[at] = a->x_bar[(size_t)t * a->in + i] * lower->slope[at] + lower->back[at];
            }
    }
    Layer *zero = &w->layers[0];
    int wide = s->width_in;
    for (int t = 0; t < b; t++) add(wide, 1, zero->x_bar + (size_t)t * zero->in, k_bar + (size_t)t * wide);
    if (!s->crowding) return;
    const REAL *keys = in->k + first * wide;
    lower_product(b, wide, 0, plain(w->keys_bar, b), keys, wide, k_bar, wide, 0);
    lower_transposed_product(b, wide, w->keys_bar, b, keys, wide, k_bar, wide);
}

/* Backpropagates the coefficients to the gates. */
static void weigh_back(const Settings *s, const Inputs *in, size_t first, Work *w, REAL m_bar, REAL *alpha_bar,
                       REAL *eta_bar) {
    int b = w->b;
    REAL beta_later = 0, c_later = 0, m_later = m_bar;
    for (int t = b - 1; t >= 0; t--) {
        REAL keep = keep_at(in, first + t), *row_bar = w->products_bar + (size_t)t * b, keep_bar = 0, drag_bar = 0;
        const REAL *before = w->products + (size_t)(t - 1) * b;
        REAL beta_bar = w->beta_bar[t] + beta_later;
        keep_bar += beta_bar * (t ? w->beta[t - 1] : 1);
        beta_later = keep * beta_bar;
        if (s->momentum) {
            REAL live = in->live ? in->live[first + t] : 1, eta = in->eta[first + t];
            const REAL *drag_before = w->drags + (size_t)(t - 1) * b;
            REAL c_bar = w->c_bar[t] + c_later;
            if (t) keep_bar += c_bar * w->c[t - 1];
            c_later = keep * c_bar;
            REAL all = m_later + live * c_bar;
            drag_bar += all * (t ? w->m[t - 1] : 1);
            m_later = eta * all;
            for (int j = 0; j < t; j++) {
                REAL bar = w->drags_bar[j] + live * row_bar[j];
                drag_bar += bar * drag_before[j];
                w->drags_bar[j] = eta * bar;
            }
            eta_bar[first + t] = drag_bar;
        }
        if (t)
            for (int j = 0; j < t; j++) {
                keep_bar += row_bar[j] * before[j];
                (row_bar - b)[j] += keep * row_bar[j];
            }
        if (alpha_bar) alpha_bar[first + t] = -keep_bar;
    }
}

static void forward_chunk(const Settings *s, const Inputs *in, size_t first, Work *w) {
    weigh(s, in, first, w);
    find_gradients(s, in, first, w, 1);
}

/* Gradients of everything that went in. grad_weights, grad_momenta (rows, out, in) hold those of the final state on
 * entry and those of the initial state on exit; grad_rest is added to. saved and clipped are what titans_chunked left.
 * grad_gradient and grad_loss may be NULL. */
int titans_chunked_backward(const Settings *s, const Inputs *in, REAL **saved, const unsigned char *clipped, const REAL *grad_y,
                            const REAL *grad_gradient, const REAL *grad_loss, REAL **grad_weights, REAL **grad_momenta,
                            REAL *grad_q, REAL *grad_k, REAL *grad_v, REAL *grad_theta, REAL *grad_alpha,
                            REAL *grad_eta, REAL **grad_rest) {
    int failed = 0, tiles = s->slots / s->tile, kept = (tiles + s->every - 1) / s->every, b = s->tile;
    int parts = 1 + s->momentum;
    size_t state = 0, largest = 0;
    for (int l = 0; l < s->depth; l++) {
        size_t weight = (size_t)in->ins[l] * in->outs[l];
        state += parts * weight;
        if (weight > largest) largest = weight;
    }
#ifdef _OPENMP
#pragma omp parallel for num_threads(s->threads) schedule(static) if (s->threads > 1 && s->rows > 1)
#endif
    for (int r = 0; r < s->rows; r++) {
        Work *w = open_work(s, in, 1);
        REAL *states = malloc((state * (s->every > 1 ? s->every : 0) + 2 * largest) * sizeof(REAL));
        if (!w || !states) {
            failed = 1;
            free(w), free(states);
            continue;
        }
        REAL *next = states + state * (s->every > 1 ? s->every : 0);
        load_rest(s, in, w, r);
        for (int l = 0; l < s->depth; l++) {
            Layer *a = &w->layers[l];
            size_t weight = (size_t)a->in * a->out;
            transpose(a->out, a->in, grad_weights[l] + r * weight, a->in, a->after_bar, a->out);
            if (s->momentum) transpose(a->out, a->in, grad_momenta[l] + r * weight, a->in, a->after_bar + weight, a->out);
        }
        for (int group = kept - 1; group >= 0; group--) {
            int from = group * s->every, stop = from + s->every < tiles ? from + s->every : tiles;
            for (int l = 0; l < s->depth; l++) {
                Layer *a = &w->layers[l];
                size_t size = (size_t)parts * a->in * a->out;
                memcpy(a->stack, saved[l] + ((size_t)r * kept + group) * size, size * sizeof(REAL));
            }
            for (int tile = from; tile + 1 < stop; tile++) { /* forward once more, keeping every chunk's start */
                REAL *at = states + state * (tile - from);
                forward_chunk(s, in, (size_t)r * s->slots + (size_t)tile * b, w);
                for (int l = 0; l < s->depth; l++) {
                    Layer *a = &w->layers[l];
                    size_t weight = (size_t)a->in * a->out;
                    memcpy(at, a->stack, parts * weight * sizeof(REAL));
                    at += parts * weight;
                    advance(s, w, l, NULL);
                    for (int part = 0; part < parts && s->max_norm > 0; part++)
                        clip(a->in, a->out, a->stack + part * weight, (REAL)s->max_norm, w->z);
                }
            }
            for (int tile = stop - 1; tile >= from; tile--) {
                size_t first = (size_t)r * s->slots + (size_t)tile * b;
                if (tile + 1 < stop) {
                    const REAL *at = states + state * (tile - from);
                    for (int l = 0; l < s->depth; l++) {
                        Layer *a = &w->layers[l];
                        size_t size = (size_t)parts * a->in * a->out;
                        memcpy(a->stack, at, size * sizeof(REAL));
                        at += size;
                    }
                }
                forward_chunk(s, in, first, w);
                REAL m_bar = 0;
                memset(w->products_bar, 0, (size_t)b * b * sizeof(REAL));
                memset(w->drags_bar, 0, b * sizeof(REAL));
                memset(w->beta_bar, 0, b * sizeof(REAL));
                memset(w->c_bar, 0, b * sizeof(REAL));
                memset(w->step_bar, 0, b * sizeof(REAL));
                for (int l = 0; l < s->depth; l++)
                    advance_back(s, w, l, clipped[(size_t)r * tiles + tile], next, &m_bar);
                read_chunk(s, in, first, w, NULL, 1);
                read_back(s, in, w, grad_y + first * s->width_out, grad_q + first * s->width_in);
                step_back(s, in, first, w, grad_gradient, grad_loss, grad_theta);
                if (!s->squared && grad_loss) { /* w->z once more: the memory's output at the keys */
                    Layer *a = &w->layers[s->depth - 1];
                    product(b, a->out, a->in, plain(a->x, a->in), a->anchor, a->out, w->z, a->out, 1);
                }
                find_gradients_back(s, in, first, w, grad_loss, grad_k + first * s->width_in, grad_v + first * s->width_out);
                weigh_back(s, in, first, w, m_bar, grad_alpha, grad_eta);
                for (int l = 0; l < s->depth; l++) {
                    Layer *a = &w->layers[l];
                    size_t weight = (size_t)a->in * a->out;
                    for (size_t i = 0; i < weight; i++) a->after_bar[i] = a->stack_bar[i] + a->anchor_bar[i];
                    if (s->momentum) memcpy(a->after_bar + weight, a->stack_bar + weight, weight * sizeof(REAL));
                    if (in->rest && !s->first_order) add(weight, 1, a->anchor_bar, a->stack_bar + parts * weight);
                }
            }
        }
        for (int l = 0; l < s->depth; l++) {
            Layer *a = &w->layers[l];
            size_t weight = (size_t)a->in * a->out;
            transpose(a->in, a->out, a->after_bar, a->out, grad_weights[l] + r * weight, a->in);
            if (s->momentum) transpose(a->in, a->out, a->after_bar + weight, a->out, grad_momenta[l] + r * weight, a->in);
            if (in->rest) {
                transpose(a->in, a->out, a->stack_bar + parts * weight, a->out, a->anchor, a->in);
                add(weight, 1, a->anchor, grad_rest[l] + r * weight);
            }
        }
        free(w), free(states);
    }
    return failed;
}
