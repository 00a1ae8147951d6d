/* What the compiled loops share: activations, small dense products, the guard. REAL is float or double.
 *
 * Everything is contiguous and row (batch times head) major. Widths: layer l has outs[l] outputs and ins[l] inputs, a
 * bias's constant 1 included.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TINY ((REAL)1e-15)

enum { SILU, GELU, GELU_TANH, RELU };

#ifdef SINGLE
#define SQRT sqrtf
#define ERF erff
#define TANH tanhf
/* e^x to about one unit in the last place, without branches, so that a compiler can take several at once */
static inline float EXP(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    union {
        int bits;
        float value;
    } power = {((int)n + 127) << 23};
    return p * power.value;
}
#else
#define SQRT sqrt
#define ERF erf
#define TANH tanh
#define EXP exp
#endif

/* value, first and second derivative; slope and curve may be NULL */
static void activate(int kind, int n, const REAL *restrict z, REAL *restrict value, REAL *restrict slope,
                     REAL *restrict curve) {
    if (kind == SILU && !slope) {
        for (int i = 0; i < n; i++) value[i] = z[i] / (1 + EXP(-z[i]));
    } else if (kind == SILU && !curve) {
        for (int i = 0; i < n; i++) {
            REAL gate = 1 / (1 + EXP(-z[i]));
            value[i] = z[i] * gate;
            slope[i] = gate + value[i] * (1 - gate);
        }
    } else if (kind == SILU) {
        for (int i = 0; i < n; i++) {
            REAL gate = 1 / (1 + EXP(-z[i]));
            value[i] = z[i] * gate;
            slope[i] = gate + value[i] * (1 - gate);
            curve[i] = gate * (1 - gate) * (2 + z[i] * (1 - 2 * gate));
        }
    } else {
        for (int i = 0; i < n; i++) {
            REAL x = z[i], first, second;
            if (kind == GELU) {
                REAL below = (REAL)0.5 * (1 + ERF(x * (REAL)0.70710678118654752440));
                REAL density = EXP((REAL)-0.5 * x * x) * (REAL)0.39894228040143267794;
                value[i] = x * below;
                first = below + x * density;
                second = density * (2 - x * x);
            } else if (kind == GELU_TANH) {
                REAL scale = (REAL)0.79788456080286535588, cubic = (REAL)0.044715;
                REAL t = TANH(scale * (x + cubic * x * x * x));
                REAL u1 = scale * (1 + 3 * cubic * x * x), u2 = scale * 6 * cubic * x;
                REAL t1 = (1 - t * t) * u1, t2 = -2 * t * t1 * u1 + (1 - t * t) * u2;
                value[i] = (REAL)0.5 * x * (1 + t);
                first = (REAL)0.5 * (1 + t) + (REAL)0.5 * x * t1;
                second = t1 + (REAL)0.5 * x * t2;
            } else {
                value[i] = x > 0 ? x : 0;
                first = x > 0;
                second = 0;
            }
            if (slope) slope[i] = first;
            if (curve) curve[i] = second;
        }
    }
}

static REAL dot(int n, const REAL *restrict a, const REAL *restrict b) {
    REAL sum = 0;
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* y += a x */
static void add(int n, REAL a, const REAL *restrict x, REAL *restrict y) {
    for (int i = 0; i < n; i++) y[i] += a * x[i];
}
