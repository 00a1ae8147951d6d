/* RMSNorm over the last dimension. */
#include "common.h"

static REAL root(int width, const REAL *x, double eps) { return 1 / SQRT(dot(width, x, x) / width + (REAL)eps); }

int titans_rms_norm(long rows, int width, int threads, double eps, const REAL *x, const REAL *weight, REAL *y) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 64)
#endif
    for (long r = 0; r < rows; r++) {
        const REAL *in = x + r * width;
        REAL *out = y + r * width, scale = root(width, in, eps);
        for (int i = 0; i < width; i++) out[i] = in[i] * scale * weight[i];
    }
    return 0;
}

/* grad_weight is added to. */
int titans_rms_norm_backward(long rows, int width, int threads, double eps, const REAL *x, const REAL *weight,
                             const REAL *grad, REAL *grad_x, REAL *grad_weight) {
    int failed = 0;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1 && rows > 64)
#endif
    {
        REAL *sum = calloc(width, sizeof(REAL));
        if (!sum) failed = 1;
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (long r = 0; r < rows; r++) {
            if (!sum) continue;
            const REAL *in = x + r * width, *bar = grad + r * width;
            REAL *in_bar = grad_x + r * width, scale = root(width, in, eps), along = 0;
            for (int i = 0; i < width; i++) {
                REAL through = bar[i] * weight[i];
                sum[i] += bar[i] * in[i] * scale;
                along += through * in[i];
                in_bar[i] = through * scale;
            }
            add(width, -along * scale * scale * scale / width, in, in_bar);
        }
#ifdef _OPENMP
#pragma omp critical
#endif
        if (sum) add(width, 1, sum, grad_weight);
        free(sum);
    }
    return failed;
}
